"""The shapes of replies, as they are sent and as /openapi.json describes them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from jspec.serving.conversation import ToolCall


class _Shape(BaseModel):
    """An object that has these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class PromptDetails(_Shape):
    """Tokens of the prompts that were not read again."""

    cached_tokens: int


class Counts(_Shape):
    """Tokens so far, in a chunk of a stream."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Usage(Counts):
    """Counts of a reply; `jspec` holds those of speculation."""

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
    """The assistant's text and calls."""

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


class SpeculationCounts(_Shape):
    """Counts of speculation for an answer, by vLLM's names; a step is a round with drafts or none.

    The histogram has the steps that accepted 0, 1, ... `num_spec_tokens` drafts.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_steps: int
    num_spec_tokens: int


class ReplyMetrics(_Shape):
    """Of a reply of one answer, where drafts were proposed."""

    speculative_decoding: SpeculationCounts


class _Completion(_Shape):
    id: str
    created: int
    model: str
    usage: Usage
    metrics: ReplyMetrics | None = None


class ChatCompletion(_Completion):
    """The reply of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(_Completion):
    """The reply of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class FunctionCallDelta(_Shape):
    """A call of a function; the arguments are JSON."""

    name: str
    arguments: str


class ToolCallDelta(_Shape):
    """A whole call of a tool, and its place among those of the answer."""

    index: int
    id: str
    type: Literal["function"]
    function: FunctionCallDelta


class ChatDelta(_Shape):
    """What a chunk adds to a message; what it does not add is left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class _ChunkChoice(_Shape):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatChunkChoice(_ChunkChoice):
    """A part of one answer of a chat."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None


class TextChunkChoice(_ChunkChoice):
    """A part of one text."""

    text: str
    logprobs: TextLogprobs | None


class ChunkTrace(_Shape):
    """With `trace`: each token's text and source, and drafts proposed and accepted by rounds."""

    tokens: list[tuple[str, Literal["drafted", "plain", "bonus", "residual"]]]
    rounds: list[tuple[int, int]]


class _Chunk(_Shape):
    id: str
    created: int
    model: str
    usage: Counts | Usage | None = None  # where `stream_options` ask for it
    metrics: ReplyMetrics | None = None  # beside the usage of the whole answer
    jspec: ChunkTrace | None = None


class ChatCompletionChunk(_Chunk):
    """An event of a stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextCompletionChunk(_Chunk):
    """An event of a stream of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


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
