"""A JSON text with placeholders as a regular expression.

    {"name": "<string>", "age": "<integer>"}

All but the placeholders stands as it is written, spaces and line breaks included.
"""

import json
import re

from jspec.common.errors import InputError

_INTEGER = r"-?(?:0|[1-9][0-9]*)"
_VALUES = {
    "string": r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4}))*"',
    "number": _INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "integer": _INTEGER,
    "boolean": "(?:true|false)",
}
_PLACEHOLDER = re.compile('"<([^"<>]*)>"')


def skeleton_pattern(skeleton: str) -> str:
    """Returns the regular expression of a JSON skeleton.

    Raises:
      InputError: no JSON object or array, or an unknown placeholder.
    """
    skeleton = skeleton.strip()
    if not skeleton:
        raise InputError("expected a JSON skeleton (--draft_json), got an empty text")
    try:
        value = json.loads(skeleton)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"expected a JSON skeleton (--draft_json), got {skeleton[:60]!r}: {error}"
        ) from None
    if not isinstance(value, dict | list):
        raise InputError(f"expected a JSON object or array as skeleton, got {skeleton[:60]!r}")
    literal, *rest = _PLACEHOLDER.split(skeleton)
    pattern = re.escape(literal)
    for name, literal in zip(rest[::2], rest[1::2], strict=True):
        if name not in _VALUES:
            known = ", ".join(f"<{known}>" for known in _VALUES)
            raise InputError(f"expected placeholders among {known}; got <{name}>")
        pattern += _VALUES[name] + re.escape(literal)
    return pattern
