"""The training loop: optax updates, Orbax checkpoints, and a resume that repeats nothing.

Step k is a function of the parameters before it and of batch k, which is a function of the seed and
k: a run that was killed and goes on from its last checkpoint ends with the same parameters, to the
bit on one machine. The best checkpoint is the one whose drafts would be kept most often on texts
that were held out; a loss says little about that.
"""

import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspec.common.errors import InputError
from jspec.common.progress import format_seconds
from jspec.common.typing import Params
from jspec.training.checkpoints import Checkpoints, TrainState
from jspec.training.metrics_log import MetricsLog
from jspec.training.recipe import Recipe
from jspec.training.texts import Batches, Rows
from jspec.training.trainee import Trainee, describe

_NORM = "gradient_norm"


def train(
    trainee: Trainee,
    target_params: Params,
    batches: Batches,
    held_out: Sequence[Rows],
    recipe: Recipe,
    workdir: pathlib.Path,
) -> tuple[Params, dict[str, Any]]:
    """Trains, or goes on where a run in the same folder was killed.

    Args:
      trainee: what is trained.
      target_params: the frozen target's.
      batches: to train on.
      held_out: batches to score on.
      recipe: how.
      workdir: gets `metrics.jsonl`, `tensorboard/` and `checkpoints/`.

    Returns:
      The parameters of the best score, and the metrics then.

    Raises:
      InputError: the loss or its gradient is not finite, or the disk is full.
    """
    optimizer, trainee = recipe.optimizer(), recipe.apply_to(trainee)
    params = jax.tree.map(jnp.copy, trainee.params)  # the state's own: updates take it over
    state = TrainState(params, optimizer.init(params))
    update = _make_update(trainee, optimizer)
    evaluate = jax.jit(trainee.evaluate)
    checkpoints = Checkpoints(workdir, recipe)
    state, step = checkpoints.restore(state)
    if step > 0:
        _say(f"going on behind step {step} of {recipe.num_steps}")
    log = MetricsLog(workdir, step)
    begin, first_step = time.monotonic(), step
    while step < recipe.num_steps and not checkpoints.is_stale():
        losses = []
        for index in range(step * recipe.accumulate, (step + 1) * recipe.accumulate):
            state, loss, metrics = update(state, target_params, batches[index])
            where = f"of step {step + 1}, batch {index},"
            losses.append(_finite(f"the loss {where}", loss, checkpoints))
            _finite(f"the gradient {where}", metrics[_NORM], checkpoints)
        step += 1
        if step % recipe.log_every == 0 or step == recipe.num_steps:
            left = (recipe.num_steps - step) * (time.monotonic() - begin) / (step - first_step)
            log.write({"step": step, "loss": float(np.mean(losses)), **_plain(metrics)})
            _say(f"step {step} of {recipe.num_steps}: loss {np.mean(losses):.3f}, "
                 f"about {format_seconds(left)} left")  # fmt: skip
        if step % recipe.evaluate_every == 0 or step == recipe.num_steps:
            what = f"the size of the parameters after step {step}"
            _finite(what, optax.tree.norm(state.params), checkpoints)
            report = _score(evaluate, state.params, target_params, held_out)
            log.write({"step": step, "held_out": report})
            _say(f"step {step}: {describe(report)}")
            checkpoints.save(step, state, report)
    if step < recipe.num_steps:
        _say(f"stopped: no better score in {recipe.patience} looks")
    return checkpoints.best(state)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _finite(what: str, value: Any, checkpoints: Checkpoints) -> float:
    """Returns a number that says whether the parameters are sound.

    Raises:
      InputError: they are lost.
    """
    number = float(value)
    if not math.isfinite(number):
        raise InputError(
            f"{what} is {number}: stopped; the last good checkpoint is in {checkpoints.folder}"
        )
    return number


def _make_update(trainee: Trainee, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def update(state: TrainState, target_params: Params, rows: Rows) -> Any:
        grad = jax.value_and_grad(trainee.loss, has_aux=True)
        (loss, metrics), grads = grad(state.params, target_params, rows)
        changes, own = optimizer.update(grads, state.optimizer, state.params)
        metrics = metrics | {_NORM: optax.tree.norm(grads)}
        return TrainState(optax.apply_updates(state.params, changes), own), loss, metrics

    return jax.jit(update, donate_argnums=0)


def _score(
    evaluate: Callable[..., Any], params: Params, target_params: Params, batches: Iterable[Rows]
) -> dict[str, Any]:
    """Returns means: of each batch over what it scores, of batches by their answers' tokens."""
    sums: dict[str, Any] = {}
    total = 0.0
    for rows in batches:
        values, count = evaluate(params, target_params, rows)
        total += float(count)
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + np.asarray(value, np.float64)
    return {name: (value / max(total, 1.0)).tolist() for name, value in sums.items()}


def _plain(metrics: dict[str, jax.Array]) -> dict[str, Any]:
    return {name: np.asarray(value, np.float64).tolist() for name, value in metrics.items()}
