"""Tools: functions that a model may or must call, and the calls in its answers."""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from jspec.common.errors import InputError, prefixed_errors
from jspec.sampling.json_schema import schema_pattern
from jspec.serving.conversation import Body, Text

FREE_CHOICES = None, "none", "auto"  # by which no call must be made
_BEGIN, _END = "<tool_call>", "</tool_call>"
_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)'
_SIGNS = re.compile(rf"{_STRING}|[{{}}\[\]]|[^\s\"{{}}\[\]]+", re.DOTALL)

_CUT = re.compile(r"\s*[\w.+\\-]*\s*")  # a number, a word or an escape, cut anywhere


class Function(Body):
    """A function that the model may call; the parameters are a JSON schema."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # a call that is demanded is strict, another cannot be


class Tool(Body):
    """A tool, which is always a function. The chat template tells the model of it."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Returns the tool as chat templates know it."""
        function = self.function
        optional = {"description": function.description, "parameters": function.parameters}
        known = {key: value for key, value in optional.items() if value is not None}
        return {"type": "function", "function": {"name": function.name, **known}}

    def call_pattern(self) -> str:
        """Returns the expression of a call by which the function's parameters are satisfied.

        Raises:
          InputError: parameters that are no object, or a schema that cannot be expressed.
        """
        parameters = {"type": "object"} | (self.function.parameters or {})
        # Without any named, a function has no parameters, as OpenAI has it.
        has_any = parameters.get("properties") or "additionalProperties" in parameters
        with prefixed_errors(f"tools: the parameters of {self.function.name!r}"):
            if parameters["type"] != "object":
                raise InputError(f"expected the type object, got {parameters['type']!r}")
            arguments = schema_pattern(
                parameters if has_any else parameters | {"additionalProperties": False}
            )
        name = re.escape(json.dumps(self.function.name))
        return f'{_BEGIN}\n\\{{"name": {name}, "arguments": {arguments}\\}}\n{_END}'


def plain_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns the tools as chat templates know them.

    Raises:
      InputError: two of one name.
    """
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if (first := names.index(name)) < index:
            both = f"tools[{first}] and tools[{index}]"
            raise InputError(f"expected tools of different names, got {both} of {name!r}")
    return [tool.plain() for tool in tools]


class FunctionName(Body):
    """The name of a function."""

    name: str


class ToolChoice(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


def demanded_call(choice: str | ToolChoice | None, tools: Sequence[Tool]) -> str | None:
    """Returns the expression of the call that must be made; None if none must be.

    Raises:
      InputError: a call of an unknown tool, or parameters that cannot be expressed.
    """
    if choice in FREE_CHOICES:
        return None
    if not tools:
        raise InputError("expected tool_choice only with tools")
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
        if not tools:
            raise InputError(f"expected tool_choice of one of the tools, got {name!r}")
    return f"(?:{'|'.join(tool.call_pattern() for tool in tools)})"


class CallReader:
    """Takes calls of tools out of an answer's text, as Qwen's and Hermes' models write them.

        <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>

    A call ends with its JSON object. What is no such object stays in the text, unless the answer's
    end cuts it. Spaces around calls are left out where no text is beside them.

    Attributes:
      num_calls: number of calls so far.
    """

    def __init__(self, is_parallel: bool = True, is_forced: bool = False) -> None:
        """Unless it `is_parallel`, calls after the first are left out; if `is_forced`, all text."""
        self.num_calls, self._rest, self._is_parallel = 0, "", is_parallel
        self._is_forced = is_forced
        # No text since the beginning, or since the last call, but for spaces that are held back.
        self._is_bare, self._spaces = True, ""

    def push(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Adds text; returns what is newly known to be content, and the new calls, as a delta."""
        self._rest += text
        content, calls = "", list[dict[str, Any]]()
        while (begin := self._rest.find(_BEGIN)) >= 0:
            content += self._take(begin)
            end = _end_of_object(self._rest, len(_BEGIN))
            inner = self._rest[len(_BEGIN) : end]
            if end is None and _may_go_on(inner):
                self._rest = "" if is_last else self._rest
                break
            call = None if end is None else self._call(inner)
            if call is None:
                content += self._take(len(_BEGIN))
                continue
            after = self._rest[end:].lstrip()
            if not is_last and _END.startswith(after[: len(_END)]) and len(after) < len(_END):
                break  # until it is known whether the tag follows
            calls += [call] if self._is_parallel or not self.num_calls else []
            self.num_calls += 1
            self._rest = after.removeprefix(_END) if after.startswith(_END) else self._rest[end:]
            self._is_bare, self._spaces = True, ""
        else:
            sizes = range(0 if is_last else len(_BEGIN) - 1, 0, -1)
            doubtful = next((n for n in sizes if self._rest.endswith(_BEGIN[:n])), 0)
            content += self._take(len(self._rest) - doubtful)
        if is_last and not self.num_calls:
            content += self._spaces
        content = "" if self._is_forced else content
        return ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})

    def _take(self, count: int) -> str:
        """Takes the first characters of the text away; returns them, after the spaces before."""
        taken, self._rest = self._spaces + self._rest[:count], self._rest[count:]
        self._is_bare = self._is_bare and not taken.strip()
        self._spaces = taken if self._is_bare else ""
        return "" if self._is_bare else taken

    def _call(self, text: str) -> dict[str, Any] | None:
        try:
            spans = _members(text.strip())
            name, arguments = (json.loads(spans[key], parse_constant=_refuse_constant)
                               for key in ("name", "arguments"))  # fmt: skip
            if isinstance(name, str):
                name.encode()  # a ValueError for the half of a surrogate pair
        except (ValueError, KeyError, RecursionError):
            return None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        function = {"name": name, "arguments": spans["arguments"]}  # the model's own text
        return {"index": self.num_calls, "id": f"call_{uuid.uuid4().hex}", "type": "function",
                "function": function}  # fmt: skip


def _end_of_object(text: str, begin: int) -> int | None:
    """Returns where the JSON object ends that begins there, after spaces; None if it does not.

    Where there is none, that is where it should begin.
    """
    depth = 0
    for match in _SIGNS.finditer(text, begin):
        depth += (match[0] in "{[") - (match[0] in "}]")
        if depth <= 0:
            return match.end() if match[0] == "}" else begin
    return None


def _may_go_on(text: str) -> bool:
    """Returns whether a text may begin JSON: if it is wrong, then at its very end."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string") or bool(_CUT.fullmatch(text, error.pos))
    except RecursionError:
        return False
    return True


def _members(text: str) -> dict[str, str]:
    """Returns the texts of the values of a JSON object by their names; a ValueError if it is none.

    Numbers and strings are as they were written, which `json.loads` forgets.
    """
    decoder, spans = json.JSONDecoder(), dict[str, str]()
    json.loads(text, parse_constant=_refuse_constant)
    place = _after_spaces(text, 1)
    while text[place] != "}":
        name, place = decoder.raw_decode(text, place)
        begin = _after_spaces(text, _after_spaces(text, place) + 1)
        _, end = decoder.raw_decode(text, begin)
        spans[name] = text[begin:end]
        place = _after_spaces(text, end)
        place = _after_spaces(text, place + 1) if text[place] == "," else place
    return spans


def _after_spaces(text: str, place: int) -> int:
    return len(text) - len(text[place:].lstrip())


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
