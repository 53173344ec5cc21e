"""Conversations and tools, as OpenAI's clients send them and as chat templates know them."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jspec.common.errors import InputError


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
