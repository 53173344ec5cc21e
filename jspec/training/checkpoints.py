"""Checkpoints of a run: the latest ones and the best, whole or not at all."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import struct

from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.training.recipe import Recipe
from jspec.training.trainee import SCORE

CHECKPOINTS = "checkpoints"
_STEP, _STEP_WEIGHT = "step", 1e-12


class TrainState(struct.PyTreeNode):
    """All that the next update needs.

    Attributes:
      params: trained so far.
      optimizer: optax's state.
    """

    params: Params
    optimizer: Any


class Checkpoints:
    """Those of a run."""

    def __init__(self, workdir: pathlib.Path, recipe: Recipe) -> None:
        """Opens the folder; what an earlier run left half written is removed."""
        from orbax.checkpoint import v1 as ocp

        policies = ocp.training.preservation_policies
        self.folder = workdir / CHECKPOINTS
        self._recipe = recipe
        with self._explained("read"):
            self._checkpointer = ocp.training.Checkpointer(
                str(self.folder.absolute()),
                save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),  # type: ignore
                preservation_policy=policies.AnyPreservationPolicy([  # type: ignore
                    policies.LatestN(recipe.keep),
                    policies.BestN(get_metric_fn=_rank, n=1),
                ]),
                cleanup_tmp_directories=True,
            )  # fmt: skip

    def restore(self, state: TrainState) -> tuple[TrainState, int]:
        """Returns the latest state and its step; what it is given and 0 without one.

        Raises:
          InputError: the checkpoint cannot be read, or is of something else.
        """
        latest = self._checkpointer.latest
        if latest is None:
            return state, 0
        with self._explained(f"go on from step {latest.step} in"):
            return self._load(latest.step, state), latest.step

    def save(self, step: int, state: TrainState, report: dict[str, Any]) -> None:
        """Writes a checkpoint, in Orbax's threads; the next update waits for them.

        Raises:
          InputError: one cannot be written.
        """
        with self._explained("write a checkpoint to"):
            metrics = report | {_STEP: step}
            self._checkpointer.save_async(step, _named_leaves(state), metrics=metrics)
            self._checkpointer.wait()  # the next update takes the state's memory over

    def is_stale(self) -> bool:
        """Returns whether the best score is as many looks old as the recipe has patience."""
        if not self._recipe.patience:
            return False
        if self._checkpointer.latest is None:
            return False
        age = self._checkpointer.latest.step - self._best().step
        return age >= self._recipe.patience * self._recipe.evaluate_every

    def best(self, state: TrainState) -> tuple[Params, dict[str, Any]]:
        """Returns the parameters of the best score, and its metrics.

        Args:
          state: one of the same shapes.

        Raises:
          InputError: the checkpoint cannot be read.
        """
        best = self._best()
        with self._explained(f"read step {best.step} of"):
            return self._load(best.step, state).params, dict(best.metrics)

    def _best(self) -> Any:
        return max(self._checkpointer.checkpoints, key=lambda one: _rank(one.metrics))  # type: ignore

    def _load(self, step: int, state: TrainState) -> TrainState:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for name, leaf in _named_leaves(state).items()
        }
        leaves = self._checkpointer.load(step, abstract)
        return jax.tree.unflatten(jax.tree.structure(state), [leaves[name] for name in abstract])

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Makes one line of whatever Orbax, TensorStore or their threads raise."""
        try:
            yield
        except Exception as error:
            reason = " ".join(str(error).split())[:400]
            raise InputError(
                f"cannot {what} {self.folder}: {reason}; whole checkpoints stay as they are"
            ) from None


def _rank(metrics: Mapping[str, Any]) -> float:
    """Returns the score; of equal ones the first is the best."""
    return metrics[SCORE] - _STEP_WEIGHT * metrics.get(_STEP, 0)


def _named_leaves(state: TrainState) -> dict[str, jax.Array]:
    """Returns the leaves by their paths: Orbax then need not know optax's types."""
    return {jax.tree_util.keystr(path): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)}  # fmt: skip
