"""Tools: functions that a model may call, or must, and the calls in what it says."""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from jspec.common.errors import InputError, prefixed_errors
from jspec.serving.conversation import Body
from jspec.serving.json_schema import schema_pattern

FREE_CHOICES = None, "none", "auto"  # by which no call must be made
_BEGIN, _END = "<tool_call>", "</tool_call>"


class Function(Body):
    """A function that the model may call; the parameters are a JSON schema."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # a call that is demanded is strict, another cannot be


class Tool(Body):
    """A tool, which is always a function. The chat template tells the model of it."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Returns the tool as chat templates know it."""
        own = self.function
        optional = {"description": own.description, "parameters": own.parameters}
        known = {key: value for key, value in optional.items() if value is not None}
        return {"type": "function", "function": {"name": own.name, **known}}

    def call_pattern(self) -> str:
        """Returns the expression of a call by which the function's parameters are satisfied.

        Raises:
          InputError: parameters that are no object, or a schema that cannot be said.
        """
        parameters = {"type": "object"} | (self.function.parameters or {})
        with prefixed_errors(f"tools: the parameters of {self.function.name!r}"):
            if parameters["type"] != "object":
                raise InputError(f"expected the type object, got {parameters['type']!r}")
            arguments = schema_pattern(parameters)
        name = re.escape(json.dumps(self.function.name))
        return f'{_BEGIN}\n\\{{"name": {name}, "arguments": {arguments}\\}}\n{_END}'


def plain_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns the tools as chat templates know them.

    Raises:
      InputError: two of one name.
    """
    names = [tool.function.name for tool in tools]
    if len(names) > len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"expected tools of different names, got two of {twice!r}")
    return [tool.plain() for tool in tools]


class FunctionName(Body):
    """The name of a function."""

    name: str


class ToolChoice(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


def demanded_call(choice: str | ToolChoice | None, tools: Sequence[Tool]) -> str | None:
    """Returns the expression of the one call that must be made; None where none must.

    Raises:
      InputError: a call of none of the tools, or of parameters that cannot be said.
    """
    if choice in FREE_CHOICES:
        return None
    if isinstance(choice, ToolChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    if not tools:
        raise InputError("expected tool_choice of one of the tools, got none of that name")
    return f"(?:{'|'.join(tool.call_pattern() for tool in tools)})"


class CallReader:
    """Takes calls of tools out of an answer's text, as Qwen's and Hermes' models write them.

        <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>

    What is no such object stays in the text.

    Attributes:
      num_calls: how many were found so far.
    """

    def __init__(self, is_parallel: bool = True) -> None:
        """Unless it `is_parallel`, calls after the first one are left out."""
        self.num_calls, self._rest, self._is_after_call = 0, "", False
        self._is_parallel = is_parallel

    def push(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Adds text; returns what is known to be content now, and the new calls, as a delta."""
        self._rest += text
        if self._is_after_call:
            self._rest = self._rest.lstrip()
        content, calls = "", list[dict[str, Any]]()
        while (begin := self._rest.find(_BEGIN)) >= 0:
            end = self._rest.find(_END, begin)
            if end < 0 and not is_last:
                break
            # A model may end its answer with a call that it does not end.
            inner = self._rest[begin + len(_BEGIN) : end if end >= 0 else None]
            whole = self._rest[begin : end + len(_END) if end >= 0 else None]
            call = self._call(inner)
            content += self._rest[:begin].rstrip() if call else self._rest[: begin + len(whole)]
            calls += [call] if call and (self._is_parallel or not call["index"]) else []
            self._rest = self._rest[begin + len(whole) :]
            self._is_after_call = call is not None
            self._rest = self._rest.lstrip() if call else self._rest
        keep = 0 if is_last else self._num_doubtful(begin)
        content += self._rest[: len(self._rest) - keep]
        self._is_after_call &= len(self._rest) == keep
        self._rest = self._rest[len(self._rest) - keep :]
        return ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})

    def _num_doubtful(self, begin: int) -> int:
        """Returns how many characters at the end may belong to a call, or stand before one."""
        if begin < 0:
            sizes = range(len(_BEGIN) - 1, 0, -1)
            found = next((n for n in sizes if self._rest.endswith(_BEGIN[:n])), 0)
            begin = len(self._rest) - found
        return len(self._rest) - len(self._rest[:begin].rstrip())

    def _call(self, text: str) -> dict[str, Any] | None:
        try:
            found = json.loads(text, parse_constant=_refuse_constant)
            name, arguments = found["name"], found["arguments"]
            if isinstance(name, str):
                name.encode()  # a ValueError for the half of a surrogate pair
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        function = {"name": name, "arguments": json.dumps(arguments)}
        self.num_calls += 1
        return {"index": self.num_calls - 1, "id": f"call_{uuid.uuid4().hex}", "type": "function",
                "function": function}  # fmt: skip


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
