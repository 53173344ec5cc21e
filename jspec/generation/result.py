"""What comes back from a Generator: chunks of an answer as they come, and the whole result."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jspec.common.errors import InputError
from jspec.generation.request import SamplingParams
from jspec.generation.stats import Stats


class Beam(NamedTuple):
    """One beam of an answer that was searched for with `num_beams`.

    Attributes:
      token_ids: its tokens, the one that ended it included.
      text: as text, without special tokens.
      score: sum of its log-probabilities / its number of tokens ^ `length_penalty`.
      finish_reason: "eos", "stop" or "length", as in `Result`.
    """

    token_ids: list[int]
    text: str
    score: float
    finish_reason: str


class TokenLogprob(NamedTuple):
    """Natural log-probabilities of one token, and of others in its place.

    Attributes:
      raw: under the model's own distribution.
      processed: under the distribution that it was sampled from.
      top: (token id, raw log-probability) of the likeliest tokens; empty if not wanted.
    """

    raw: float
    processed: float
    top: Sequence[tuple[int, float]] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """One answer.

    Attributes:
      prompt: the prompt of the request.
      prompt_token_ids: the token ids that the model was given.
      token_ids: the token ids of the answer, including the one that ended it.
      text: the answer as text, without special tokens and cut before a stop string.
      finish_reason: "eos" (the model ended its answer), "stop" (a stop string or stop token came)
        or "length" (`max_new_tokens` or the context was reached); or "failed", see `error`.
      settings: the settings of the request.
      stats: counts and times.
      logprobs: natural log-probability of each token under the distribution that it was sampled
        from, after processors, temperature and filters; None unless `SamplingParams.logprobs` is
        set.
      raw_logprobs: the same under the model's own distribution.
      token_logprobs: both, and those of the likeliest tokens at each place, of which at least
        `SamplingParams.top_logprobs` are there.
      prompt_logprobs: of the prompt's tokens but the first; None unless they are asked for.
      category: the category of the request.
      beams: with `num_beams` all that were found, best first; `text` and `token_ids` are those of
        the first. Else None.
      error: what was wrong with an answer that failed, such as logits that are NaN; else None. The
        tokens before are there.
    """

    prompt: str | Sequence[int]
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    settings: SamplingParams
    stats: Stats
    logprobs: list[float] | None = None
    raw_logprobs: list[float] | None = None
    token_logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    category: str | None = None
    error: str | None = None
    beams: list[Beam] | None = None

    def __repr__(self) -> str:
        """Begins with the text; the whole is in the attributes."""
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return f"<Result {text!r}: {len(self.token_ids)} tokens, {self.finish_reason}>"

    def to_json(self) -> dict[str, object]:
        """Returns the result as plain values, ready for `json.dumps`."""
        return vars(self) | {
            "prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt),
            "seed": self.settings.seed,
            "settings": dataclasses.asdict(self.settings),
            "stats": self.stats.to_json(),
            "beams": self.beams and [beam._asdict() for beam in self.beams],
        }


def check_answered(results: Sequence[Result]) -> None:
    """Raises an `InputError` that names the first answer that failed, if any did."""
    for index, result in enumerate(results):
        if result.error is not None:
            where = f"prompt {index}: " if len(results) > 1 else ""
            raise InputError(f"{where}{result.error}")


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of an answer, as it comes.

    Attributes:
      index: number of the request, counted from 0 in the order in which they were given.
      text: the text to print. It may trail the tokens by an unfinished character or by the
        beginning of a stop string.
      token_ids: the new tokens.
      num_drafted: how many of them the drafter had proposed.
      result: the whole answer, with its last chunk; None before that.
    """

    index: int
    text: str
    token_ids: list[int]
    num_drafted: int
    result: Result | None = None
