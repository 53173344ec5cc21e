"""Error replies, and the check of API keys and body sizes; see `http.py`."""

import asyncio
import contextlib
import hmac
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteError

from jspec.common.errors import InputError
from jspec.serving.job import DrainingError, QueueFullError
from jspec.serving.replies import error_of

UNAVAILABLE = 503
_OPEN = {"/", "/health", "/openapi.json"}  # what needs no key
_SHOWN = 200  # characters of a bad value in a message
_SURROGATE = "half of a surrogate pair"
# Words of settings, and what clients call them.
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
# What pydantic says of a wrong value, and what is said here to have been expected.
_SAID = (
    (r"Input should be a valid dictionary.*", "a JSON object"),
    (r"Input should be a valid string, unable to parse raw data .*", "Unicode text"),
    (r"Input should be ((?:greater|less) than .*)", r"a number \1"),
    (r"Input should be (.*)", r"\1"),
    (r"String should have (.*)", r"\1"),
    (r"(?:List|Dictionary) should have (.*) after validation, .*", r"\1"),
    (r"String should match pattern (.*)", r"a string that matches \1"),
)


class _Error(BaseModel):
    """OpenAI's shape of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class _ErrorReply(BaseModel):
    """An error, and nothing else."""

    error: _Error


_STATUSES = (400, 401, 404, 405, 413, 422, 429, UNAVAILABLE)
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": _ErrorReply} for status in _STATUSES
}


class RefusalError(Exception):
    """A request that is answered with an error; arguments are those of `error_of`."""

    def __init__(
        self, status: int, message: str, headers: Mapping[str, str] | None = None, **about: Any
    ) -> None:
        super().__init__(message)
        self.response = JSONResponse(error_of(message, **about), status, headers)


@contextlib.contextmanager
def naming(param: str, fields: Sequence[str] = (), place: str | None = None) -> Iterator[None]:
    """Turns an `InputError` from within into a refusal that names the field it is about.

    That is the first of `fields` that the message mentions, else `param`. Of a value inside the
    field `param` at another `place`, such as "prompt[1]", the refusal names the place.
    """
    try:
        yield
    except (QueueFullError, DrainingError):
        raise
    except InputError as error:
        message = str(error)
        for name, known in _NAMES.items():
            message = message.replace(name, known)
        spellings = ((name, rf"\b({name}|{name.replace('_', ' ')})\b") for name in fields)
        places = {name: re.search(pattern, message) for name, pattern in spellings}
        # Of "stop" and "stop token ids" at one place the longer is meant.
        field = min(
            (name for name, place in places.items() if place),
            key=lambda name: (places[name].start(), -len(name)),  # type: ignore[union-attr]
            default=param,
        )
        if place not in (None, param) and field == param:
            field, message = place, f"{place}: {message}"
        raise RefusalError(400, message, param=field) from None


def add_errors(app: FastAPI) -> None:
    """Makes an application answer every error in OpenAI's shape."""

    def say(kind: type[Exception]) -> Callable[..., Any]:
        return app.exception_handler(kind)

    @say(RefusalError)
    async def refuse(request: Request, error: RefusalError) -> JSONResponse:
        return error.response

    @say(QueueFullError)
    async def wait(request: Request, error: QueueFullError) -> JSONResponse:
        headers = {"Retry-After": str(error.retry_after)}
        kind = "rate_limit_error"
        return RefusalError(429, str(error), headers, kind=kind, code="queue_full").response

    @say(DrainingError)
    async def stop(request: Request, error: DrainingError) -> JSONResponse:
        return RefusalError(UNAVAILABLE, str(error), kind="server_error").response

    @say(InputError)
    async def bad_input(request: Request, error: InputError) -> JSONResponse:
        return RefusalError(400, str(error)).response

    @say(RequestValidationError)
    async def bad_field(request: Request, error: RequestValidationError) -> JSONResponse:
        message, param = _describe(error.errors(), error.body, request.headers)
        return RefusalError(400, message, param=param).response

    @say(StarletteError)
    async def bad_request(request: Request, error: StarletteError) -> JSONResponse:
        if isinstance(cause := error.__cause__, ValueError | RecursionError):
            reason = _unreadable(cause)[:_SHOWN]
            return RefusalError(400, f"expected a JSON object in UTF-8, got {reason}").response
        message = f"{error.detail}: {request.method} {request.url.path[:_SHOWN]}"
        return RefusalError(error.status_code, message, error.headers).response

    @say(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        # A bug of the server: its traceback goes to its log, not to the client.
        return RefusalError(500, "the server has failed", kind="server_error").response


def _unreadable(error: Exception) -> str:
    """Returns what a body is that could not be read as JSON."""
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]
        return f"the byte 0x{byte:02x} at position {error.start}: {error.reason}"
    if isinstance(error, RecursionError):
        return "one that is nested too deeply"
    return f"one that cannot be read: {error}"


def _describe(
    problems: Sequence[Any], body: Any, headers: Mapping[str, str]
) -> tuple[str, str | None]:
    """Returns the message of the first field that is wrong, and the field's place."""
    problem = problems[0]
    if problem["type"] == "json_invalid":
        reason = problem["ctx"]["error"].removesuffix(" at")
        reason = f"{reason} at character {problem['loc'][-1]}"
        return f"expected a JSON object, got broken JSON: {reason}", None
    if len(problem["loc"]) == 1:
        kind, received = headers.get("content-type", "none"), _shown(body)
        if isinstance(body, dict):
            received = f"a wrong one ({problem['msg']})"
            if problem["type"] == "string_unicode":
                received = f"a field whose name has {_SURROGATE}"
        if isinstance(body, bytes):
            received = f"the header Content-Type: {kind[:_SHOWN]}, not application/json"
        return f"expected a JSON object, got {'nothing' if body in (None, b'') else received}", None
    # Where a field may be of several types there is a problem with each type: that which fits best
    # lies deepest.
    places = [
        (_place(error, body), error) for error in problems if error["loc"][1] == problem["loc"][1]
    ]
    deepest, problem = max(places, key=lambda pair: len(pair[0]))
    place = "".join(deepest).removeprefix(".")[:_SHOWN]
    if problem["type"] == "extra_forbidden":
        return f"expected fields that this server knows, got {place!r}", place
    if problem["type"] == "missing":
        return f"expected a field {place!r}, got none", place
    if problem["type"] == "value_error":  # an `InputError` of a validator
        return f"{place}: {problem['ctx']['error']}", place
    there = [error for where, error in places if where == deepest]
    # What is wrong with a value of one of the types, if its type is right.
    there = [error for error in there if not error["type"].endswith("_type")] or there
    said = dict.fromkeys(_expected(error["msg"]) for error in there)
    received = _shown(problem["input"])
    if there[0]["type"] == "too_long":
        received = f"{len(problem['input'])}"
    if there[0]["type"] == "string_unicode":
        received = f"{_SURROGATE} in {received}"
    return f"{place}: expected {' or '.join(said)}, got {received}", place


def _expected(said: str) -> str:
    """Returns what was expected, by what pydantic says."""
    for pattern, words in _SAID:
        if match := re.fullmatch(pattern, said):
            return match.expand(words)
    return said


def _shown(value: Any) -> str:
    shown = repr(value)
    if len(shown) <= _SHOWN:
        return shown
    return f"{len(value)} items" if isinstance(value, list) else shown[:_SHOWN] + "..."


def _place(problem: Any, value: Any) -> list[str]:
    """Returns the place in a body, such as `.messages`, `[1]`, `.foo`, of what is wrong there."""
    place, is_missing = [], problem["type"] == "missing"
    for part in problem["loc"][1:]:
        is_there = part in value if isinstance(value, dict) else isinstance(value, list) and (
            isinstance(part, int))  # fmt: skip
        # Else it is the name of one of several types, or of a field that should be there.
        if is_there or (is_missing and part == problem["loc"][-1]):
            place.append(f"[{part}]" if isinstance(part, int) else f".{part}")
            value = value[part] if is_there else None
    return place


class Guard:
    """ASGI middleware that refuses requests without the key, and bodies that are too long."""

    def __init__(self, app: Any, api_key: str | None, max_body: int) -> None:
        self._app, self._max_body = app, max_body
        self._key = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, num_bytes, is_begun = dict(scope["headers"]), 0, False
        shown = headers.get(b"authorization", b"")
        # Compared in constant time, so that nobody finds a key letter by letter.
        is_known = self._key is None or hmac.compare_digest(shown, self._key)
        if not is_known and scope["path"] not in _OPEN:
            message = "expected the API key of this server as Authorization: Bearer KEY"
            about = {"WWW-Authenticate": "Bearer"}
            refusal = RefusalError(401, message, about, code="invalid_api_key")
            return await refusal.response(scope, receive, send)
        too_long = f"expected a body of at most {self._max_body} bytes, got more"
        if int(headers.get(b"content-length", b"0")) > self._max_body:
            return await RefusalError(413, too_long).response(scope, receive, send)

        async def limited() -> Any:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body:
                raise HTTPException(413, too_long)
            return message

        async def noting(message: Any) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        try:
            return await self._app(scope, limited, noting)
        except asyncio.CancelledError:  # the server waits for nobody any more
            if not is_begun:
                refusal = RefusalError(UNAVAILABLE, str(DrainingError()), kind="server_error")
                await refusal.response(scope, receive, send)
