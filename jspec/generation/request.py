"""What a user asks for: a prompt, and the settings with which it is answered."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any, Self

from jspec.common.errors import InputError, check_count, check_number, check_numbers, whole_number
from jspec.sampling.distribution import MOST_TOP

MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
_FLOAT32_MAX = 2.0**127
_FLOAT32_TINY = 2.0**-126


def _is_temperature(value: float | None) -> bool:
    return value is None or 0 <= value <= _FLOAT32_MAX


def _is_top_k(value: int) -> bool:
    return 0 <= value < 2**31


def _is_share(value: float) -> bool:
    return 0 <= value <= 1


# What is expected of each number, and whether a value is that; NaN passes no comparison.
_LIMITS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "max_new_tokens": ("{} of at least 1", lambda value: value >= 1),
    "temperature": ("a finite {} of at least 0", _is_temperature),
    "draft_temperature": ("a finite {} of at least 0", _is_temperature),
    "top_k": ("{} of at least 0", _is_top_k),
    "top_p": ("{} in [0, 1]", _is_share),
    "draft_top_k": ("{} of at least 0", lambda value: value is None or _is_top_k(value)),
    "draft_top_p": ("{} in [0, 1]", lambda value: value is None or _is_share(value)),
    "min_p": ("{} in [0, 1]", _is_share),
    "repetition_penalty": (
        "a finite {} above 0",
        lambda value: _FLOAT32_TINY <= value <= _FLOAT32_MAX,
    ),
    "presence_penalty": ("{} in [-2, 2]", lambda value: -2 <= value <= 2),
    "frequency_penalty": ("{} in [-2, 2]", lambda value: -2 <= value <= 2),
    "min_new_tokens": ("{} of at least 0", lambda value: value >= 0),
    "top_logprobs": (f"{{}} from 0 to {MOST_TOP}", lambda value: 0 <= value <= MOST_TOP),
    "num_beams": ("{} of at least 1", lambda value: value >= 1),
    "length_penalty": ("a finite {}", lambda value: abs(value) <= _FLOAT32_MAX),
    "early_stopping": (
        "{} False, True or 'never'",
        lambda value: isinstance(value, bool) or value == "never",
    ),
    "seed": ("a {} of 64 bits with its sign", lambda value: MIN_SEED <= value <= MAX_SEED),
}

_OF_DRAFTS = "temperature", "top_k", "top_p"  # what a drafter may have a value of its own for


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is answered.

    The defaults decode greedily. Values are checked when the object is made; what depends on the
    model, such as token ids outside its vocabulary, is checked when the request is answered.

    Example:
      >>> SamplingParams(max_new_tokens=64, temperature=0.8, top_p=0.95, seed=1, stop=("\\n\\n",))

    Attributes:
      max_new_tokens: maximum number of tokens of the answer.
      temperature: 0 takes the most likely token; 1 samples from the model's own distribution.
      top_k: keep only this many of the most likely tokens; 0 keeps all.
      top_p: keep the fewest most likely tokens whose probabilities reach this sum; 1 keeps all, 0
        only the likeliest.
      min_p: keep tokens whose probability is at least this share of the highest; 0 keeps all.
      draft_temperature: temperature of the drafter; None uses `temperature`. The distribution of
        the answer does not depend on it, nor on the next two.
      draft_top_k: as `top_k`, of the distribution that drafts are drawn from; None uses `top_k`.
      draft_top_p: as `top_p`, likewise; None uses `top_p`.
      repetition_penalty: divides positive logits, and multiplies negative ones, of every token in
        prompt or answer; 1 changes nothing.
      presence_penalty: subtracted from the logit of every token in the answer, -2 to 2.
      frequency_penalty: the same, times the token's count in the answer, -2 to 2.
      logit_bias: (token id, number added to its logit) pairs, or a dict of them.
      allowed_token_ids: the only tokens that may be emitted; None allows all.
      forbidden_token_ids: tokens that may not be emitted.
      min_new_tokens: the model's end tokens and `stop_token_ids` are suppressed until the answer
        has this many tokens, and stop strings in them do not end it.
      logprobs: whether to report the log-probabilities of the emitted tokens.
      top_logprobs: with `logprobs`, of how many of the likeliest tokens at each place, too.
      prompt_logprobs: with `logprobs`, whether of the prompt's tokens, too.
      pattern: a regular expression (see `jspec.sampling.patterns`) that the answer matches
        from its beginning; it ends where the whole is matched, or at `max_new_tokens`.
      num_beams: of a beam search, which keeps this many texts at temperature 0; 1 is none.
      length_penalty: exponent of the length by which the score of a beam is divided: above 0 longer
        texts gain, below 0 shorter ones.
      early_stopping: when a beam search ends, as in transformers: False, when the best running beam
        would not now be among the `num_beams` best that have ended; True, when that many have
        ended; "never", when no longer text could be among them.
      seed: seed of all randomness of the request, -2^63 to 2^63 - 1.
      stop: texts that end the answer, which is cut before them.
      stop_token_ids: tokens that end the answer, in addition to those of the model.

    Raises:
      InputError: if a value has the wrong type or is out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    draft_temperature: float | None = None
    draft_top_k: int | None = None
    draft_top_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Iterable[tuple[int, float]] | Mapping[int, float] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    forbidden_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    pattern: str | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self)
        for name, (expected, is_good) in _LIMITS.items():
            value = getattr(self, name)
            _expect(is_good(value), expected.format(name), value)
        _expect(
            self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens from 0 to max_new_tokens, {self.max_new_tokens}",
            self.min_new_tokens,
        )
        for name in ("top_logprobs", "prompt_logprobs"):
            is_shown = self.logprobs or not (value := getattr(self, name))
            _expect(is_shown, f"{name} only with logprobs", f"{name} {value} without")
        self._check_lists()
        self._check_beams()
        object.__setattr__(self, "logit_bias", tuple(_pairs(self.logit_bias).items()))  # hashable

    @property
    def draft_sampling(self) -> tuple[float, int, float]:
        """The drafter's temperature, top-k and top-p."""
        pairs = [(getattr(self, f"draft_{name}"), getattr(self, name)) for name in _OF_DRAFTS]
        temperature, top_k, top_p = (usual if value is None else value for value, usual in pairs)
        return temperature, top_k, top_p

    def without_draft_sampling(self) -> Self:
        """Returns the settings of the target alone, for what draws no drafts."""
        return dataclasses.replace(self, **{f"draft_{name}": None for name in _OF_DRAFTS})

    def _check_beams(self) -> None:
        """Checks that a beam search asks for nothing that it cannot do, and others for no part."""
        of_beams, others = (
            ("length_penalty", "early_stopping"),
            "temperature draft_temperature draft_top_k draft_top_p logprobs",
        )
        unread = of_beams if self.num_beams == 1 else (*others.split(), "stop")
        with_ = "of at least 2" if self.num_beams == 1 else "1"
        for name in unread:
            value, usual = getattr(self, name), getattr(type(self), name)
            if value != usual:
                raise InputError(
                    f"expected num_beams {with_} with {name} {value!r}, got {self.num_beams}"
                )

    def _check_lists(self) -> None:
        is_texts = _is_list(self.stop) and all(isinstance(text, str) for text in self.stop)
        _expect(is_texts, "stop as a tuple of texts", repr(self.stop))
        _expect(all(self.stop), "stop strings that are not empty", list(self.stop))
        _expect(all(map(is_unicode, self.stop)), "stop strings in UTF-8", list(self.stop))
        for name in ("allowed_token_ids", "forbidden_token_ids", "stop_token_ids"):
            ids: Any = getattr(self, name)
            is_list = _is_list(ids) or (ids is None and name == "allowed_token_ids")
            _expect(is_list, f"{name} as a tuple of whole numbers", repr(ids))
            for token_id in () if ids is None else ids:
                whole_number(name, token_id)
        if self.pattern is not None:  # and nothing that may keep the answer from it
            _expect(isinstance(self.pattern, str), "pattern as a text", repr(self.pattern))
            for name in ("min_new_tokens", "allowed_token_ids", "forbidden_token_ids"):
                _expect(not getattr(self, name), f"no {name} with a pattern", getattr(self, name))
        is_good = all(0 <= token_id < 2**31 for token_id in self.stop_token_ids)
        _expect(is_good, "stop token ids of at least 0", list(self.stop_token_ids))


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes)


def _pairs(bias: Any) -> dict[int, float]:
    """Returns a logit bias as a dict."""
    try:
        pairs = dict(bias)
    except (TypeError, ValueError):
        expected = "logit_bias as (token id, number) pairs"
        raise InputError(f"expected {expected}, got {bias!r}") from None
    for token_id, value in pairs.items():
        whole_number("a token id of logit_bias", token_id)
        check_number("a value of logit_bias", value)
        _expect(abs(value) <= _FLOAT32_MAX, "finite numbers in logit_bias", pairs)
    return pairs


def is_unicode(text: str) -> bool:
    """Returns whether a text can be encoded: invalid bytes in an argument become surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _expect(condition: bool, expected: str, value: object) -> None:
    if not condition:
        raise InputError(f"expected {expected}, got {value}")


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and how to answer it.

    Example:
      >>> Request("What is a prime number?", SamplingParams(max_new_tokens=64), category="maths")

    Attributes:
      prompt: a text, or token ids, which are given to the model as they are.
      settings: how to answer.
      source: for an encoder-decoder what its encoder reads: token ids, or of a Whisper the
        spectrogram that `jspec.audio.log_mel` returns. The prompt is then what the answer begins
        with. Of a text in, text out model None takes the prompt as the source.
      category: a name shared by requests whose drafts should be accepted about equally often. It
        is used for statistics only.

    Raises:
      InputError: if `settings` are not `SamplingParams`.
    """

    prompt: str | Sequence[int]
    settings: SamplingParams = SamplingParams()
    category: str | None = None
    source: Any = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_settings = isinstance(self.settings, SamplingParams)
        _expect(is_settings, "settings as jspec.SamplingParams", repr(self.settings))


def make_requests(
    prompts: Any, settings: SamplingParams, num_samples: int | None = None
) -> list[Request]:
    """Returns a request for each prompt, a text or a request; or `num_samples` with rising seeds.

    Raises:
      InputError: no list of prompts.
    """
    if isinstance(prompts, Mapping | bytes | Set):
        kind = type(prompts).__name__
        raise InputError(f"expected a prompt as a text or a Request, or a list of them, got {kind}")
    prompts = list(prompts)
    for prompt in prompts:
        _check_prompt(prompt)
    requests = [p if isinstance(p, Request) else Request(p, settings) for p in prompts]
    if num_samples is None:
        return requests
    check_count("num_samples", num_samples, 1, 10**6)
    return [_with_seed(request, k) for request in requests for k in range(num_samples)]


def _check_prompt(prompt: Any) -> None:
    """Raises an `InputError` that says how to give what looks like a part of a prompt."""
    expected = "each prompt as a text, a list of token ids or a Request"
    if isinstance(prompt, Mapping | bytes | Set):
        hint = "of chat messages give the user's text alone, jspec puts it into the chat template"
        raise InputError(f"expected {expected}, got {type(prompt).__name__} ({hint})")
    if not isinstance(prompt, Request | Iterable):
        hint = "one prompt of token ids is a list in a list, [[1, 2, 3]], or Request([1, 2, 3])"
        raise InputError(f"expected {expected}, got {prompt!r} ({hint})")


def _with_seed(request: Request, number: int) -> Request:
    settings = request.settings
    settings = dataclasses.replace(settings, seed=nth_seed(settings.seed, number))
    return dataclasses.replace(request, settings=settings)


def nth_seed(seed: int, index: int) -> int:
    """Returns the seed of the answer of that index among those of one seed: rising, then around."""
    return (seed + index - MIN_SEED) % 2**64 + MIN_SEED
