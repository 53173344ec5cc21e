"""The configuration of a training run, and what it trains (a `Trainee`)."""

import abc
import dataclasses
import pathlib
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax

from jspec.common.errors import InputError, check_among, check_range
from jspec.common.typing import Params
from jspec.training.packing import Rows
from jspec.training.target_states import StateStore
from jspec.training.texts import Text
from jspec.weights.resolver import LoadedModel

# (params, frozen parameters, rows) -> the loss and metrics, `SCORE` among them: scalars or
# vectors, means over the scored positions of the rows.
LossFn: TypeAlias = Callable[[Params, Any, Rows], tuple[jax.Array, dict[str, jax.Array]]]


class Trainee(NamedTuple):
    """What is trained.

    Attributes:
      params: before the first update; all of them are trained.
      frozen: parameters of other models that `loss` needs, the target's as a rule.
      loss: see `LossFn`.
      save: (params, folder) -> None: writes the drafter in the format in which it is loaded; it
        gets the `borrowed` parameters as well.
      layers: the target's layers whose outputs `loss` takes from rows that bring them; empty if
        `loss` always runs the target.
      borrowed: parameters of the target that are saved with the trained ones, by name.
    """

    params: Params
    frozen: Any
    loss: LossFn
    save: Callable[[Params, pathlib.Path], None]
    layers: tuple[int, ...] = ()
    borrowed: Params = types.MappingProxyType({})


def cast(params: Params, dtype: jax.typing.DTypeLike) -> Params:
    """Returns the parameters in another type."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train: steps, optimiser, precision, checkpoints.

    Attributes:
      num_steps: updates.
      learning_rate: of AdamW after the warm-up; it falls to a tenth along a cosine.
      warmup_steps: updates in which the learning rate rises from 0.
      weight_decay: of AdamW.
      max_norm: gradients are scaled down to this norm.
      accumulate: batches of one update.
      compute_dtype: "float32" or "bfloat16", to which each step rounds the parameters; the
        optimiser keeps float32 ones.
      remat: "none" keeps all activations for the backward pass; "products" keeps the outputs of
        matrix products and recomputes the others: less memory, more time. (On CPU XLA merges both
        computations again, and no memory is saved.)
      log_every: updates between two lines of metrics.
      evaluate_every: updates between two evaluations on held-out texts, each with a checkpoint.
      patience: evaluations without a better score before the run stops; 0 never stops it.
      keep: latest checkpoints kept, besides the best.
      seed: of the initialisation and the order of the texts.
    """

    num_steps: int = 1000
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.0
    max_norm: float = 0.5
    accumulate: int = 1
    compute_dtype: str = "float32"
    remat: str = "none"
    log_every: int = 20
    evaluate_every: int = 200
    patience: int = 0
    keep: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "accumulate", "log_every", "evaluate_every", "keep"):
            check_range(name, getattr(self, name), 1, 10**9)
        for name in ("warmup_steps", "patience", "seed"):
            check_range(name, getattr(self, name), 0, 10**9)
        check_range("learning_rate", self.learning_rate, 0, 10)
        check_range("max_norm", self.max_norm, 1e-6, 1e9)
        check_among("compute_dtype", self.compute_dtype, ("float32", "bfloat16"))
        check_among("remat", self.remat, ("none", "products"))


@dataclasses.dataclass(frozen=True)
class TrainingConfig(abc.ABC):
    """A training run; each kind of drafter is a subclass with its own fields.

    Attributes:
      drafter: the kind of drafter; see `run.KINDS`.
      target: the frozen target, as `load_model` takes it.
      dtype: of the target's weights.
      texts: files to train on; see `read_texts`.
      score_prompts: train on the tokens of prompts as well: more to learn from few answers.
      states: folder that keeps the target's hidden states of the texts, so that the target reads
        them once; runs may share it. Empty: the target reads every batch.
      num_held_out: texts that are scored and not trained on.
      seq_len: tokens of a row.
      batch_size: rows of a batch.
      recipe: how to train.
    """

    OUTPUT: ClassVar[str] = "head"  # the folder of the trained drafter in a workdir

    drafter: str = ""
    target: str = "smollm2-135m-instruct"
    dtype: str = "bfloat16"
    texts: tuple[str, ...] = ()
    score_prompts: bool = False
    states: str = ""
    num_held_out: int = 64
    seq_len: int = 512
    batch_size: int = 4
    recipe: Recipe = dataclasses.field(default_factory=Recipe)

    def __post_init__(self) -> None:
        for name in ("num_held_out", "batch_size"):
            check_range(name, getattr(self, name), 1, 10**6)
        check_range("seq_len", self.seq_len, 4, 10**6)

    @abc.abstractmethod
    def make_trainee(self, target: LoadedModel, texts: Sequence[Text]) -> Trainee:
        """Returns what is trained on the texts.

        Raises:
          InputError: fields that do not fit each other or the target.
        """

    def make_fill(
        self, target: LoadedModel, layers: tuple[int, ...], texts: Sequence[Text]
    ) -> Callable[[Rows], Rows]:
        """Returns what adds to rows of the texts the stored states of these layers, if any."""
        if not self.states:
            return lambda rows: rows
        if not layers:
            raise InputError(f"expected no states with {self.drafter}: it runs the target itself")
        sizes = {"batch_size": self.batch_size, "seq_len": self.seq_len}
        return StateStore(pathlib.Path(self.states), target, layers, texts, **sizes).fill
