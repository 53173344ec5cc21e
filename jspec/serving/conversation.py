"""Conversations and formats, as OpenAI's clients send them and as models know them."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jspec.common.errors import InputError
from jspec.generation.request import is_unicode
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


def _whole(text: str) -> str:
    if not is_unicode(text):
        raise PydanticCustomError("string_unicode", "Input should be Unicode text")
    return text


Text = Annotated[str, AfterValidator(_whole)]  # without half of a surrogate pair


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class FunctionCall(Body):
    """What the assistant has called; the arguments are JSON."""

    name: Text
    arguments: Text

    @field_validator("arguments")
    @classmethod
    def check_object(cls, arguments: str) -> str:
        """Refuses arguments that are no JSON object."""
        _read_object(arguments)
        return arguments


def _read_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InputError(f"expected a tool call's arguments as a JSON object, got {text[:60]!r}")
    return value


class ToolCall(Body):
    """A call that the assistant has made."""

    id: str
    type: Literal["function"]
    function: FunctionCall

    def plain(self) -> dict[str, Any]:
        """Returns the call as chat templates know it, with parsed arguments."""
        arguments = _read_object(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(Body):
    """A message of a conversation. Only the assistant's, if it has calls, may lack content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    refusal: None = None  # clients send back the message that they were given
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def check_parts(self) -> Self:
        """Refuses a message without content, and calls in a message that can have none."""
        if self.tool_calls is not None and self.role != "assistant":
            where = f"a message of the role {self.role}"
            raise InputError(f"expected tool_calls only in the assistant's messages, got {where}")
        if self.content is None and self.tool_calls is None:
            raise InputError(f"expected content in a message of the role {self.role}, got none")
        return self

    def plain(self) -> dict[str, Any]:
        """Returns the message as chat templates know it."""
        content = "" if self.content is None else self.content
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

    @model_validator(mode="after")
    def check_schema(self) -> Self:
        """Refuses a schema where there can be none, and none where there must be one."""
        if self.type == "json_schema" and self.json_schema is None:
            shape = '{"name": NAME, "schema": SCHEMA}'
            raise InputError(
                f"expected a field json_schema, {shape}, with the type json_schema, got none"
            )
        if self.type != "json_schema" and self.json_schema is not None:
            raise InputError(f"expected no json_schema with the type {self.type}, got one")
        return self

    def pattern(self) -> str | None:
        """Returns the expression of the answers that are allowed; None for all.

        Raises:
          InputError: a schema that cannot be expressed.
        """
        if self.json_schema is not None:
            return schema_pattern(self.json_schema.schema_)
        return None if self.type == "text" else schema_pattern({"type": "object"})
