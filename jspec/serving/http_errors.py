"""What HTTP clients are told when they are refused, and who is let in; see `http.py`."""

import contextlib
import hmac
import re
from collections.abc import Callable, Iterator, Sequence
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
# Names of settings, and what clients call them.
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


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
RESPONSES: dict[int | str, dict[str, Any]] = {one: {"model": _ErrorReply} for one in _STATUSES}


class RefusalError(Exception):
    """A request that is answered with an error; arguments are those of `error_of`."""

    def __init__(
        self, status: int, message: str, headers: dict[str, str] | None = None, **about: Any
    ) -> None:
        super().__init__(message)
        self.response = JSONResponse(error_of(message, **about), status, headers)


@contextlib.contextmanager
def naming(param: str, fields: Sequence[str] = ()) -> Iterator[None]:
    """Turns an `InputError` from within into a refusal that names the field it is about.

    That is the one of `fields` that the message mentions first, else `param`.
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
        found = min(
            (name for name, place in places.items() if place),
            key=lambda name: (places[name].start(), -len(name)),  # type: ignore[union-attr]
            default=param,
        )
        raise RefusalError(400, message, param=found) from None


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
        message, param = _describe(error.errors())
        return RefusalError(400, message, param=param).response

    @say(StarletteError)
    async def bad_request(request: Request, error: StarletteError) -> JSONResponse:
        where = f"{request.method} {request.url.path[:_SHOWN]}"
        return RefusalError(error.status_code, f"{error.detail}: {where}").response

    @say(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        # A bug of the server's own: its traceback goes to its log, not to the client.
        return RefusalError(500, "the server has failed", kind="server_error").response


def _describe(problems: Sequence[Any]) -> tuple[str, str | None]:
    """Returns the message of the first field that is wrong, and the field's name."""
    problem = problems[0]
    names = [[str(part) for part in one["loc"] if part != "body"] for one in problems]
    if problem["type"] == "json_invalid" or not names[0]:
        return f"expected a JSON object, got something else ({problem['msg']})", None
    param = names[0][0]
    if problem["type"] == "extra_forbidden":
        return f"expected fields that this server knows, got {param!r}"[:_SHOWN], param
    if problem["type"] == "missing" and len(names[0]) == 1:
        return f"expected a field {param!r}, got none", param
    # Where a field may be of several types, there is a problem with each.
    own = [one["msg"] for one, parts in zip(problems, names, strict=True) if parts[0] == param]
    said = " or ".join(dict.fromkeys(own)).replace("Input should be", "expected")
    shown = repr(problem["input"])
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    return f"{param}: {said}, got {shown}", param


class Guard:
    """Lets a request in if it shows the key and is not too long. An ASGI middleware."""

    def __init__(self, app: Any, api_key: str | None, max_body: int) -> None:
        self._app, self._max_body = app, max_body
        self._key = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, num_bytes = dict(scope["headers"]), 0
        shown = headers.get(b"authorization", b"")
        # Compared in constant time, so that nobody finds a key letter by letter.
        is_known = self._key is None or hmac.compare_digest(shown, self._key)
        if not is_known and scope["path"] not in _OPEN:
            message = "expected the API key of this server as Authorization: Bearer KEY"
            refusal = RefusalError(401, message, code="invalid_api_key")
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

        return await self._app(scope, limited, send)
