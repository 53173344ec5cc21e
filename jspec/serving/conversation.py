"""Conversations and formats, as OpenAI's clients send them and as models know them."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jspec.common.errors import InputError
from jspec.sampling.json_schema import schema_pattern


class Body(BaseModel):
    """An object that may have only the listed fields, and others only as null."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, given: Any) -> Any:
        """Drops null fields: OpenAI's clients send null for what they leave out."""
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None}


def unanchored(pattern: str) -> str:
    """Returns a pattern without ^ at its beginning and $ at its end: it matches whole answers."""
    inner = pattern.removesuffix("$")
    num_escapes = len(inner) - len(inner.rstrip("\\"))
    return (pattern if num_escapes % 2 else inner).removeprefix("^") or pattern


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
        """Returns the call as chat templates know it, with parsed arguments.

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
    """A message of a conversation. Only the assistant's, if it has calls, may lack content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None  # clients send back the message that they were given
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Returns the message as chat templates know it.

        Raises:
          InputError: a message without content, or calls in a message that can have none.
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
          InputError: no schema where there must be one or it cannot be expressed.
        """
        if self.type == "json_schema" and self.json_schema is None:
            raise InputError("expected a json_schema with the type json_schema, got none")
        if self.type != "json_schema" and self.json_schema is not None:
            raise InputError(f"expected no json_schema with the type {self.type}, got one")
        if self.json_schema is not None:
            return schema_pattern(self.json_schema.schema_)
        return None if self.type == "text" else schema_pattern({"type": "object"})
