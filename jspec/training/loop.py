"""The training loop: optax updates, Orbax checkpoints, and a resume that repeats nothing.

Step k is a function of the parameters before it and of batch k, which is a function of the seed and
k: a run that was killed and goes on from its last checkpoint ends with the same parameters, to the
bit on one machine. The best checkpoint is the one whose drafts would be kept most often on texts
that were held out; a loss says little about that.
"""

import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jspec.errors import InputError, check_range
from jspec.training.texts import Batches, Rows
from jspec.typing import Params

SCORE = "tokens_per_call"
_METRICS = "metrics.jsonl"
_CHECKPOINTS = "checkpoints"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
      num_steps: updates.
      learning_rate: of AdamW, after the warm-up; it falls to a tenth along a cosine.
      warmup_steps: updates in which it rises from 0.
      weight_decay: of AdamW.
      max_norm: gradients are scaled down to this norm.
      accumulate: batches of one update.
      log_every: updates between two lines of metrics.
      evaluate_every: updates between two looks at held-out texts, each with a checkpoint.
      patience: looks without a better score before it stops; 0 never stops it.
      keep: latest checkpoints kept, besides the best one.
      seed: of initialisation and order.
    """

    num_steps: int = 1000
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.0
    max_norm: float = 0.5
    accumulate: int = 1
    log_every: int = 20
    evaluate_every: int = 200
    patience: int = 0
    keep: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "accumulate", "log_every", "evaluate_every", "keep"):
            check_range(name, getattr(self, name), 1, 10**9)
        check_range("learning_rate", self.learning_rate, 0, 10)

    def optimizer(self) -> optax.GradientTransformation:
        """Returns AdamW with clipped gradients and the schedule."""
        schedule = optax.warmup_cosine_decay_schedule(
            0.0,
            self.learning_rate,
            min(self.warmup_steps, self.num_steps - 1),
            self.num_steps,
            0.1 * self.learning_rate,
        )
        update = optax.chain(
            optax.clip_by_global_norm(self.max_norm),
            optax.adamw(schedule, b2=0.95, weight_decay=self.weight_decay),
        )
        if self.accumulate == 1:
            return update
        return optax.MultiSteps(update, self.accumulate).gradient_transformation()


class Trainee(NamedTuple):
    """What is trained.

    Attributes:
      params: before the first update; all of them are trained.
      loss: (params, target's parameters, rows) -> the loss and a dict of scalars or vectors.
      evaluate: (params, target's parameters, rows) -> sums and the count they are divided by: a
        dict with `SCORE` among others, and the number of places.
      save: (params, folder) -> nothing: writes the drafter in the form that it is loaded from.
    """

    params: Params
    loss: Callable[[Params, Params, Rows], tuple[jax.Array, dict[str, jax.Array]]]
    evaluate: Callable[[Params, Params, Rows], tuple[dict[str, jax.Array], jax.Array]]
    save: Callable[[Params, pathlib.Path], None]


class TrainState(struct.PyTreeNode):
    """All that the next update needs.

    Attributes:
      params: trained so far.
      optimizer: optax's state.
    """

    params: Params
    optimizer: Any


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
      workdir: gets `metrics.jsonl` and `checkpoints/`.

    Returns:
      The parameters of the best score, and the metrics then.

    Raises:
      InputError: the loss is not finite.
    """
    optimizer = recipe.optimizer()
    params = jax.tree.map(jnp.copy, trainee.params)  # the state's own: updates take it over
    state = TrainState(params, optimizer.init(params))
    update = _make_update(trainee, optimizer)
    evaluate = jax.jit(trainee.evaluate)
    saver = _Saver(workdir, recipe)
    state, step = saver.restore(state)
    journal = _Journal(workdir / _METRICS, step)
    begin, first_step = time.monotonic(), step
    while step < recipe.num_steps and not saver.is_stale(recipe.patience):
        losses = []
        for part in range(recipe.accumulate):
            index = step * recipe.accumulate + part
            state, loss, metrics = update(state, target_params, batches[index])
            losses.append(float(loss))
            if not math.isfinite(losses[-1]):
                raise InputError(
                    f"the loss of step {step}, batch {index}, is {losses[-1]}: stopped; the last "
                    f"good checkpoint is in {saver.folder}"
                )
        step += 1
        if step % recipe.log_every == 0 or step == recipe.num_steps:
            speed = (step - first_step) / (time.monotonic() - begin)
            left = (recipe.num_steps - step) / speed
            journal.write({"step": step, "loss": float(np.mean(losses)), **_plain(metrics)})
            print(f"step {step} of {recipe.num_steps}: loss {np.mean(losses):.3f}, "
                  f"{left / 60:.0f} min left", file=sys.stderr, flush=True)  # fmt: skip
        if step % recipe.evaluate_every == 0 or step == recipe.num_steps:
            report = _score(evaluate, state.params, target_params, held_out)
            journal.write({"step": step, "held_out": report})
            print(f"step {step}: {report[SCORE]:.3f} tokens a call on held-out texts",
                  file=sys.stderr, flush=True)  # fmt: skip
            saver.save(step, state, report)
    return saver.best(state)


def _make_update(trainee: Trainee, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def update(state: TrainState, target_params: Params, rows: Rows) -> Any:
        grad = jax.value_and_grad(trainee.loss, has_aux=True)
        (loss, metrics), grads = grad(state.params, target_params, rows)
        changes, own = optimizer.update(grads, state.optimizer, state.params)
        return TrainState(optax.apply_updates(state.params, changes), own), loss, metrics

    return jax.jit(update, donate_argnums=0)


def _score(
    evaluate: Callable[..., Any], params: Params, target_params: Params, batches: Iterable[Rows]
) -> dict[str, Any]:
    """Returns the means over all places of all batches."""
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


class _Journal:
    """The lines of metrics; those of steps that will be done again are dropped."""

    def __init__(self, path: pathlib.Path, step: int) -> None:
        self._path = path
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line + "\n")
                except (ValueError, KeyError, TypeError):
                    break  # torn by a kill
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)

    def write(self, record: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


class _Saver:
    """Checkpoints of a run: the latest ones and the best."""

    def __init__(self, workdir: pathlib.Path, recipe: Recipe) -> None:
        from orbax.checkpoint import v1 as ocp

        policies = ocp.training.preservation_policies
        self.folder = workdir / _CHECKPOINTS
        self._checkpointer = ocp.training.Checkpointer(
            str(self.folder.absolute()),
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),  # type: ignore
            preservation_policy=policies.AnyPreservationPolicy([  # type: ignore
                policies.LatestN(recipe.keep),
                policies.BestN(get_metric_fn=lambda metrics: metrics[SCORE], n=1),
            ]),
            cleanup_tmp_directories=True,
        )  # fmt: skip

    def restore(self, state: TrainState) -> tuple[TrainState, int]:
        latest = self._checkpointer.latest
        if latest is None:
            return state, 0
        try:
            return self._load(latest.step, state), latest.step
        except Exception as error:  # Orbax passes on what TensorStore and its own threads raise
            reason = " ".join(str(error).split())[:400]
            raise InputError(f"{self.folder}: cannot go on from step {latest.step}: {reason}")  # noqa: B904

    def save(self, step: int, state: TrainState, report: dict[str, Any]) -> None:
        self._checkpointer.save_async(step, _named_leaves(state), metrics=report)

    def is_stale(self, patience: int) -> bool:
        self._checkpointer.wait()
        found = self._checkpointer.checkpoints
        if not patience or not found:
            return False
        best = max(found, key=lambda one: one.metrics[SCORE])  # type: ignore
        return sum(one.step > best.step for one in found) >= patience

    def best(self, state: TrainState) -> tuple[Params, dict[str, Any]]:
        self._checkpointer.wait()
        best = max(self._checkpointer.checkpoints, key=lambda one: one.metrics[SCORE])  # type: ignore
        return self._load(best.step, state).params, dict(best.metrics)

    def _load(self, step: int, state: TrainState) -> TrainState:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for name, leaf in _named_leaves(state).items()
        }
        leaves = self._checkpointer.load(step, abstract)
        return jax.tree.unflatten(jax.tree.structure(state), [leaves[name] for name in abstract])


def _named_leaves(state: TrainState) -> dict[str, jax.Array]:
    """Returns the leaves by their paths: Orbax then need not know optax's types."""
    return {jax.tree_util.keystr(path): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)}  # fmt: skip
