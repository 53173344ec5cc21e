"""What clients may ask for: OpenAI's requests, with the fields that vLLM and jspec add to them.

Unknown fields are refused. `store` and `metadata`, which are about the client's records, are
ignored.
"""

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from jspec.common.errors import InputError
from jspec.generation.request import MAX_SEED, MIN_SEED, MOST_TOP, SamplingParams
from jspec.serving.conversation import Body, Message, ResponseFormat, Text, unanchored
from jspec.serving.tools import FREE_CHOICES, Tool, ToolChoice, demanded_call

_MAX_INT32 = 2**31 - 1
_Text = Annotated[str, Field(min_length=1)]
_TokenId = Annotated[int, Field(ge=0, le=_MAX_INT32)]
_Ids = Annotated[list[_TokenId], Field(min_length=1)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_IdText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_Penalty = Annotated[float, Field(ge=-2, le=2)] | None
_NumTop = Annotated[int, Field(ge=0, le=MOST_TOP)] | None
_Count = Annotated[int, Field(ge=1, le=_MAX_INT32)] | None

# Fields that mean what the setting of the same name, or of the second name, means.
_SAME = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
         "repetition_penalty", "min_tokens:min_new_tokens", "seed")  # fmt: skip


class StreamOptions(Body):
    """Whether the last chunk of a stream has the usage, and every chunk the usage so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculation(Body):
    """The most drafts a round for this request, and its drafter; 0 or "none" decodes plainly."""

    num_draft_tokens: Annotated[int, Field(ge=0, le=4096)] | None = None
    drafter: str | None = None


class AnswerRequest(Body):
    """Fields of both kinds of requests; None takes the server's default."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: _Count = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    logit_bias: dict[_IdText, _Bias] | None = None
    seed: Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)] | None = None
    stop: _Text | Annotated[list[_Text], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_INT32)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=8)] | None = None
    allowed_token_ids: _Ids | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    max_seconds: Annotated[float, Field(gt=0, le=86_400)] | None = None
    speculation: Speculation | None = None
    trace: bool = False
    pattern: Annotated[_Text, AfterValidator(unanchored)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the tokens' log-probabilities are wanted."""
        raise NotImplementedError

    @property
    def num_top_logprobs(self) -> int:
        """Of how many of the likeliest tokens the log-probabilities are wanted, too."""
        raise NotImplementedError

    @property
    def has_calls(self) -> bool:
        """Whether calls of tools are taken out of the text."""
        return False

    @property
    def pattern_field(self) -> str:
        """The field that says what the answer must look like."""
        return "pattern"

    def answer_pattern(self) -> str | None:
        """Returns the expression that the answer must match, if any; see `pattern_field`."""
        return self.pattern

    @property
    def most_new_tokens(self) -> int | None:
        """The most tokens that an answer may have, if the request says; 0 of an echo."""
        return self.max_tokens

    def settings(self, defaults: SamplingParams) -> SamplingParams:
        """Returns the settings of the request's first answer; what it does not name is default.

        Raises:
          InputError: values that do not go together, such as more `min_tokens` than `max_tokens`.
        """
        if self.stream_options is not None and not self.stream:
            raise InputError("expected stream_options only with stream")
        most = None if self.most_new_tokens is None else max(self.most_new_tokens, 1)
        given: dict[str, Any] = {
            "logprobs": self.wants_logprobs, "top_logprobs": self.num_top_logprobs,
            "max_new_tokens": most,
        }  # fmt: skip
        for pair in _SAME:
            field_name, _, name = pair.partition(":")
            given[name or field_name] = getattr(self, field_name)
        given["top_k"] = None if self.top_k is None else max(self.top_k, 0)
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            given[name] = None if ids is None else tuple(ids)
        if self.logit_bias is not None:
            given["logit_bias"] = {int(name): bias for name, bias in self.logit_bias.items()}
        wanted = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(defaults, **wanted)


_PROMPTS = Field(min_length=1, max_length=128)


def _tag_of_prompt(prompt: Any) -> str | None:
    """Returns which kind a prompt is, by its first part: so each wrong part has its place."""
    if not isinstance(prompt, list):
        return "a text" if isinstance(prompt, str) else None
    if not prompt:
        return "texts"
    kinds = ((str, "texts"), (int | float, "ids"), (list, "lists of ids"))
    return next((tag for kind, tag in kinds if isinstance(prompt[0], kind)), None)


_kind_of_prompt = Discriminator(
    _tag_of_prompt,
    custom_error_type="prompt_type",
    custom_error_message="Input should be a text, texts, token ids or lists of token ids",
)


class CompletionRequest(AnswerRequest):
    """A text, or several, to go on with."""

    prompt: Annotated[
        Annotated[_Text, Tag("a text")]
        | Annotated[list[_Text], _PROMPTS, Tag("texts")]
        | Annotated[_Ids, Tag("ids")]
        | Annotated[list[_Ids], _PROMPTS, Tag("lists of ids")],
        _kind_of_prompt,
    ]
    echo: bool | None = False
    max_tokens: Annotated[int, Field(ge=0, le=_MAX_INT32)] | None = None
    best_of: _Count = None
    logprobs: _NumTop = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the tokens' log-probabilities are wanted; the number is that of other tokens."""
        return self.logprobs is not None

    @property
    def num_top_logprobs(self) -> int:
        """Of how many of the likeliest tokens the log-probabilities are wanted, too."""
        return self.logprobs or 0

    def prompts(self) -> list[str | list[int]]:
        """Returns each prompt, a text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    def settings(self, defaults: SamplingParams) -> SamplingParams:
        """See `AnswerRequest.settings`; with an echo `logprobs` are those of the prompt, too."""
        if self.best_of not in (None, self.n):
            raise InputError(f"expected best_of as many as n, {self.n}, got {self.best_of}")
        if self.max_tokens == 0 and not self.echo:
            raise InputError("expected max_tokens of at least 1 without echo, got 0")
        settings, is_scored = super().settings(defaults), bool(self.echo) and self.wants_logprobs
        if is_scored and self.stream:
            raise InputError("expected echo with logprobs only without stream")
        return dataclasses.replace(settings, prompt_logprobs=is_scored)


_Messages = Annotated[list[Message], Field(min_length=1)]
_Tools = Annotated[list[Tool], Field(min_length=1, max_length=128)]


class ChatRequest(AnswerRequest):
    """A conversation in which the model speaks next."""

    messages: _Messages
    max_completion_tokens: _Count = None
    logprobs: bool | None = False
    top_logprobs: _NumTop = None
    response_format: ResponseFormat | None = None
    tools: _Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the tokens' log-probabilities are wanted."""
        return bool(self.logprobs)

    @property
    def num_top_logprobs(self) -> int:
        """Of how many of the likeliest tokens the log-probabilities are wanted, too."""
        return self.top_logprobs or 0

    @property
    def has_calls(self) -> bool:
        """Whether calls of tools are taken out of the text."""
        return self.tools is not None and self.tool_choice != "none"

    @property
    def pattern_field(self) -> str:
        """The field that says what the answer must look like."""
        field_name = "response_format" if self.pattern is None else "pattern"
        return field_name if self.tool_choice in FREE_CHOICES else "tool_choice"

    def answer_pattern(self) -> str | None:
        """Returns the expression that the answer must match, if any.

        Raises:
          InputError: a schema that cannot be expressed, two patterns, or a call of an unknown tool.
        """
        shaped = self.response_format and self.response_format.pattern()
        call = demanded_call(self.tool_choice, self.tools or ())
        patterns = {"pattern": self.pattern, "response_format": shaped, "tool_choice": call}
        given = [name for name, pattern in patterns.items() if pattern is not None]
        if len(given) > 1:
            raise InputError(f"expected either {' or '.join(given)}, got both")
        return patterns[given[0]] if given else None

    def settings(self, defaults: SamplingParams) -> SamplingParams:
        """See `AnswerRequest.settings`."""
        for name in ("tool_choice", "parallel_tool_calls"):
            if self.tools is None and getattr(self, name) is not None:
                raise InputError(f"expected {name} only with tools")
        return super().settings(defaults)

    @property
    def most_new_tokens(self) -> int | None:
        """The most tokens that an answer may have, if the request says; it has two names."""
        new, old = self.max_completion_tokens, self.max_tokens
        if None not in (new, old) and new != old:
            one = "max_tokens or max_completion_tokens, or both with the same number"
            raise InputError(f"expected {one}; got {old} and {new}")
        return old if new is None else new


class TokenizeRequest(Body):
    """A text or a conversation to be counted."""

    model: str | None = None
    prompt: Text | None = None
    messages: _Messages | None = None
    tools: _Tools | None = None
