"""Requests in, answers out: the loop that fills rows, runs rounds and hands out pieces."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

from jspec.common.errors import InputError, check_count
from jspec.common.memory import Budget, device_name, tree_bytes
from jspec.generation.answer import Answer
from jspec.generation.batch import Batch
from jspec.generation.engine import MAX_ROUNDS_PER_VISIT
from jspec.generation.programs import Programs
from jspec.generation.prompts import encode_prompt
from jspec.generation.request import Request, Settings
from jspec.generation.result import Piece, Result
from jspec.generation.rows import Row
from jspec.sampling.processor import Processor

_DEFAULTS = Settings()


class RequestRunner:
    """Answers requests with given programs; the part of `Generator` that takes prompts."""

    def __init__(
        self,
        programs: Programs,
        *,
        rounds_per_visit: int,
        processors: Sequence[Processor],
        on_result: Callable[[Result], object] | None,
        on_start: Callable[[Budget], object] | None,
    ) -> None:
        """Keeps the programs; see `Generator` for the other arguments."""
        check_count("rounds_per_visit", rounds_per_visit, 1, MAX_ROUNDS_PER_VISIT)
        self._programs = programs
        self._rounds_per_visit = rounds_per_visit
        self._processors = tuple(processors)
        self._on_result, self._on_start = on_result, on_start

    @overload
    def generate(
        self, prompts: str | Request, settings: Settings = ..., *, chat: bool | None = ...,
        system: str | None = ...,
    ) -> Result: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Sequence[str | Request], settings: Settings = ..., *,
        chat: bool | None = ..., system: str | None = ...,
    ) -> list[Result]: ...  # fmt: skip

    def generate(
        self,
        prompts: str | Request | Sequence[str | Request],
        settings: Settings = _DEFAULTS,
        *,
        chat: bool | None = None,
        system: str | None = None,
    ) -> Result | list[Result]:
        """Answers one prompt or several, and returns when all answers are complete.

        Example:
          >>> generator.generate("Why is the sky blue?", Settings(max_new_tokens=32)).text
          >>> [result.text for result in generator.generate(["One?", "Two?"])]

        Args:
          prompts: one prompt, or a list of them. A `Request` carries its own settings.
          settings: the settings of prompts that are texts.
          chat: whether to put texts into the model's chat template; None does so if it has one.
          system: a system message for the template.

        Returns:
          One result for one prompt; for a list, a list of results in the order of the prompts.

        Raises:
          InputError: if a prompt is empty or longer than the context, if a token id or setting does
            not fit the model, or if there is not enough memory.
        """
        is_one = isinstance(prompts, str | Request) or not isinstance(prompts, Iterable)
        listed: Sequence[str | Request] = [prompts] if is_one else prompts  # type: ignore[assignment]
        requests = [p if isinstance(p, Request) else Request(p, settings) for p in listed]
        pieces = self.run(requests, chat=chat, system=system)
        results = {piece.index: piece.result for piece in pieces if piece.result is not None}
        return results[0] if is_one else [results[index] for index in range(len(requests))]

    def stream(
        self,
        prompt: str | Request,
        settings: Settings = _DEFAULTS,
        *,
        chat: bool | None = None,
        system: str | None = None,
    ) -> Iterator[Piece]:
        """Answers one prompt piece by piece; see `generate` for arguments and errors.

        Example:
          >>> for piece in generator.stream("Tell me a story."):
          ...     print(piece.text, end="", flush=True)
        """
        request = prompt if isinstance(prompt, Request) else Request(prompt, settings)
        return self.run([request], chat=chat, system=system)

    def run(
        self, requests: Sequence[Request], *, chat: bool | None = None, system: str | None = None
    ) -> Iterator[Piece]:
        """Answers many requests, `batch_size` at a time, piece by piece as tokens come.

        Args:
          requests: the requests; `Piece.index` is a request's number in this sequence.
          chat: see `generate`.
          system: see `generate`.

        Yields:
          Pieces of all answers in progress. The last piece of each carries its result.

        Raises:
          InputError: before the first piece, if any of the requests cannot be answered.
        """
        if not requests:
            return
        rows = [self._make_row(i, requests, chat, system) for i in range(len(requests))]
        if (auto := self._programs.auto) is not None:
            rows = [row._replace(costs=auto.at(row.max_length)) for row in rows]
        batch = Batch(self._programs, rows, self._processors)
        if self._on_start is not None:
            weights = tree_bytes(self._programs.params)
            self._on_start(Budget(device_name(), weights, batch.room))
        waiting = collections.deque(
            self._new_answer(index, requests[index], row) for index, row in enumerate(rows)
        )
        answers: dict[int, Answer] = {}  # by row
        while waiting or answers:
            for row in batch.rows:
                # An answer that its first token completes leaves the row free for the next one.
                while waiting and row not in answers:
                    answer = answers[row] = waiting.popleft()
                    answer.start()
                    answer.add_first(batch.fill(row, answer.index))
                    yield self._take_piece(row, answers, batch)
            seconds = batch.run(self._rounds_per_visit) if answers else 0.0
            for row in list(answers):
                answers[row].add_visit(seconds, batch.rounds(row))
                yield self._take_piece(row, answers, batch)

    def check(
        self, request: Request, *, chat: bool | None = None, system: str | None = None
    ) -> None:
        """Checks that a request can be answered, without answering it.

        Args:
          request: the request.
          chat: see `generate`.
          system: see `generate`.

        Raises:
          InputError: if it cannot be answered.
        """
        self._make_row(0, [request], chat, system)

    def encode_prompt(
        self, prompt: str | Sequence[int], chat: bool | None = None, system: str | None = None
    ) -> list[int]:
        """Returns the token ids that the model is given for a prompt.

        Args:
          prompt: a text, or token ids, which are returned as they are.
          chat: see `generate`.
          system: see `generate`.

        Raises:
          InputError: if the prompt is empty, or a chat template is needed and there is none.
        """
        return encode_prompt(self._programs.target, prompt, chat=chat, system=system)

    def _make_row(
        self, index: int, requests: Sequence[Request], chat: bool | None, system: str | None
    ) -> Row:
        """Returns the row of request number `index`; of several, an error names that number."""
        request = requests[index]
        try:
            prompt = self.encode_prompt(request.prompt, chat, system)
            return self._programs.make_row(prompt, request.settings)
        except InputError as error:
            where = f"prompt {index}: " if len(requests) > 1 else ""
            raise InputError(f"{where}{error}") from None

    def _new_answer(self, index: int, request: Request, row: Row) -> Answer:
        target = self._programs.target
        return Answer(
            index,
            request,
            list(row.prompt),
            tokenizer=target.tokenizer,
            eos_ids=target.config.eos_ids,
            max_new_tokens=row.max_length - len(row.prompt),
            num_draft_tokens=self._programs.num_draft_tokens,
        )

    def _take_piece(self, row: int, answers: dict[int, Answer], batch: Batch) -> Piece:
        """Returns the next piece of a row's answer; a row whose answer has ended becomes free."""
        if answers[row].finish_reason is not None:
            batch.finish(row)
        piece = answers[row].take_piece()
        if piece.result is not None:
            del answers[row]
            if self._on_result is not None:
                self._on_result(piece.result)
        return piece
