"""Chat templates: Jinja2, set up as in transformers (whose import takes seconds)."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError


@functools.cache  # compiling a template takes longer than running it
def _compile(template: str) -> Any:
    """Returns the template, in a sandbox with the globals, filters and tags that it relies on."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}…{% endgeneration %}` marks the assistant's words; they pass as is."""

        tags = {"generation"}  # noqa: RUF012 (Jinja2's own declaration)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    # Unlike Jinja2's own filter, without HTML escapes.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Returns the prompt of a conversation, ready for the assistant's next words.

    Messages have a `role` and a `content`; tools are functions as OpenAI describes them. The
    special tokens, `bos_token` and the like, are variables of the template, Jinja2's source.

    Raises:
      InputError: the template is broken or refuses the messages, or leaves out a part of them.
    """
    text = _render(template, messages, special_tokens, tools)
    marked, marked_tools, places = _with_marks(messages, tools)
    try:
        shown = _render(template, marked, special_tokens, marked_tools)
    except InputError:  # it wants other words than marks, and has taken the real ones
        return text
    for mark, place in places.items():
        if mark not in shown:
            why = "the model's chat template leaves them out, and the model would not see them"
            raise InputError(f"expected no {place}: {why}")
    return text


def _with_marks(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, str]]:
    """Returns messages and tools with a mark in the place of each part, and what the marks are."""
    places: dict[str, str] = {}

    def mark(place: str) -> str:
        name = f"part{len(places)}mark"
        places[name] = place
        return name

    marked = []
    for index, message in enumerate(messages):
        copy, where = dict(message), f"messages[{index}]"
        if message.get("content"):
            copy["content"] = mark(f"content of the role {message.get('role')!r} in {where}")
        if message.get("tool_calls"):
            copy["tool_calls"] = [
                dict(call)
                | {"function": _marked_call(call["function"], mark(f"tool_calls in {where}"))}
                for call in message["tool_calls"]
            ]
        marked.append(copy)
    marked_tools = [dict(tool) | {"function": tool["function"] | {"name": mark("tools")}}
                    for tool in tools]  # fmt: skip
    return marked, marked_tools, places


def _marked_call(function: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"name": name, "arguments": dict.fromkeys(function["arguments"], name)}


def _render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]],
) -> str:
    import jinja2

    try:
        return _compile(template).render(
            messages=list(messages),
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
        )
    except (
        jinja2.TemplateError, TypeError, LookupError, ValueError, ArithmeticError, RecursionError
    ) as error:  # fmt: skip
        message = " ".join(str(error).split())
        raise InputError(f"the chat template refuses the messages: {message}") from None
