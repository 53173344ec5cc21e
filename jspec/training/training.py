"""What a training run is: the fields that every kind of drafter shares, and what each adds."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

from jspec.common.errors import check_range
from jspec.training.recipe import Recipe
from jspec.training.texts import Rows, Text
from jspec.training.trainee import Trainee
from jspec.weights.resolver import LoadedModel


@dataclasses.dataclass(frozen=True)
class Training(abc.ABC):
    """A training run; each kind of drafter is a subclass with fields of its own.

    Attributes:
      drafter: which kind; see `kinds.KINDS`.
      target: the frozen target, as `load_model` takes it.
      dtype: of the target's weights.
      texts: files to train on; see `corpus.read_texts`.
      score_prompts: train on the tokens of prompts as well: more to learn from few answers.
      states: folder that keeps what the target says of the texts, so that it reads them once; runs
        may share it. Empty: the target reads every batch.
      num_held_out: texts that are not trained on but scored.
      seq_len: tokens of a row.
      batch_size: rows of a batch.
      recipe: see `Recipe`.
    """

    OUTPUT: ClassVar[str]  # the folder of the trained drafter in a workdir

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
        """Returns what is trained.

        Args:
          target: the loaded target.
          texts: those to train on.

        Raises:
          InputError: fields that do not fit each other or the target.
        """

    def make_fill(self, target: LoadedModel, texts: Sequence[Text]) -> Callable[[Rows], Rows]:
        """Returns what adds to rows what else the loss reads of them; most kinds add nothing.

        Args:
          target: the loaded target.
          texts: all of them, those that are held out too.

        Raises:
          InputError: what it is made from cannot be loaded, or does not fit the target.
        """
        del target, texts
        return lambda rows: rows
