"""Runs a program's main function: flags, and errors of the user in one line.

absl lists flags by module. Here modules put their flags under a topic with `list_flags`; flags
without a topic belong to the program. `--help` prints the flags that most people need, `--helpfull`
all flags of the program.
"""

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import signal
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import app, flags, logging
from jax.errors import JaxRuntimeError

from jspec.common.errors import InputError, describe_error
from jspec.common.user_cache import forbid_network

_INTERRUPTED = 130  # the exit status
_MOMENT = 0.05  # seconds until an interrupt is sent again
_WIDTH = 100
_COLUMN = 28
_IMPORTS = flags.DEFINE_multi_string(
    "import", [], "A module, or a .py file, to import first; it may register drafters and rules of "
    "your own (docs/write_your_own.md). May be given several times."
)  # fmt: skip
_OFFLINE = flags.DEFINE_bool(
    "offline", False, "Use no network: refuse models that are not on this machine."
)
# What variables of the environment, such as JAX_ENABLE_X64, would change: types, and a seed's text.
_JAX = {
    "jax_enable_x64": False,
    "jax_numpy_rank_promotion": "allow",
    "jax_threefry_partitionable": True,
}
_OWN, _YOURS = "This program", "Your own code"
_ABSL = "Flags of absl, such as --flagfile, --verbosity and --pdb, work too."
_ORDER = "Models", "Prompts", "Sampling", "Acceptance", "Drafting", _YOURS, "Output"
_MODULE = re.compile(r"[^\W\d][\w-]*(\.[^\W\d][\w-]*)*")
_REPEAT = "; repeat this option to specify a list of values"
_TOPICS: dict[str, tuple[list[str], list[str]]] = {topic: ([], []) for topic in _ORDER}
_NO_BOOLEAN = re.compile(r"\('Non-boolean argument to boolean flag', (.*)\)$")
# What Python says of a flag that is no number, and what a user understands.
_PLAIN = {
    "could not convert string to float: ": "expected a number, got ",
    "invalid literal for int() with base 10: ": "expected a whole number, got ",
}


def run_main(main: Callable[..., None], *, max_arguments: int = 0) -> None:
    """Runs a program's main function under absl; bad input and Ctrl-C end it without a traceback.

    The function gets the command line's arguments that are not flags, at most `max_arguments`.
    """

    def guarded(argv: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)
        for name, value in _JAX.items():
            jax.config.update(name, value)
        _hear_interrupts()
        if sys.stderr is None:  # closed by the shell: print() would take standard output
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # for a terminal that lacks a character
        try:
            _check_output()
            if len(argv) > 1 + max_arguments:
                most = f"at most {max_arguments} besides flags"
                allowed = most if max_arguments else "flags only"
                raise InputError(f"expected {allowed}, got {argv[1 + max_arguments]!r}")
            if _OFFLINE.value:
                forbid_network()
            _import_all(_IMPORTS.value)
            main(*argv[1:])
            return 0
        except InputError as error:
            said = str(error)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            os._exit(_INTERRUPTED)  # Python's cleanup would free memory that the device uses
        except (JaxRuntimeError, MemoryError) as error:
            if isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            (first, *_) = str(error).strip().splitlines() or ["none is left"]
            less = "fewer rows, shorter texts or quantised weights take less"
            said = f"not enough memory: {first}; {less}"
        except OSError as error:  # of the system: a closed pipe, a full disk
            _forget_output()
            if isinstance(error, BrokenPipeError):
                return 1
            said = _system_error(error)
        print(f"error: {said}", file=sys.stderr)
        return 2

    app.run(guarded, flags_parser=_parse_flags)


def _import_all(names: Sequence[str]) -> None:
    """Imports modules by name, the current folder's among them, or files by path.

    Raises:
      InputError: one that cannot be imported, whatever it raises.
    """
    sys.path.append(os.getcwd())  # as `python -m` has it, and the console command has not
    for name in names:
        is_file = name.endswith(".py")
        if is_file and not os.path.isfile(name):
            raise InputError(f"--import={name}: no such file")
        if not is_file and (os.path.isfile(name) or not _MODULE.fullmatch(name)):
            raise InputError(f"--import={name}: expected a module's name or a .py file")
        try:
            if is_file:
                spec = importlib.util.spec_from_file_location(pathlib.Path(name).stem, name)
                assert spec is not None  # a file's name always gives one
                assert spec.loader is not None
                module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            else:
                importlib.import_module(name)
        except Exception as error:  # it is the user's code
            raise InputError(f"--import={name}: {describe_error(error)}") from None


def _hear_interrupts() -> None:
    def on_interrupt(number: int, frame: types.FrameType | None) -> None:
        # Python drops an exception that is raised while the garbage collector calls JAX.
        if frame is not None and frame.f_code.co_name == "_xla_gc_callback":
            target = threading.main_thread().ident, number
            threading.Timer(_MOMENT, signal.pthread_kill, target).start()
            return
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, on_interrupt)


def _check_output() -> None:
    if sys.stdout is None:  # closed by the shell: what is printed would be lost
        raise InputError("expected an open standard output, got a closed one")


def _system_error(error: OSError) -> str:
    """Returns what the system says; an error that names no file is standard output's."""
    is_named = error.filename is not None or error.strerror is None
    return str(error) if is_named else f"standard output cannot be written: {error.strerror}"


def _forget_output() -> None:
    """Drops what standard output still holds, which Python would try to write again at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses flags; a wrong one gives one line on standard error, not a page of usage."""
    for name, short_name in (("help", "?"), ("helpshort", None), ("helpfull", None)):  # absl's
        flag = _HelpFlag(name, False, f"see --{name}", short_name=short_name, allow_override=True)
        flags.DEFINE_flag(flag)
    try:
        return flags.FLAGS(argv)
    except BrokenPipeError:  # the reader of the help has closed the pipe
        _forget_output()
        sys.exit(1)
    except OSError as error:  # where the help goes: a full disk
        _forget_output()
        print(f"error: {_system_error(error)}", file=sys.stderr)
        sys.exit(2)
    except (flags.Error, AttributeError, LookupError, TypeError, ValueError) as error:
        # Overrides of a config raise whatever the config does.
        said = f"expected a key that is there, got {error}" if type(error) is KeyError else error
        text = _NO_BOOLEAN.sub(r"expected true or false, got \1", " ".join(str(said).split()))
        for spoken, expected in _PLAIN.items():
            text = text.replace(spoken, expected)
        print(f"error: {text}", file=sys.stderr)
        sys.exit(2)


def list_flags(topic: str, usual: str = "", other: str = "") -> None:
    """Puts the usual flags, separated by spaces, and others of `--helpfull` only under a topic."""
    _TOPICS[topic][0].extend(usual.split())
    _TOPICS[topic][1].extend(other.split())


list_flags(_YOURS, _IMPORTS.name)
list_flags("Models", other=_OFFLINE.name)


class _HelpFlag(flags.BooleanFlag):
    def parse(self, arg: Any) -> None:
        if self._parse(arg):
            print(_format_help(is_full=self.name == "helpfull"), flush=True)
            sys.exit(0)


def _format_help(*, is_full: bool) -> str:
    flag_of = {flag.name: flag for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])}
    for holder in (_IMPORTS, _OFFLINE):  # of every program
        flag_of[holder.name] = flags.FLAGS[holder.name]
    listed = {name for names in _TOPICS.values() for one in names for name in one}
    topics = {topic: usual + other * is_full for topic, (usual, other) in _TOPICS.items()}
    topics[_OWN] = [name for name in flag_of if name not in listed]
    parts = [(sys.modules["__main__"].__doc__ or "").strip()]
    for topic, names in topics.items():
        lines = [_format_flag(flag_of[name]) for name in dict.fromkeys(names) if name in flag_of]
        if lines:
            parts.append("\n".join([f"{topic}:", *lines]))
    parts.append(_ABSL if is_full else "--helpfull lists all flags.")
    return "\n\n".join(parts)


def _format_flag(flag: flags.Flag) -> str:
    name = f"  --[no]{flag.name} " if flag.boolean else f"  --{flag.name} "
    # absl adds the choices in front and, to a flag that may come twice, another sentence.
    text = " ".join((flag.help or "").split()).removesuffix(_REPEAT)
    if flag.default_as_str and flag.default not in (None, "", []):
        text += f" [{flag.default_as_str.strip(chr(39))}]"
    lines = textwrap.wrap(text, _WIDTH - _COLUMN, break_on_hyphens=False) or [""]
    return "\n".join([name.ljust(_COLUMN) + lines[0], *(" " * _COLUMN + x for x in lines[1:])])
