"""The training loop: optax updates, checkpoints, and a resume that repeats nothing.

Step k is a function of the parameters before it and of batch k, which is a function of the seed and
k: a run that was killed and goes on from its last checkpoint ends with the same parameters, bit for
bit on one machine. The best checkpoint is the one with the highest `SCORE` on held-out texts, which
the loss predicts poorly.
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
from jspec.training.config import Recipe
from jspec.training.metrics import open_metrics
from jspec.training.packing import Batches, Rows
from jspec.training.trainee import LossFn, Trainee, describe

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
      recipe: how to train.
      workdir: gets `metrics.jsonl` and `checkpoints/`.

    Returns:
      The parameters of the best score, and its metrics.

    Raises:
      InputError: the loss or its gradient is not finite, or the disk is full.
    """
    optimizer, loss_fn = make_optimizer(recipe), with_precision(trainee.loss, recipe)
    params = jax.tree.map(jnp.copy, trainee.params)  # updates donate the state's memory
    state = TrainState(params, optimizer.init(params))
    update, evaluate = _make_update(loss_fn, optimizer), make_evaluate(loss_fn)
    checkpoints = Checkpoints(workdir, recipe)
    state, step = checkpoints.restore(state)
    if step > 0:
        _print(f"going on after step {step} of {recipe.num_steps}")
    log = open_metrics(workdir, step)
    begin, first_step = time.monotonic(), step
    while step < recipe.num_steps and not checkpoints.is_stale():
        losses = []
        for index in range(step * recipe.accumulate, (step + 1) * recipe.accumulate):
            state, loss, metrics = update(state, target_params, batches[index])
            where = f"of step {step + 1}, batch {index},"
            losses.append(_check_finite(f"the loss {where}", loss, checkpoints))
            _check_finite(f"the gradient {where}", metrics[_NORM], checkpoints)
        step += 1
        is_last = step == recipe.num_steps
        if step % recipe.log_every == 0 or is_last:
            left = (recipe.num_steps - step) * (time.monotonic() - begin) / (step - first_step)
            log.append({"step": step, "loss": float(np.mean(losses)), **_as_lists(metrics)})
            _print(f"step {step} of {recipe.num_steps}: loss {np.mean(losses):.3f}, "
                   f"about {format_seconds(left)} left")  # fmt: skip
        if step % recipe.evaluate_every == 0 or is_last:
            what = f"the size of the parameters after step {step}"
            _check_finite(what, optax.tree.norm(state.params), checkpoints)
            scores = evaluate(state.params, target_params, held_out)
            log.append({"step": step, "held_out": scores})
            _print(f"step {step}: {describe(scores)}")
            checkpoints.save(step, state, scores)
    if step < recipe.num_steps:
        _print(f"stopped: no better score in {recipe.patience} evaluations")
    return checkpoints.best(state)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check_finite(what: str, value: Any, checkpoints: Checkpoints) -> float:
    """Returns the value as a number.

    Raises:
      InputError: it is not finite.
    """
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

    def rounded(params: Params, target_params: Params, rows: Rows) -> tuple[jax.Array, dict]:
        dtype = jnp.dtype(recipe.compute_dtype)
        return loss(jax.tree.map(lambda leaf: leaf.astype(dtype), params), target_params, rows)

    if recipe.remat == "none":
        return rounded
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(rounded, policy=policy)


def _make_update(loss_fn: LossFn, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def update(state: TrainState, target_params: Params, rows: Rows) -> Any:
        grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, metrics), grads = grad(state.params, target_params, rows)
        changes, own = optimizer.update(grads, state.optimizer, state.params)
        metrics = metrics | {_NORM: optax.tree.norm(grads)}
        return TrainState(optax.apply_updates(state.params, changes), own), loss, metrics

    return jax.jit(update, donate_argnums=0)


def make_evaluate(loss: LossFn) -> Callable[[Params, Params, Iterable[Rows]], dict[str, Any]]:
    """Returns (params, target's parameters, batches) -> the loss's metrics as plain numbers.

    They are means over the batches, weighted by the number of tokens of answers in each.
    """

    @jax.jit
    def weighted(params: Params, target_params: Params, rows: Rows) -> tuple[dict, jax.Array]:
        metrics = loss(params, target_params, rows)[1]
        # Nothing predicts the first token of a text.
        is_scored = jnp.asarray(rows.is_answer) & (jnp.asarray(rows.positions) > 0)
        count = jnp.sum(is_scored).astype(jnp.float32)
        return {name: value * count for name, value in metrics.items()}, count

    def evaluate(params: Params, target_params: Params, batches: Iterable[Rows]) -> dict[str, Any]:
        sums: dict[str, Any] = {}
        total = 0.0
        for rows in batches:
            values, count = weighted(params, target_params, rows)
            total += float(count)
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + np.asarray(value, np.float64)
        return _as_lists({name: value / max(total, 1.0) for name, value in sums.items()})

    return evaluate


def _as_lists(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value, np.float64).tolist() for name, value in metrics.items()}
