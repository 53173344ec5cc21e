"""The training loop: optax updates, checkpoints, and a resume that repeats nothing.

Step k is a function of the parameters before it and of batch k, which is a function of the seed and
k: a run that was killed and goes on from its last checkpoint ends with the same parameters, bit for
bit on one machine. The best checkpoint is the one with the highest `SCORE` on held-out texts, which
the loss predicts poorly. The metrics are lines of JSON, and a figure is drawn from them.
"""

import importlib.util
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspec.common import processes
from jspec.common.errors import InputError, say
from jspec.common.figures import Curves, draw
from jspec.common.journal import Journal, Record
from jspec.common.progress import format_seconds
from jspec.common.typing import Params
from jspec.training.chain_loss import SCORE
from jspec.training.checkpoints import Checkpoints, TrainState
from jspec.training.config import LossFn, Recipe, Trainee, cast
from jspec.training.model_loss import COVERED, COVERED_BEFORE
from jspec.training.packing import Batches, Rows
from jspec.training.placement import ON_ONE, Placement

METRICS = "metrics.jsonl"
_CAPTION = (
    "Loss on the texts trained on; tokens per target call at temperature 0 on held-out texts; "
    "and the probability at temperature 1 that each draft of a chain is accepted there, among the "
    "tokens that the drafter can propose."
)
_NORM = "gradient_norm"
_norm = jax.jit(optax.tree.norm)


def train(
    trainee: Trainee,
    batches: Batches,
    held_out: Sequence[Rows],
    recipe: Recipe,
    workdir: pathlib.Path,
    place: Placement = ON_ONE,
    is_over: Callable[[int], bool] = lambda step: False,
) -> tuple[Params, dict[str, Any]]:
    """Trains, or goes on where a run in the same folder was killed.

    The workdir gets `metrics.jsonl` and `checkpoints/`; `held_out` are batches to score on. A run
    may be resumed on another mesh. Returns the parameters of the best score, and its metrics.

    `is_over(step)` is called after each step, and ends the run if it returns True: for a program
    whose time is limited. The parameters depend on that step.

    Raises:
      InputError: the loss or its gradient is not finite, or the disk is full.
    """
    optimizer, loss_fn = make_optimizer(recipe), with_precision(trainee.loss, recipe)
    params = jax.tree.map(jnp.copy, trainee.params)  # updates donate the state's memory
    update, evaluate = _make_update(loss_fn, optimizer, place), make_evaluate(loss_fn, place)
    checkpoints, frozen = Checkpoints(workdir, recipe), place.put(trainee.frozen)
    first = place.put(TrainState(params, optimizer.init(params)))
    state, step = checkpoints.restore(first)
    if step > 0:
        say(f"going on after step {step} of {recipe.num_steps}")
    log = _open_log(workdir, step)
    begin, first_step, is_last = time.monotonic(), step, False
    while step < recipe.num_steps and not is_last and not checkpoints.is_stale():
        losses = []
        for index in range(step * recipe.accumulate, (step + 1) * recipe.accumulate):
            state, loss, metrics = update(state, frozen, place.put_rows(batches[index]))
            where = f"of step {step + 1}, batch {index},"
            losses.append(_check_finite(f"the loss {where}", loss, checkpoints))
            _check_finite(f"the gradient {where}", metrics[_NORM], checkpoints)
        step += 1
        is_last = is_over(step) or step == recipe.num_steps
        if step % recipe.log_every == 0 or is_last:
            left = (recipe.num_steps - step) * (time.monotonic() - begin) / (step - first_step)
            log({"step": step, "loss": float(np.mean(losses)), **_as_lists(metrics)})
            say(f"step {step} of {recipe.num_steps}: loss {np.mean(losses):.3f}, "
                   f"about {format_seconds(left)} left")  # fmt: skip
        if step % recipe.evaluate_every == 0 or is_last:
            what = f"the size of the parameters after step {step}"
            _check_finite(what, _norm(state.params), checkpoints)
            scores = evaluate(state.params, frozen, held_out)
            log({"step": step, "held_out": scores})
            say(f"step {step}: {describe(scores)}")
            checkpoints.save(step, state, scores)
    if step < recipe.num_steps:
        reason = (
            "its time is over" if is_last else f"no better score in {recipe.patience} evaluations"
        )
        say(f"stopped: {reason}")
    return checkpoints.best(state)


def _open_log(workdir: pathlib.Path, step: int) -> Callable[[Record], object]:
    """Returns what the first process logs with; lines of later steps than this one are cut off."""
    if not processes.is_first():
        return lambda record: None
    log = Journal(workdir / METRICS)
    log.cut(sum(record["step"] <= step for record in log.read()))  # not those after a checkpoint
    return log.append


def describe(metrics: Mapping[str, Any]) -> str:
    """Returns in one line how well a trainee does on held-out texts."""
    text = f"{metrics[SCORE]:.3f} tokens per call on held-out texts"
    if COVERED in metrics:
        text += (
            " if trees were checked (not yet in jspec); a draft agrees with the target at "
            f"{metrics[COVERED]:.1%} of the positions, without this one at "
            f"{metrics[COVERED_BEFORE]:.1%}"
        )
    return text


def _check_finite(what: str, value: Any, checkpoints: Checkpoints) -> float:
    """Returns the value as a number, if it is finite."""
    number = float(value)
    if not math.isfinite(number):
        raise InputError(
            f"{what} is {number}: stopped; the last good checkpoint is in {checkpoints.folder}"
        )
    return number


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Returns AdamW with clipped gradients, a warm-up and a cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=recipe.learning_rate,
        warmup_steps=min(recipe.warmup_steps, recipe.num_steps - 1),
        decay_steps=recipe.num_steps,
        end_value=0.1 * recipe.learning_rate,
    )
    update = optax.chain(
        optax.clip_by_global_norm(recipe.max_norm),
        optax.adamw(schedule, b2=0.95, weight_decay=recipe.weight_decay),
    )
    if recipe.accumulate == 1:
        return update
    return optax.MultiSteps(update, recipe.accumulate).gradient_transformation()


def with_precision(loss: LossFn, recipe: Recipe) -> LossFn:
    """Returns a loss of parameters rounded to the recipe's type, recomputed as it says."""

    def rounded(params: Params, frozen: Any, rows: Rows) -> tuple[jax.Array, dict]:
        return loss(cast(params, recipe.compute_dtype), frozen, rows)

    if recipe.remat == "none":
        return rounded
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(rounded, policy=policy)


def _make_update(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, place: Placement
) -> Callable[..., Any]:
    def update(state: TrainState, frozen: Any, rows: Rows) -> Any:
        grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, metrics), grads = grad(state.params, frozen, rows)
        changes, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        metrics = metrics | {_NORM: optax.tree.norm(grads)}
        state = TrainState(optax.apply_updates(state.params, changes), optimizer_state)
        return place.keep(state), *place.share((loss, metrics))

    return jax.jit(update, donate_argnums=0)


def make_evaluate(
    loss: LossFn, place: Placement = ON_ONE
) -> Callable[[Params, Any, Iterable[Rows]], dict[str, Any]]:
    """Returns (params, frozen parameters, batches) -> means of metrics over answers' tokens."""

    @jax.jit
    def weighted(params: Params, frozen: Any, rows: Rows) -> tuple[dict, jax.Array]:
        metrics = loss(params, frozen, rows)[1]
        # Nothing predicts the first token of a text.
        is_scored = jnp.asarray(rows.is_answer) & (jnp.asarray(rows.positions) > 0)
        count = jnp.sum(is_scored).astype(jnp.float32)
        return place.share(({name: value * count for name, value in metrics.items()}, count))

    def evaluate(params: Params, frozen: Any, batches: Iterable[Rows]) -> dict[str, Any]:
        results = [weighted(params, frozen, place.put_rows(rows)) for rows in batches]
        sums, total = jax.tree.map(
            lambda *values: np.sum(values, axis=0, dtype=np.float64), *results
        )
        return _as_lists({name: value / max(total, 1.0) for name, value in sums.items()})

    return evaluate


def _as_lists(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value, np.float64).tolist() for name, value in metrics.items()}


def training_curves(records: Sequence[Record]) -> list[Curves]:
    """Returns the panels for which a log has entries: loss, score, acceptance of each draft."""
    logged = [record for record in records if "loss" in record]
    evaluated = [record for record in records if "held_out" in record]
    scores = [record["held_out"][SCORE] for record in evaluated]
    chains = [np.atleast_1d(record["held_out"].get("acceptance", [])) for record in evaluated]
    drafts = np.transpose(chains).tolist() if chains else []
    panels = [
        (logged, {"loss": [record["loss"] for record in logged]}, "loss"),
        (evaluated, {"tokens per call": scores}, "tokens per call, held-out texts"),
        (evaluated, {f"draft {i}": values for i, values in enumerate(drafts, 1)},
         "acceptance, held-out texts"),
    ]  # fmt: skip
    return [
        Curves([record["step"] for record in points], lines, "step", label)
        for points, lines, label in panels
        if points and lines
    ]


def write_figures(workdir: pathlib.Path) -> None:
    """Draws a run into WORKDIR/figures, as PNG and SVG; a note says so without matplotlib.

    Raises:
      InputError: the files cannot be written.
    """
    panels = training_curves(Journal(workdir / METRICS).read())
    if not panels:
        return
    if importlib.util.find_spec("matplotlib") is None:
        said = 'no figure is drawn without matplotlib: pip install "jspec[report]"'
        say(f"note: {said}")
        return
    picture = draw("training", panels, caption=_CAPTION, title=f"Training: {workdir.name}")
    folder = workdir / "figures"
    try:
        folder.mkdir(exist_ok=True)
        (folder / "training.svg").write_text(picture.svg, encoding="utf-8")
        (folder / "training.png").write_bytes(picture.png)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}") from None
