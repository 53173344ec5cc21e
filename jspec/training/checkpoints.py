"""Checkpoints of a run: the latest ones and the best, each whole or absent (Orbax)."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jspec.common import processes
from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.training.chain_loss import SCORE
from jspec.training.config import Recipe

_STEP, _STEP_WEIGHT = "step", 1e-12


class TrainState(NamedTuple):
    """All that the next update needs."""

    params: Params
    optimizer: Any  # optax's state


class Checkpoints:
    """The checkpoints of a run, in WORKDIR/checkpoints; errors of the disk are `InputError`s."""

    def __init__(self, workdir: pathlib.Path, recipe: Recipe) -> None:
        """Opens the folder; what a killed run left half written is removed."""
        from orbax.checkpoint import v1 as ocp

        policies = ocp.training.preservation_policies
        self.folder = workdir / "checkpoints"
        self._recipe = recipe
        with self._one_line_errors("read"):
            self._checkpointer = ocp.training.Checkpointer(
                str(self.folder.absolute()),
                save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),  # type: ignore
                preservation_policy=policies.AnyPreservationPolicy([  # type: ignore
                    policies.LatestN(recipe.keep),
                    # A kill during a removal leaves a checkpoint without metrics: it goes as well.
                    policies.BestN(
                        get_metric_fn=_rank, n=1, keep_checkpoints_without_metrics=False
                    ),
                ]),
                cleanup_tmp_directories=True,
            )  # fmt: skip

    def restore(self, state: TrainState) -> tuple[TrainState, int]:
        """Returns the latest state and its step; the given state and 0 if there is none."""
        latest = self._checkpointer.latest
        return (self._load(latest.step, state), latest.step) if latest else (state, 0)

    def save(self, step: int, state: TrainState, metrics: dict[str, Any]) -> None:
        """Writes a checkpoint."""
        with self._one_line_errors("write a checkpoint to"):
            # It waits for the disk: the next update donates the state's memory.
            self._checkpointer.save(step, _named_leaves(state), metrics=metrics | {_STEP: step})

    def is_stale(self) -> bool:
        """Returns whether the recipe's patience has run out since the best score."""
        if not self._recipe.patience or self._checkpointer.latest is None:
            return False
        age = self._checkpointer.latest.step - self._best().step
        return age >= self._recipe.patience * self._recipe.evaluate_every

    def best(self, state: TrainState) -> tuple[Params, dict[str, Any]]:
        """Returns the parameters of the best score, and its metrics; any state gives the shapes."""
        best = self._best()
        return self._load(best.step, state).params, dict(best.metrics)

    def _best(self) -> Any:
        whole = [checkpoint for checkpoint in self._checkpointer.checkpoints if checkpoint.metrics]
        return max(whole, key=lambda checkpoint: _rank(checkpoint.metrics))  # type: ignore

    def _load(self, step: int, state: TrainState) -> TrainState:
        wanted = _named_leaves(state)  # Orbax reads shapes, types and devices off them
        with self._one_line_errors(f"read step {step} of"):
            leaves = self._checkpointer.load(step, wanted)
        return jax.tree.unflatten(jax.tree.structure(state), [leaves[name] for name in wanted])

    @contextlib.contextmanager
    def _one_line_errors(self, what: str) -> Iterator[None]:
        """Turns whatever Orbax, TensorStore or their threads raise into one line."""
        try:
            yield
        except Exception as error:
            if processes.is_loss(error):
                raise
            reason = " ".join(str(error).split())[:400]
            raise InputError(
                f"cannot {what} {self.folder}: {reason}; whole checkpoints stay as they are"
            ) from None


def _rank(metrics: Mapping[str, Any]) -> float:
    """Returns the score, a hair less for later steps: of equal scores the first is the best."""
    return metrics[SCORE] - _STEP_WEIGHT * metrics.get(_STEP, 0)


def _named_leaves(state: TrainState) -> dict[str, jax.Array]:
    """Returns the leaves by their paths, so that Orbax need not know optax's types."""
    return {jax.tree_util.keystr(path): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)}  # fmt: skip
