"""`--help` and `--helpfull` by topic, where absl lists flags by module.

`--help` prints the flags that most people need, `--helpfull` all flags of the program. Modules that
define flags put them under a topic with `list_flags`; flags without a topic are the program's own.
"""

import sys
import textwrap
from typing import Any

from absl import flags

_WIDTH = 100
_COLUMN = 28
_OWN = "This program"
_ABSL = "absl's own: --flagfile, --logtostderr, --verbosity, --pdb and others of its modules."
_ORDER = "Models", "Prompts", "Sampling", "Acceptance", "Drafting", "Output"
_REPEAT = "; repeat this option to specify a list of values"
_TOPICS: dict[str, tuple[list[str], list[str]]] = {topic: ([], []) for topic in _ORDER}


def list_flags(topic: str, usual: str = "", other: str = "") -> None:
    """Puts the usual flags, separated by spaces, and others of `--helpfull` only under a topic."""
    _TOPICS[topic][0].extend(usual.split())
    _TOPICS[topic][1].extend(other.split())


def define_help_flags() -> None:
    """Replaces absl's help flags; absl must have defined them."""
    for name, short_name in (("help", "?"), ("helpshort", None), ("helpfull", None)):
        flag = _HelpFlag(name, False, f"see --{name}", short_name=short_name, allow_override=True)
        flags.DEFINE_flag(flag)


class _HelpFlag(flags.BooleanFlag):
    def parse(self, arg: Any) -> None:
        if self._parse(arg):
            print(_format_help(is_full=self.name == "helpfull"), flush=True)
            sys.exit(0)


def _format_help(*, is_full: bool) -> str:
    """Returns what the program does, and all its flags by topic or the usual ones."""
    own = {flag.name: flag for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])}
    listed = {name for names in _TOPICS.values() for one in names for name in one}
    topics = {topic: usual + other * is_full for topic, (usual, other) in _TOPICS.items()}
    topics[_OWN] = [name for name in own if name not in listed]
    parts = [(sys.modules["__main__"].__doc__ or "").strip()]
    for topic, names in topics.items():
        lines = [_format_flag(own[name]) for name in dict.fromkeys(names) if name in own]
        if lines:
            parts.append("\n".join([f"{topic}:", *lines]))
    parts.append(_ABSL if is_full else "--helpfull lists all flags.")
    return "\n\n".join(parts)


def _format_flag(flag: flags.Flag) -> str:
    name = f"  --[no]{flag.name} " if flag.boolean else f"  --{flag.name} "
    # absl adds the choices in front and, to a flag that may come twice, a sentence of its own.
    text = " ".join((flag.help or "").split()).removesuffix(_REPEAT)
    if flag.default_as_str and flag.default not in ("", []):
        text += f" [{flag.default_as_str.strip(chr(39))}]"
    lines = textwrap.wrap(text, _WIDTH - _COLUMN, break_on_hyphens=False) or [""]
    return "\n".join([name.ljust(_COLUMN) + lines[0], *(" " * _COLUMN + x for x in lines[1:])])
