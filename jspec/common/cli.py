"""Runs a program's main function: flags, and errors of the user in one line."""

import contextlib
import io
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags, logging
from jax.errors import JaxRuntimeError

from jspec.common.errors import InputError
from jspec.common.flag_help import define_help_flags

INTERRUPTED = 130
_MOMENT = 0.05  # seconds until an interrupt is sent again
# What Python says of a flag that is no number, and what a user understands.
_PLAIN = {
    "could not convert string to float: ": "expected a number, got ",
    "invalid literal for int() with base 10: ": "expected a whole number, got ",
}


def run_main(main: Callable[..., None], *, max_arguments: int = 0) -> None:
    """Runs a program's main function under absl; bad input and Ctrl-C end it without a traceback.

    Args:
      main: the function; it gets the command line's arguments that are not flags.
      max_arguments: the largest number of such arguments.
    """

    def guarded(argv: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)
        _hear_interrupts()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # for a terminal that lacks a character
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
        except OSError as error:  # of the system: a closed pipe, a full disk
            _forget_output()
            if isinstance(error, BrokenPipeError):
                return 1
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0

    app.run(guarded, flags_parser=_parse_flags)


def _hear_interrupts() -> None:
    """Makes Ctrl-C work at every moment.

    Python drops an exception that is raised while the garbage collector calls JAX. In that case the
    signal is sent again a moment later.
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
    """Ends the process without Python's cleanup, which would free memory that the device uses."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


def _forget_output() -> None:
    """Drops what standard output still holds, which Python would try to write again at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses flags; a wrong one gives one line on standard error, not a page of usage."""
    define_help_flags()
    try:
        return flags.FLAGS(argv)
    except BrokenPipeError:  # the reader of the help has closed the pipe
        _forget_output()
        sys.exit(1)
    except (flags.Error, AttributeError, LookupError, TypeError, ValueError) as error:
        # Overrides of a config raise whatever the config does.
        said = f"expected a key that is there, got {error}" if type(error) is KeyError else error
        text = " ".join(str(said).split())
        for spoken, expected in _PLAIN.items():
            text = text.replace(spoken, expected)
        print(f"error: {text}", file=sys.stderr)
        sys.exit(2)
