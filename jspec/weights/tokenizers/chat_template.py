"""Chat templates: Jinja2 as transformers runs it."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Returns JSON without HTML escapes, unlike Jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _environment() -> Any:
    """Returns the sandbox with the globals, filters and tags that templates count on."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}…{% endgeneration %}` marks the assistant's words; they pass as is."""

        tags = {"generation"}  # noqa: RUF012 (Jinja2's own declaration)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@functools.cache
def _compile(template: str) -> Any:
    """Returns the template as a program: that takes longer than to run it."""
    return _environment().from_string(template)


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str]
) -> str:
    """Returns the prompt of a conversation, ready for the assistant's next words.

    Args:
      template: the Jinja2 source.
      messages: dicts with `role` and `content`.
      special_tokens: `bos_token`, `eos_token` and the like, as the template's variables.

    Raises:
      InputError: the template is broken or refuses the messages.
    """
    import jinja2

    try:
        return _compile(template).render(
            messages=list(messages),
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
        )
    except (jinja2.TemplateError, TypeError, LookupError, ValueError, ArithmeticError) as error:
        message = " ".join(str(error).split())
        raise InputError(f"the chat template refuses the messages: {message}") from None
