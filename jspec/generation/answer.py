"""The host's record of one answer: its tokens, its text, where it ends, its counts."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jspec.common.timing import Instant
from jspec.generation.request import Request, SamplingParams
from jspec.generation.result import Chunk, Result, RoundCounts, Stats, TokenLogprob
from jspec.generation.rows import Row
from jspec.sampling.distribution import NO_TOKEN
from jspec.speculation.acceptance.tree import depth_of
from jspec.weights import TokenizerLike
from jspec.weights.resolver import LoadedModel

_WHOLE = ("eos", "stop", "length")  # reasons why answers end that nobody has broken off


class Drafts(NamedTuple):
    """The drafts of one round in one row.

    Attributes:
      ids: the tokens that were proposed.
      parents: of a tree, the draft that each follows, or -1; empty for a chain.
    """

    ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @property
    def chain_or_parents(self) -> Sequence[int]:
        """The parents, of a chain as well."""
        return self.parents or range(-1, len(self.ids) - 1)

    @property
    def depth(self) -> int:
        """The most drafts of a tree that follow each other; 0 for a chain."""
        return depth_of(self.parents, len(self.parents)) if self.parents else 0

    def kept(self, accepted: Iterable[int]) -> list[int]:
        """Returns the places of the drafts that were accepted, in a tree those of a path."""
        kept, node = [], -1
        for token_id in accepted:
            node = list(zip(self.ids, self.chain_or_parents, strict=True)).index((token_id, node))
            kept.append(node)
        return kept


class Round(NamedTuple):
    """What one round did in one row.

    Attributes:
      token_ids: the tokens that it emitted.
      logprobs: of each of them; None if they are not wanted.
      counts: of its drafts.
      drafts: those that were proposed.
      prompt_logprobs: of the prompt's tokens but the first, in the round that draws the first token
        after them, if they are wanted.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    counts: RoundCounts = RoundCounts(0, 0)
    drafts: Drafts = Drafts()
    prompt_logprobs: list[TokenLogprob] | None = None


class Answer:
    """An answer in progress: it takes the row's tokens one by one and finds where they end.

    Attributes:
      finish_reason: why the answer ended, as in `Result`; None while it goes on.
      error: what is wrong with a failed answer.
      rounds: what its rounds so far did; drafts past its end are not counted.
    """

    def __init__(
        self, index: int, request: Request, row: Row, target: LoadedModel, num_draft_tokens: int
    ) -> None:
        """Starts the clocks: an answer is made just before its prefill."""
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._index, self._request, self._row = index, request, row
        self._eos_ids = frozenset(target.config.eos_ids)
        self._num_draft_tokens = num_draft_tokens
        self._token_ids: list[int] = []
        self._num_taken = self._num_accepted = self._tree_depth = 0
        self._text = AnswerText(target.tokenizer, row.prompt, request.settings)
        self.rounds: list[RoundCounts] = []
        self._device_seconds = 0.0
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] | None = None
        self._started = self._prefilled = Instant()

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens so far."""
        return self._token_ids

    @property
    def is_whole(self) -> bool:
        """Whether it has ended by itself: it was not broken off, and did not fail."""
        return self.finish_reason in _WHOLE

    def add_first(self, first: Round) -> None:
        """Adds the token that the prefill drew."""
        self._prefilled = Instant()
        self._prompt_logprobs = first.prompt_logprobs
        self._push_all(first)

    def add_visit(self, seconds: float, rounds: Iterable[Round]) -> None:
        """Adds one visit of the device: its seconds, and what the rounds did in this row.

        Tokens and drafts past the answer's end are not counted.
        """
        self._device_seconds += seconds
        for a_round in rounds:
            if self.finish_reason is not None:  # a visit goes on after a stop string
                break
            num_emitted, counts = self._push_all(a_round), a_round.counts
            if self.finish_reason is not None:
                counts = counts._replace(
                    num_proposed=min(counts.num_proposed, num_emitted),
                    num_accepted=min(counts.num_accepted, num_emitted),
                )
            self.rounds.append(counts)
            self._num_accepted += counts.num_accepted
            self._tree_depth = max(self._tree_depth, a_round.drafts.depth)

    def _push_all(self, a_round: Round) -> int:
        """Adds tokens up to the answer's end; returns how many they were."""
        num_emitted = 0
        for token_id in a_round.token_ids:
            if self.finish_reason is None:
                self._push(token_id)
                num_emitted += self.error is None
        if a_round.logprobs is not None:
            self._logprobs += a_round.logprobs[:num_emitted]
        return num_emitted

    def _push(self, token_id: int) -> None:
        if token_id == NO_TOKEN:
            # The other rows of the batch go on.
            self.finish_reason = "failed"
            self.error = (
                f"expected logits that are numbers; the model gave NaN, or forbade every token, at "
                f"token {len(self._token_ids)} of the answer"
            )
            return
        self._token_ids.append(token_id)
        self._text.push(token_id)
        if token_id in self._eos_ids:
            self.finish_reason = "eos"
        elif token_id in self._request.settings.stop_token_ids or self._text.is_stopped:
            self.finish_reason = "stop"
        elif len(self._token_ids) >= self._row.max_length - len(self._row.prompt):
            self.finish_reason = "length"

    def take_chunk(self) -> Chunk:
        """Returns what came since the last chunk, with the result once the answer has ended."""
        is_finished = self.finish_reason is not None
        if is_finished:
            self._text.finish()
        chunk = Chunk(
            index=self._index,
            text=self._text.take(is_last=is_finished),
            token_ids=self._token_ids[self._num_taken :],
            num_accepted=self._num_accepted,
            result=self._result() if is_finished else None,
        )
        self._num_taken = len(self._token_ids)
        self._num_accepted = 0
        return chunk

    def _result(self) -> Result:
        assert self.finish_reason is not None
        ended = Instant()
        wants_logprobs = self._request.settings.logprobs
        stats = Stats(
            rounds=tuple(self.rounds),
            num_round_tokens=max(len(self._token_ids) - 1, 0),
            prefill_seconds=self._prefilled.run_seconds_since(self._started),
            decode_seconds=ended.run_seconds_since(self._prefilled),
            device_seconds=self._device_seconds,
            compile_seconds=ended.compile_seconds - self._started.compile_seconds,
            tree_depth=self._tree_depth,
            num_draft_tokens=self._num_draft_tokens,
        )
        return Result(
            prompt=self._request.prompt,
            prompt_token_ids=list(self._row.prompt),
            token_ids=self._token_ids,
            text=self._text.text,
            finish_reason=self.finish_reason,
            settings=self._request.settings,
            stats=stats,
            category=self._request.category,
            error=self.error,
            raw_logprobs=[logprob.raw for logprob in self._logprobs] if wants_logprobs else None,
            logprobs=[logprob.processed for logprob in self._logprobs] if wants_logprobs else None,
            token_logprobs=self._logprobs if wants_logprobs else None,
            prompt_logprobs=self._prompt_logprobs,
        )


class AnswerText:
    """The growing text of one answer.

    Attributes:
      text: the text decoded so far, cut before a stop string.
      is_stopped: whether the text has reached a stop string.
    """

    def __init__(
        self, tokenizer: TokenizerLike, prompt: Sequence[int], settings: SamplingParams
    ) -> None:
        self._decoder, self._stop = tokenizer.stream(prompt), settings.stop
        self._num_protected, self._end_protected = settings.min_new_tokens, 0
        self._num_shown = 0
        self.text, self.is_stopped = "", False

    def push(self, token_id: int) -> None:
        """Adds a token; a stop string that ends in one of the first `min_new_tokens` is none."""
        self._append(self._decoder.push(token_id))

    def finish(self) -> None:
        """Adds what the decoder held back: the bytes of an unfinished character."""
        if not self.is_stopped:
            self._append(self._decoder.flush())

    def take(self, *, is_last: bool) -> str:
        """Returns the new text; but at last, without an end that may begin a stop string."""
        beginnings = (stop[:size] for stop in self._stop for size in range(1, len(stop)))
        doubtful = (len(one) for one in beginnings if self.text.endswith(one))
        end = len(self.text) - (0 if is_last else max(doubtful, default=0))
        new = self.text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return new

    def _append(self, new: str) -> None:
        begin = len(self.text)
        self.text += new
        if self._num_protected > 0:
            self._num_protected -= 1
            self._end_protected = len(self.text)
        begin = max(begin, self._end_protected)
        places = [(stop, max(begin - len(stop) + 1, 0)) for stop in self._stop]
        ends = [at for stop, first in places if (at := self.text.find(stop, first)) >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self.is_stopped = True
