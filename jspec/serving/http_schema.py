"""The shapes of replies, as /openapi.json tells clients of them; what is sent is made elsewhere."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from jspec.serving.conversation import ToolCall


class _Shape(BaseModel):
    """An object that has these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class PromptDetails(_Shape):
    """Tokens of the prompts that were not read again."""

    cached_tokens: int


class Usage(_Shape):
    """Counts of a reply; `jspec` holds those of speculation."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    jspec: dict[str, Any]


class LikelyToken(_Shape):
    """A token, its log-probability and its bytes, unless they are not known."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenToken(LikelyToken):
    """A token of the answer, beside those that were likeliest there."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(_Shape):
    """Those of a chat's answer."""

    content: list[ChosenToken]
    refusal: None


class TextLogprobs(_Shape):
    """Those of a text; the first token of an echo has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class ChatMessage(_Shape):
    """What the assistant says and calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = []


class _Choice(_Shape):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatChoice(_Choice):
    """One answer of a chat."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class TextChoice(_Choice):
    """One text."""

    text: str
    logprobs: TextLogprobs | None


class _Completion(_Shape):
    id: str
    created: int
    model: str
    usage: Usage


class ChatCompletion(_Completion):
    """The reply of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(_Completion):
    """The reply of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class Model(_Shape):
    """The one model; `jspec` says by which drafter and rule it answers."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    has_chat_template: bool
    jspec: dict[str, Any]


class ModelList(_Shape):
    """The reply of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(_Shape):
    """The reply of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class Health(_Shape):
    """The reply of /health."""

    status: Literal["ok"]


class TracedRound(_Shape):
    """What a round did; see docs/serve.md."""

    drafter: str
    draft_ids: list[int]
    parents: list[int]
    kept: list[int]
    num_accepted: int
    accepted_ids: list[int]
    next_id: int | None
    next: Literal["bonus", "residual"] | None


class TracedAnswer(_Shape):
    """An answer's first token and its rounds."""

    index: int
    first_token_id: int | None
    rounds: list[TracedRound]
    finish_reason: str | None


class Trace(_Shape):
    """The reply of /v1/jspec/trace."""

    id: str
    object: Literal["jspec.trace"]
    answers: list[TracedAnswer]
