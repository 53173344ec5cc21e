"""Reading messages and printing answers, in a terminal or in a pipe."""

import contextlib
import itertools
import os
import signal
import sys
import types
from collections.abc import Callable, Iterable, Iterator

from jspec.common.errors import InputError
from jspec.common.json_lines import check_unicode
from jspec.generation.answer import Round
from jspec.lab.analysis.trace import Kind, coloured
from jspec.weights.tokenizers.text_stream import TextStream

_FENCE = '"""'
_FIRST, _NEXT = ">>> ", "... "
_HINT = "Ctrl-D or /bye ends the chat"
_DIM = "\033[2m{}\033[0m"
# Commands to the terminal: a model's text gives none.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if code not in b"\t\n"}


class Terminal:
    """Standard input, output and error of a chat.

    Attributes:
      is_interactive: whether a person types: there are prompt signs, and Ctrl-C ends an answer.
      has_colours: whether standard output shows them.
      num_lines: lines read so far.
    """

    def __init__(self) -> None:
        """Looks what the streams are; a terminal gets editing and a history of lines."""
        if sys.stdin is None:
            raise InputError("expected an open standard input, got a closed one")
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.has_colours = _shows_colours(sys.stdout.isatty())
        self.num_lines = 0
        self._is_dim = _shows_colours(sys.stderr.isatty())
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        if self.is_interactive:
            with contextlib.suppress(ImportError):  # on Windows: editing as the console has it
                import readline

                # What is pasted is one message, whatever lines it has.
                readline.parse_and_bind("set enable-bracketed-paste on")

    def read_message(self) -> str | None:
        """Returns the next message, without space around it; None at the end of the input.

        Between two \""" a message may have several lines.

        Raises:
          InputError: one that is not UTF-8.
        """
        try:
            text = self._read(_FIRST)
            if text is not None and text.lstrip().startswith(_FENCE):
                text = self._read_fenced(text.lstrip().removeprefix(_FENCE))
        except KeyboardInterrupt:
            if not self.is_interactive:
                raise
            print()
            self.say(_HINT)
            return ""
        return None if text is None else check_unicode(text, "the message").strip()

    def _read_fenced(self, text: str) -> str:
        lines = [text.rstrip()]
        while not lines[-1].endswith(_FENCE):
            line = self._read(_NEXT)
            if line is None:  # the input ends here, and so does the message
                break
            lines.append(line.rstrip())
        return "\n".join(lines).removesuffix(_FENCE)

    def _read(self, sign: str) -> str | None:
        self.num_lines += 1
        if not self.is_interactive:
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        try:
            return input(sign)
        except EOFError:
            print()
            return None

    def write(self, text: str) -> None:
        """Writes a part of an answer."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def clean(self, text: str) -> str:
        """Returns a model's text as it may be written here."""
        return text.translate(_CONTROLS) if sys.stdout.isatty() else text

    def say(self, text: object, *, is_dim: bool = False) -> None:
        """Writes a line to standard error."""
        line = _DIM.format(text) if is_dim and self._is_dim else text
        print(line, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def interrupts(self, stop: Callable[[], object]) -> Iterator[None]:
        """Within, Ctrl-C calls `stop`, and raises `KeyboardInterrupt` if it comes again."""
        before, num_heard = signal.getsignal(signal.SIGINT), 0

        def hear(number: int, frame: types.FrameType | None) -> None:
            nonlocal num_heard
            num_heard += 1
            stop() if num_heard == 1 or not callable(before) else before(number, frame)

        if not self.is_interactive:
            yield
            return
        signal.signal(signal.SIGINT, hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _shows_colours(is_terminal: bool) -> bool:
    """See https://no-color.org."""
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Painter:
    """Gives each character of an answer the colour of what became of its token."""

    def __init__(self, stream: TextStream) -> None:
        """`stream` turns the answer's tokens into text."""
        self._stream = stream
        self._kinds: list[Kind] = []  # of the characters that are not painted yet

    def paint(self, text: str, rounds: Iterable[Round]) -> str:
        """Returns the answer's next text, which may trail its rounds' tokens."""
        for a_round in rounds:
            for place, token_id in enumerate(a_round.token_ids):
                kind: Kind = "accepted" if place < a_round.counts.num_accepted else "next"
                self._kinds.extend(kind for _ in self._stream.push(token_id))
        kinds: list[Kind] = self._kinds[: len(text)]
        while len(kinds) < len(text):  # an unfinished character at the end is of no token
            kinds.append("next")
        del self._kinds[: len(text)]
        painted, begin = "", 0
        for kind, run in itertools.groupby(kinds):
            end = begin + sum(1 for _ in run)
            painted += coloured(kind, text[begin:end])
            begin = end
        return painted
