"""From an HTTP request to jobs of the scheduler, and from their updates to a reply or a stream."""

import asyncio
import dataclasses
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel

from jspec.common.errors import InputError
from jspec.generation import request as generation
from jspec.generation.generator import Generator
from jspec.generation.request import SamplingParams, nth_seed
from jspec.generation.result import Result
from jspec.serving.http_errors import UNAVAILABLE, RefusalError, naming
from jspec.serving.job import DrainingError, Job, Update
from jspec.serving.metrics import Metrics
from jspec.serving.replies import ChatReply, Reply, error_of
from jspec.serving.schema import AnswerRequest, ChatRequest, Speculation
from jspec.serving.traces import Traces
from jspec.serving.worker import Worker, check_pattern, make_row

_SHOWN = 200  # characters of a bad value in a message
_GONE = 499  # the status of a request whose client has left; nobody sees it

Updates = asyncio.Queue  # of (number of the answer, its update)


class Server(NamedTuple):
    """What the interface serves.

    Attributes:
      worker: answers requests.
      generator: checks them.
      metrics: what is shown at /metrics.
      traces: what is shown at /v1/jspec/trace.
      model: the model's name, as clients call it.
      defaults: settings of what a request does not name.
      has_seed: whether the defaults' seed counts; else a request without a seed gets a random seed.
      has_limit: whether the defaults' `max_new_tokens` counts in chats; else the reply to a chat
        without a limit ends, at the latest, where the context does.
      api_key: what clients must show; None lets everybody in.
      max_body: the most bytes of a request.
      max_seconds: time limit of every request; None for none.
    """

    worker: Worker
    generator: Generator
    metrics: Metrics
    traces: Traces
    model: str
    defaults: SamplingParams = SamplingParams()
    has_seed: bool = False
    has_limit: bool = False
    api_key: str | None = None
    max_body: int = 2**22
    max_seconds: float | None = None


def check_model(server: Server, name: str | None) -> None:
    """Refuses another model than the server's."""
    if name not in (None, server.model):
        message = f"expected the model {server.model!r}, got {name[:_SHOWN]!r}"
        raise RefusalError(404, message, param="model", code="model_not_found")


async def answer(
    server: Server,
    body: AnswerRequest,
    request: Request,
    prompts: Sequence[list[int]],
    kind: type[Reply],
    echoes: Sequence[str],
) -> Response:
    """Answers each prompt `body.n` times, in one reply."""
    check_model(server, body.model)
    updates, about = Updates(), "messages" if kind is ChatReply else "prompt"
    loop = asyncio.get_running_loop()

    def teller(index: int) -> Callable[[Update], object]:
        def tell(update: Update) -> None:
            shown = _without_tokens(update) if body.most_new_tokens == 0 else update
            loop.call_soon_threadsafe(updates.put_nowait, (index, shown))

        return tell

    reply = kind(server.model, server.generator.target.tokenizer, prompts, echoes, body)
    with naming(about, list(type(body).model_fields)):
        jobs = await asyncio.to_thread(_make_jobs, server, body, prompts, teller, reply.id, about)
        server.worker.submit(jobs)
    if body.stream:
        return _EventStream(_events(body, reply, updates, jobs), server.worker, jobs)
    collect = asyncio.create_task(_collect(updates, len(jobs)))
    gone = asyncio.create_task(_until_gone(request))
    try:
        await asyncio.wait({collect, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not collect.done():
            return Response(status_code=_GONE)
        results = collect.result()
        if (error := next((result.error for result in results if result.error), None)) is not None:
            is_stopping = server.worker.error or error == str(DrainingError())
            status = UNAVAILABLE if is_stopping else 422
            raise RefusalError(status, error, kind="server_error")
        return JSONResponse(_plain(reply.whole(results, _num_cached(body, jobs))))
    finally:
        for task in (collect, gone):
            task.cancel()
        _cancel(server.worker, jobs)


def _make_jobs(
    server: Server,
    body: AnswerRequest,
    prompts: Sequence[list[int]],
    teller: Callable[[int], Callable[[Update], object]],
    reply_id: str,
    about: str,
) -> list[Job]:
    """Returns a job for each answer; `teller` returns what is told of the answer of a number."""
    is_call = body.pattern_field == "tool_choice"
    with naming(body.pattern_field, ("tool_choice", "tools") if is_call else ()):
        pattern = body.answer_pattern()
        check_pattern(server.generator, pattern, is_schema=body.pattern is None)
    if pattern is not None and body.ignore_eos:
        raise InputError("expected no ignore_eos with a pattern, which says where the answer ends")
    defaults = server.defaults
    # A chat, which has one prompt, may fill the context.
    if isinstance(body, ChatRequest) and body.most_new_tokens is None and not server.has_limit:
        room = server.generator.max_seq_len - len(prompts[0])
        defaults = dataclasses.replace(defaults, max_new_tokens=max(room, 1))
    settings = dataclasses.replace(body.settings(defaults), pattern=pattern)
    if body.ignore_eos:
        config = server.generator.target.config
        eos_ids = (token_id for token_id in config.eos_ids if token_id < config.vocab_size)
        settings = dataclasses.replace(
            settings, forbidden_token_ids=(*settings.forbidden_token_ids, *eos_ids)
        )
    if settings.logprobs:
        server.generator.target.tokenizer.label(0)  # here the first name may take a second
    scheduler, jobs = server.worker.scheduler, list[Job]()
    most_at_once, num_answers = scheduler.num_slots + scheduler.max_queue, len(prompts) * body.n
    if num_answers > most_at_once:  # to come again later would not help
        message = f"expected prompts times n up to {most_at_once}, got {num_answers}: there are "
        places = f"{scheduler.num_slots} slots and {scheduler.max_queue} places to wait"
        raise RefusalError(400, message + places, param="n" if body.n > 1 else about)
    asked = body.speculation or Speculation()
    drafting = asked.num_draft_tokens, asked.drafter
    first = settings.seed
    if body.seed is None and not server.has_seed:
        first = secrets.randbelow(2**32)
    limits = [limit for limit in (body.max_seconds, server.max_seconds) if limit is not None]
    deadline = scheduler.clock() + min(limits) if limits else None
    most_new = body.most_new_tokens
    for index, prompt in enumerate(prompts):
        place = f"{about}[{index}]" if len(prompts) > 1 else about
        _check_length(len(prompt), most_new, server.generator.max_seq_len, place)
        for _ in range(body.n):
            # Independent of the request's others, those to other prompts among them.
            answer_settings = dataclasses.replace(settings, seed=nth_seed(first, len(jobs)))
            request = generation.Request(prompt, answer_settings)
            with naming(about, list(type(body).model_fields), place):
                row = make_row(server.generator, request, *drafting)
            tell, known = teller(len(jobs)), {"reply_id": reply_id, "index": len(jobs)}
            jobs.append(Job(request, row, tell, body.priority, deadline, body.user or "", **known))
    return jobs


def _without_tokens(update: Update) -> Update:
    """Returns the update of an answer that was to have no token, as the device always draws."""
    result = update.chunk.result
    if result is not None and result.error is None:
        known = None if result.token_logprobs is None else []
        result = dataclasses.replace(
            result, token_ids=[], text="", token_logprobs=known, finish_reason="length"
        )
    chunk = dataclasses.replace(update.chunk, text="", token_ids=[], result=result)
    return update._replace(chunk=chunk, is_drafted=[], logprobs=[])


def _check_length(num_prompt: int, most_new: int | None, context: int, about: str) -> None:
    """Refuses a prompt, named `about`, that does not fit into the context, or not with the rest."""
    code = "context_length_exceeded"
    where = f"{about}: " if "[" in about else ""
    if num_prompt >= context:
        message = f"{where}expected a prompt of fewer tokens than the context's {context}, got "
        message += str(num_prompt)
        raise RefusalError(400, message, param=about, code=code)
    if most_new is not None and num_prompt + most_new > context:
        message = f"{where}expected max_tokens and the prompt's {num_prompt} tokens together up to "
        message += f"{context}, got max_tokens {most_new}"
        raise RefusalError(400, message, param="max_tokens", code=code)


async def _collect(updates: Updates, count: int) -> list[Result]:
    results: dict[int, Result] = {}
    while len(results) < count:
        index, update = await updates.get()
        if update.chunk.result is not None:
            results[index] = update.chunk.result
    return [results[index] for index in range(count)]


async def _events(
    body: AnswerRequest, reply: Reply, updates: Updates, jobs: Sequence[Job]
) -> AsyncIterator[str]:
    """Yields server-sent events until every answer has ended."""
    results: dict[int, Result] = {}
    while len(results) < len(jobs):
        index, update = await updates.get()
        result = update.chunk.result
        if result is not None and result.error is not None:
            yield _event(error_of(result.error, kind="server_error"))
            return
        yield _event(_plain(reply.chunk(index, update, body.trace)))
        if result is not None:
            results[index] = result
    if body.stream_options is not None and body.stream_options.include_usage:
        in_order = [results[index] for index in range(len(jobs))]
        yield _event(_plain(reply.last_chunk(in_order, _num_cached(body, jobs))))
    yield "data: [DONE]\n\n"


def _num_cached(body: AnswerRequest, jobs: Sequence[Job]) -> int:
    # Of each prompt the first answer counts, as its prompt counts once among the prompt's tokens.
    return sum(job.num_cached for job in jobs[:: body.n])


def _plain(reply: BaseModel) -> dict[str, Any]:
    return reply.model_dump(exclude_unset=True)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


class _EventStream(StreamingResponse):
    """A stream of events; when it ends, in whatever manner, its answers are wanted no more."""

    def __init__(self, events: AsyncIterator[str], worker: Worker, jobs: Sequence[Job]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._worker, self._jobs = worker, jobs

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._worker, self._jobs)


def _cancel(worker: Worker, jobs: Sequence[Job]) -> None:
    for job in jobs:
        worker.scheduler.cancel(job)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
