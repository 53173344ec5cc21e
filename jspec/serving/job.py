"""A request in the scheduler, and its updates."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jspec.common.errors import InputError
from jspec.generation.answer import Answer, Drafts
from jspec.generation.request import Request
from jspec.generation.result import Chunk, RoundCounts, TokenLogprob
from jspec.generation.rows import Row

CANCELLED, EXPIRED = "cancelled", "deadline"  # reasons why an answer ends, besides those of Result


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
