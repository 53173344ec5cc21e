"""The HTTP interface: paths and their handlers.

Only the files `http*.py` know HTTP.
"""

import asyncio
import pathlib
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel

from jspec.common.errors import InputError
from jspec.serving.http_answers import Server, answer, check_model
from jspec.serving.http_errors import (
    RESPONSES,
    UNAVAILABLE,
    Guard,
    RefusalError,
    add_errors,
    naming,
)
from jspec.serving.http_schema import (
    ChatCompletion,
    ChatCompletionChunk,
    Health,
    Model,
    ModelList,
    TextCompletion,
    TextCompletionChunk,
    Tokens,
    Trace,
)
from jspec.serving.replies import ChatReply, TextReply
from jspec.serving.schema import ChatRequest, CompletionRequest, TokenizeRequest
from jspec.serving.tools import plain_tools

_PAGE = pathlib.Path(__file__).with_name("page.html")
# Of the models' description what clients may know; names may be paths of this machine.
_TOLD = (
    "drafter", "num_draft_tokens", "acceptance", "is_lossless", "dtype", "target_quantization",
)  # fmt: skip


_REFERENCE = "#/components/schemas/{}"


def make_app(server: Server) -> FastAPI:
    """Returns the application."""
    # No pages of documentation: they would load scripts from elsewhere.
    app = FastAPI(title="jspec", docs_url=None, redoc_url=None, responses=RESPONSES)
    add_errors(app)
    _add_answers(app, server)
    _add_information(app, server)
    _describe_chunks(app)
    app.add_middleware(Guard, api_key=server.api_key, max_body=server.max_body)
    return app


def _responses(shape: type[BaseModel], chunk_shape: type[BaseModel]) -> dict[int | str, Any]:
    """Returns what is said of a reply, and of the events of a stream in its place."""
    events = {"text/event-stream": {"schema": {"$ref": _REFERENCE.format(chunk_shape.__name__)}}}
    return {200: {"model": shape, "content": events}}


def _describe_chunks(app: FastAPI) -> None:
    """Adds the shapes of events to /openapi.json, as FastAPI knows one shape a reply."""
    describe = app.openapi

    def with_chunks() -> dict[str, Any]:
        document = describe()
        schemas = document["components"]["schemas"]
        for shape in (ChatCompletionChunk, TextCompletionChunk):
            reference = _REFERENCE.format("{model}")
            schema = shape.model_json_schema(ref_template=reference, mode="serialization")
            parts = schema.pop("$defs")
            schemas |= {name: part for name, part in parts.items() if name not in schemas}
            schemas[shape.__name__] = schema
        return document

    app.openapi = with_chunks  # type: ignore[method-assign]


def _add_answers(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions", responses=_responses(TextCompletion, TextCompletionChunk))
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Goes on with texts."""
        tokenizer = server.generator.target.tokenizer
        asked, prompts = body.prompts(), list[list[int]]()
        for index, given in enumerate(asked):
            if isinstance(given, str):
                with naming("prompt", place=f"prompt[{index}]" if len(asked) > 1 else None):
                    # In another thread: a long text takes a while.
                    given = await asyncio.to_thread(tokenizer.encode, given)
            prompts.append(given)
        texts = [""] * len(prompts)
        if body.echo:
            texts = [
                # Without half a character at its end, which the answer may complete.
                given if isinstance(given, str) else "".join(map(tokenizer.stream().push, given))
                for given in asked
            ]
        echoes = [text for text in texts for _ in range(body.n)]
        return await answer(server, body, request, prompts, TextReply, echoes)

    @app.post("/v1/chat/completions", responses=_responses(ChatCompletion, ChatCompletionChunk))
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answers the last message of a conversation."""
        prompt = await asyncio.to_thread(_encode_messages, server, body)
        return await answer(server, body, request, [prompt], ChatReply, [""] * body.n)


def _add_information(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models")
    async def models() -> ModelList:
        """Lists the one model."""
        return ModelList(object="list", data=[await describe(server.model)])

    @app.get("/v1/models/{name:path}")
    async def describe(name: str) -> Model:
        """Describes the one model."""
        check_model(server, name)
        known = server.generator.describe()
        memory = known["drafter_options"]["draft_memory"]
        return Model(
            id=server.model,
            object="model",
            created=0,
            owned_by="jspec",
            max_model_len=server.generator.max_seq_len,
            has_chat_template=server.generator.target.tokenizer.chat_template is not None,
            jspec={name: known[name] for name in _TOLD} | {"draft_memory": memory},
        )

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Tokens:
        """Returns the token ids of a text or a conversation."""
        check_model(server, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InputError("expected either prompt or messages")
        if body.prompt is None:
            ids = await asyncio.to_thread(_encode_messages, server, body)
        else:
            with naming("prompt"):
                encode = server.generator.target.tokenizer.encode
                ids = await asyncio.to_thread(encode, body.prompt)
        return Tokens(count=len(ids), max_model_len=server.generator.max_seq_len, tokens=ids)

    @app.get("/health")
    async def health() -> Health:
        """Says whether requests are answered."""
        if server.worker.error is not None:
            raise RefusalError(UNAVAILABLE, server.worker.error, kind="server_error")
        return Health(status="ok")

    @app.get("/v1/jspec/trace/{reply_id}")
    async def trace(reply_id: str) -> Trace:
        """Returns what the rounds of a reply's answers did, if it is one of the newest."""
        trace_of_reply = server.traces.find(reply_id)
        if trace_of_reply is None:
            message = f"expected the id of one of the newest replies, got {reply_id[:60]!r}"
            raise RefusalError(404, message, param="reply_id")
        return Trace.model_validate(trace_of_reply)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Returns counts and times for Prometheus."""
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_PAGE, media_type="text/html")


def _encode_messages(server: Server, body: ChatRequest | TokenizeRequest) -> list[int]:
    tokenizer = server.generator.target.tokenizer
    if tokenizer.chat_template is None:
        raise RefusalError(400, f"{server.model} has no chat template: expected /v1/completions")
    is_shown = getattr(body, "tool_choice", None) != "none"
    with naming("tools"):
        tools = plain_tools(body.tools or ()) if is_shown else []
    with naming("messages", ["tools"]):
        messages = [message.plain() for message in body.messages or ()]
        text = tokenizer.chat_prompt(messages, tools)
        return tokenizer.encode(text, add_bos=False)  # the template writes BOS itself
