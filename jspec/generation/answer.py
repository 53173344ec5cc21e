"""The host's record of one answer: its tokens, its text, where it ends, its counts."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jspec.common.errors import InputError
from jspec.common.timing import Instant
from jspec.generation.request import Request
from jspec.generation.result import Piece, Result
from jspec.generation.stats import RoundCounts, Stats
from jspec.generation.stream_text import AnswerText
from jspec.sampling.distribution import NO_TOKEN
from jspec.weights import TokenizerLike


class Round(NamedTuple):
    """What one round did in one row.

    Attributes:
      token_ids: the tokens that it emitted.
      logprobs: the (raw, processed) log-probabilities of each; None if they are not wanted.
      num_proposed: number of drafts proposed.
      num_accepted: number of drafts accepted.
      drafter: name of the drafter that proposed; "" if none did.
    """

    token_ids: list[int]
    logprobs: list[tuple[float, float]] | None
    num_proposed: int = 0
    num_accepted: int = 0
    drafter: str = ""


class Answer:
    """An answer in progress: it takes the row's tokens one by one and finds where they end.

    Attributes:
      index: number of the request.
      finish_reason: why the answer ended, as in `Result`; None while it goes on.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        prompt_token_ids: list[int],
        *,
        tokenizer: TokenizerLike,
        eos_ids: Sequence[int],
        max_new_tokens: int,
        num_draft_tokens: int,
    ) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self._request = request
        self._prompt_token_ids = prompt_token_ids
        self._eos_ids = frozenset(eos_ids)
        self._max_new_tokens = max_new_tokens
        self._num_draft_tokens = num_draft_tokens
        self._token_ids: list[int] = []
        self._num_taken = 0
        self._num_drafted = 0
        self._text = AnswerText(tokenizer, request.settings.stop)
        self._rounds: list[RoundCounts] = []
        self._device_seconds = 0.0
        self._logprobs: list[tuple[float, float]] = []
        self.start()

    def start(self) -> None:
        """Starts the clocks, just before the prefill."""
        self._started = self._prefilled = Instant()

    def add_first(self, first: Round) -> None:
        """Adds the token that the prefill drew."""
        self._prefilled = Instant()
        self._push_all(first)

    def add_visit(self, seconds: float, rounds: Iterable[Round]) -> None:
        """Adds the rounds of one visit of the device.

        Args:
          seconds: time that the device took for them.
          rounds: what they did in this answer's row.
        """
        self._device_seconds += seconds
        for a_round in rounds:
            self._add_round(a_round)

    def _add_round(self, a_round: Round) -> None:
        """Adds one round's tokens. Tokens and drafts past the answer's end are not counted."""
        if self.finish_reason is not None:  # a visit goes on after a stop string
            return
        num_emitted = self._push_all(a_round)
        num_proposed, num_accepted = a_round.num_proposed, a_round.num_accepted
        if self.finish_reason is not None:
            num_accepted = min(num_accepted, num_emitted)
            num_proposed = min(num_proposed, num_emitted)
        self._rounds.append(RoundCounts(num_proposed, num_accepted, a_round.drafter))
        self._num_drafted += num_accepted

    def _push_all(self, a_round: Round) -> int:
        """Adds tokens up to the answer's end; returns how many they were."""
        num_emitted = 0
        for token_id in a_round.token_ids:
            if self.finish_reason is None:
                self._push(token_id)
                num_emitted += 1
        if a_round.logprobs is not None:
            self._logprobs += a_round.logprobs[:num_emitted]
        return num_emitted

    def _push(self, token_id: int) -> None:
        if token_id == NO_TOKEN:
            raise InputError(
                f"expected logits that are numbers; the model gave NaN, or forbade every token, at "
                f"token {len(self._token_ids)} of the answer"
            )
        self._token_ids.append(token_id)
        self._text.push(token_id)
        if token_id in self._eos_ids:
            self.finish_reason = "eos"
        elif token_id in self._request.settings.stop_token_ids or self._text.is_stopped:
            self.finish_reason = "stop"
        elif len(self._token_ids) >= self._max_new_tokens:
            self.finish_reason = "length"

    def take_piece(self) -> Piece:
        """Returns what came since the last piece, with the result once the answer has ended."""
        is_finished = self.finish_reason is not None
        if is_finished:
            self._text.finish()
        piece = Piece(
            index=self.index,
            text=self._text.take(is_last=is_finished),
            token_ids=self._token_ids[self._num_taken :],
            num_drafted=self._num_drafted,
            result=self._result() if is_finished else None,
        )
        self._num_taken = len(self._token_ids)
        self._num_drafted = 0
        return piece

    def _result(self) -> Result:
        assert self.finish_reason is not None
        now = Instant()
        wants_logprobs = self._request.settings.logprobs
        stats = Stats(
            rounds=tuple(self._rounds),
            num_round_tokens=len(self._token_ids) - 1,
            prefill_seconds=self._prefilled.run_seconds_since(self._started),
            decode_seconds=now.run_seconds_since(self._prefilled),
            device_seconds=self._device_seconds,
            compile_seconds=now.compile_seconds - self._started.compile_seconds,
            num_draft_tokens=self._num_draft_tokens,
        )
        return Result(
            prompt=self._request.prompt,
            prompt_token_ids=self._prompt_token_ids,
            token_ids=self._token_ids,
            text=self._text.text,
            finish_reason=self.finish_reason,
            settings=self._request.settings,
            stats=stats,
            category=self._request.category,
            raw_logprobs=[raw for raw, _ in self._logprobs] if wants_logprobs else None,
            logprobs=[processed for _, processed in self._logprobs] if wants_logprobs else None,
        )
