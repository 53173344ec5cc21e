"""Conversations, tools and formats, as OpenAI's clients send them and as models know them."""

import json
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jspec.common.errors import InputError
from jspec.serving.json_schema import schema_pattern

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Body(BaseModel):
    """An object in which no field may stand that is not listed."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """What the assistant has called; the arguments are JSON."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call that the assistant has made."""

    id: str
    type: Literal["function"]
    function: FunctionCall

    def plain(self) -> dict[str, Any]:
        """Returns the call as chat templates know it, with arguments that are no JSON text.

        Raises:
          InputError: the arguments are no JSON object.
        """
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            shown = self.function.arguments[:60]
            raise InputError(f"expected a tool call's arguments as a JSON object, got {shown!r}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(Body):
    """A message of a conversation. Only one of the assistant with calls may have no content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None  # clients send back the message that they were given
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Returns the message as chat templates know it.

        Raises:
          InputError: a message without content, or calls that nobody can have made.
        """
        if self.tool_calls is not None and self.role != "assistant":
            raise InputError(f"expected tool_calls of the assistant only, got some of {self.role}")
        content = self.content
        if content is None:
            if self.tool_calls is None:
                raise InputError(f"expected messages with content, got one of {self.role} without")
            content = ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        # OpenAI's newer name of the same role.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls is not None:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        optional = {"name": self.name, "tool_call_id": self.tool_call_id}
        return message | {key: value for key, value in optional.items() if value is not None}


class Function(Body):
    """A function that the model may call; the parameters are a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


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


class JsonSchema(Body):
    """A schema with a name."""

    name: Annotated[str, Field(max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """Free text, any JSON object, or the JSON texts of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def pattern(self) -> str | None:
        """Returns the expression of the answers that are allowed; None for all.

        Raises:
          InputError: no schema where there must be one, or one that cannot be said.
        """
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise InputError("expected json_schema with the type json_schema, and only there")
        if self.json_schema is not None:
            return schema_pattern(self.json_schema.schema_)
        return None if self.type == "text" else schema_pattern({"type": "object"})


class CallReader:
    """Takes calls of tools out of an answer's text, as Qwen's and Hermes' models write them.

        <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>

    What is no such object stays in the text.

    Attributes:
      num_calls: how many were found so far.
    """

    def __init__(self) -> None:
        self.num_calls, self._rest, self._is_after_call = 0, "", False

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
            calls += [call] if call else []
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
