"""What the programs share: flags of a model, and errors of the user in one line."""

import contextlib
import io
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging
from jax.errors import JaxRuntimeError

from jspec.common.errors import InputError
from jspec.common.flag_help import define_help_flags

QUANTIZATIONS = ("none", "int8", "int4")
INTERRUPTED = 130
_MOMENT = 0.05  # seconds


def run_main(main: Callable[..., None], *, max_arguments: int = 0) -> None:
    """Runs a program's main under absl; bad input and Ctrl-C end it without a traceback.

    Args:
      main: the program; it gets the command line's arguments that are no flags.
      max_arguments: how many of them there may be.
    """

    def guarded(argv: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)
        _hear_interrupts()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # where a terminal has no such character
        try:
            if len(argv) > 1 + max_arguments:
                most = f"at most {max_arguments} besides flags"
                allowed = most if max_arguments else "flags only"
                raise InputError(f"expected {allowed}, got {argv[1 + max_arguments]!r}")
            main(*argv[1:])
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            _leave_at_once(INTERRUPTED)
        except (JaxRuntimeError, MemoryError) as error:
            if isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            said = str(error).strip().splitlines() or ["none is left"]
            print(f"error: not enough memory: {said[0]}; fewer rows, shorter texts or quantised "
                  "weights take less", file=sys.stderr)  # fmt: skip
            return 2
        except OSError as error:  # of the system: a reader gone away, a full disk behind the output
            _forget_output()
            if isinstance(error, BrokenPipeError):
                return 1
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0

    app.run(guarded, flags_parser=_parse_flags)


def _hear_interrupts() -> None:
    """Makes Ctrl-C heard wherever it comes.

    Python drops an exception that is raised while the garbage collector calls JAX: there the signal
    is sent once more, a moment later.
    """

    def on_interrupt(number: int, frame: types.FrameType | None) -> None:
        if frame is not None and frame.f_code.co_name == "_xla_gc_callback":
            own = threading.main_thread().ident, number
            threading.Timer(_MOMENT, signal.pthread_kill, own).start()
            return
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, on_interrupt)


def _leave_at_once(status: int) -> NoReturn:
    """Ends the process: the device may be at work, on memory that Python's end would take away."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


def _forget_output() -> None:
    """Drops what standard output still holds: Python would try to write it once more at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses flags; a wrong one is a line on standard error, not a page of usage."""
    define_help_flags()
    try:
        return flags.FLAGS(argv)
    except BrokenPipeError:  # the help's reader has gone away
        _forget_output()
        sys.exit(1)
    except (flags.Error, AttributeError, LookupError, TypeError, ValueError) as error:
        # Overrides of a config raise whatever the config does.
        said = f"expected a key that is there, got {error}" if type(error) is KeyError else error
        print(f"error: {' '.join(str(said).split())}", file=sys.stderr)
        sys.exit(2)


def parse_num_draft_tokens(text: str) -> int | str:
    """Returns the number in the flag's text, or "auto".

    Raises:
      InputError: neither.
    """
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"expected num_draft_tokens to be a whole number or auto, got {text!r}"
        ) from None


def parse_quantization(text: str) -> str | None:
    """Returns what `load_model` takes for one of QUANTIZATIONS."""
    return None if text == "none" else text


def check_prompt_text(text: Any) -> str:
    """Returns a prompt of the command line.

    Raises:
      InputError: empty, or bytes that are no UTF-8 (Python keeps them as lone surrogates).
    """
    if not text:
        raise InputError("expected a prompt, got an empty text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError("expected the prompt to be UTF-8, got invalid bytes") from None
    return text
