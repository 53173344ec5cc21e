"""A request in the scheduler, its updates, and the slots that it runs in."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from jspec.common.errors import InputError
from jspec.generation.answer import Answer, Drafts, Round
from jspec.generation.request import Request
from jspec.generation.result import Chunk, RoundCounts, TokenLogprob
from jspec.generation.rows import Row
from jspec.serving.prefix_tree import PrefixTree

CANCELLED, EXPIRED = "cancelled", "deadline"  # reasons why an answer ends, besides those of Result


class Slots(Protocol):
    """The device, as the scheduler sees it: a `BatchSlots`, or a simulation in its place.

    Attributes:
      tree: the prefix cache: earlier prompts and answers.
    """

    tree: PrefixTree

    @property
    def usage(self) -> float:
        """The share of the memory for caches that the slots take, 0 to 1."""
        ...

    @property
    def rows(self) -> Sequence[int]:
        """Indices of the slots."""
        ...

    def begin(self, row: int, request: Row, saved: Any = None) -> int | None:
        """Begins to read a prompt into a slot; no other prompt is being read.

        Returns how many of its tokens are in the prefix cache; None if there is no memory for it
        yet. To go on with what `pause` has saved, the prompt is all tokens but the newest.
        """
        ...

    def reserve(self, row: int, num_rounds: int, is_extra: bool = False) -> bool:
        """Gives a slot whose prompt was read memory for its next rounds; False if there is none.

        What is `is_extra` costs no cached prompt, and is taken back by the next call.
        """
        ...

    def pause(self, row: int) -> Any:
        """Finishes a slot; returns what `begin` takes to go on; None if it has no token yet."""
        ...

    def read(self, row: int) -> tuple[int, Round | None]:
        """Reads a chunk of that prompt; returns its length, and the first token after the last.

        If it goes on with what was saved, the round after the last chunk has no tokens.
        """
        ...

    def run(self, num_rounds: int) -> float:
        """Runs rounds of all slots; returns the seconds that they took."""
        ...

    def rounds(self, row: int) -> Iterable[Round]:
        """Returns what the rounds of the last run did in a slot."""
        ...

    def finish(self, row: int, answer: Sequence[int] = (), text: Sequence[int] = ()) -> None:
        """Marks a slot as done, its prompt read or not: it emits nothing until it is filled.

        The tokens of a whole answer may be looked up for later ones. With `text`, prompt and
        answer, what was computed of it may be kept for prompts that begin with it.
        """
        ...

    def keep_alive(self) -> None:
        """Is called now and then while there is nothing to do."""
        ...

    def stop(self) -> None:
        """Is called when there will be nothing to do any more."""


@dataclasses.dataclass(eq=False)
class Job:
    """A request in the scheduler.

    Attributes:
      request: what is asked.
      row: the same, as the engine takes it.
      on_update: called with each update, on the scheduler's thread.
      priority: smaller numbers run first.
      deadline: moment on the scheduler's clock at which the answer ends with what it has; None
        for no such moment.
      key: whose it is; each key gets an equal share of the device.
      submitted: when it came, on that clock.
      started: when it got a slot; None until then.
      num_cached: tokens of its prompt that were not read again.
      is_cancelled: whether nobody waits for the answer any more.
      paused: the answer so far, and what its slot had saved, while it waits to go on.
      reply_id: of the reply that the answer is a part of, and `index` its place there.
    """

    request: Request
    row: Row
    on_update: Callable[["Update"], object]
    priority: int = 0
    deadline: float | None = None
    key: str = ""
    submitted: float = 0.0
    started: float | None = None
    num_cached: int = 0
    is_cancelled: bool = False
    paused: tuple[Answer, Any] | None = None
    reply_id: str = ""
    index: int = 0


class Update(NamedTuple):
    """What is new of one answer.

    Attributes:
      job: whose answer it is.
      chunk: the new text and tokens; with the last one comes the result.
      is_drafted: of each new token, whether the drafter had proposed it.
      logprobs: of each new token; empty if not wanted.
      rounds: what the new rounds did.
      drafts: those that each of them proposed.
      moment: when it came, on the scheduler's clock.
    """

    job: Job
    chunk: Chunk
    is_drafted: list[bool]
    logprobs: list[TokenLogprob]
    rounds: list[RoundCounts]
    drafts: list[Drafts]
    moment: float


class QueueFullError(InputError):
    """The queue is full; `retry_after` is the expected number of seconds until it is not."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DrainingError(InputError):
    """The server is about to stop and takes no more requests."""

    def __init__(self) -> None:
        super().__init__("the server is stopping: expected requests before that")
