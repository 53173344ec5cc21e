"""python -m jspec.chat from end to end, in pipes and in pseudo-terminals."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from jspec.cli.terminal import _shows_colours
from tests.programs import TEMPLATE, command, environment, refuse_all, run
from tests.tiny_models import save_folder

_SECONDS = 120
_DRAFTS = "--drafter=prompt_lookup", "--num_draft_tokens=2"  # nothing to measure


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Returns flags that name a tiny model with a context of 200 tokens."""
    folder = save_folder(tmp_path_factory.mktemp("model"), template=TEMPLATE, num_layers=1)
    return f"--target={folder}", "--dtype=float32", "--max_new_tokens=12", *_DRAFTS


@pytest.fixture(scope="module")
def env(compile_cache, tmp_path_factory):
    """Returns the variables of the programs."""
    return environment(compile_cache, tmp_path_factory.mktemp("home"))


# Makes its standard input the terminal that Ctrl-C comes from, and becomes the program.
_IN_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "  # what the tests run in may ignore it
    "os.execv(sys.argv[1], sys.argv[1:])"
)


class Person:
    """Who sits at a pseudo-terminal: waits for what is shown, and types."""

    def __init__(self, line, env):
        self._screen, terminal = pty.openpty()
        self._program = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *line], env=env, start_new_session=True,
            stdin=terminal, stdout=terminal, stderr=terminal,
        )  # fmt: skip
        os.close(terminal)
        self._unread = self.seen = ""

    def wait_for(self, text):
        """Waits until the text was shown; returns what was shown up to it."""
        deadline = time.monotonic() + _SECONDS
        while text not in self._unread:
            assert time.monotonic() < deadline, f"no {text!r} after {self.seen!r}"
            assert self._read(), f"ended without {text!r} after {self.seen!r}"
        before, _, self._unread = self._unread.partition(text)
        return before

    def _read(self):
        if not select.select([self._screen], [], [], 0.5)[0]:
            return True
        try:
            new = os.read(self._screen, 65536).decode(errors="replace")
        except OSError:  # the other end is closed
            return False
        self._unread += new
        self.seen += new
        return bool(new)

    def type(self, text):
        """Types."""
        os.write(self._screen, text.encode())

    def ask(self, text):
        """Types a line; returns what is shown until the next prompt sign."""
        self.type(f"{text}\r")
        self.wait_for("\n")
        return self.wait_for(">>> ")

    def end(self):
        """Waits for the end; returns the exit status."""
        while self._read():
            pass
        os.close(self._screen)
        return self._program.wait(_SECONDS)


@pytest.fixture
def person(flags, env):
    """Returns a function that starts a chat in a terminal, and waits for its first sign."""

    def start(*more, **variables):
        added = {"TERM": "xterm", "NO_COLOR": ""} | variables
        person = Person(command("jspec.chat", *flags, *more), env | added)
        person.wait_for(">>> ")
        return person

    return start


def test_a_pipe_gives_answers_alone(flags, env, tmp_path):
    """Guards the contract of both outputs, and errors that end a chat.

    The end of the input ends a message of several lines, too.
    """
    path, other_file = tmp_path / "saved.json", tmp_path / "other.json"
    other_file.write_text('{"messages": 1}')
    typed = f'"""two\nlines"""\n\n/nonsense\n/settings top_p=hot\nhi\n/save {path}\n{"x" * 300}\n'
    typed += f'/save {other_file}\n/load {other_file}\n/clear\n"""two\nlines"""\n/load {path}\n'
    typed += '/retry\n/trace\n/trace on\n/clear\n/save /dev/zero\n/clear now\n"""two\nlines'
    status, output, errors = run("jspec.chat", *flags, env=env, stdin=typed.encode())
    assert status == 2, errors  # a script is to know
    assert "\033" not in output + errors
    assert ">>>" not in output
    saved = json.loads(path.read_text())["messages"]
    assert [one["role"] for one in saved] == ["user", "assistant"] * 2
    assert [one["content"] for one in saved[::2]] == ["two\nlines", "hi"]
    first, second = (one["content"] for one in saved[1::2])
    assert output.startswith(f"{first}\n{second}\n{first}\n{second}\n")
    assert output.endswith(f"\n{first}\n")
    assert "calls of the target" in output  # the trace
    wrong = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(wrong) == 9, errors
    assert wrong[0].startswith("error: line 4: ")
    assert [part in line for part, line in zip(
        ("'/nonsense'", "top_p to be a number", "the context has 200", "another file is there",
         "other.json: expected", "colours", "/dev/zero: expected a file, got a device",
         "/clear alone", "8 of the lines"), wrong, strict=True,
    )] == [True] * 9  # fmt: skip
    read = [line for line in errors.splitlines() if line.startswith("[12 tokens (length), ")]
    assert len(read) == 5
    kept = [
        int(total) - int(new) for new, total in re.findall(r"read (\d+) of (\d+)", "".join(read))
    ]
    # The first prompt, at least: what random bytes of its answer become as text is read again.
    assert kept[1] >= len("<[user]two\nlines[assistant]")
    assert other_file.read_text() == '{"messages": 1}'


def test_bad_flags_end_with_one_line(flags, env):
    """Guards against tracebacks and against a status of 0."""
    cases = {("--target=nowhere",): "nowhere", (*flags, "--num_beams=2"): "num_beams"}
    refuse_all("jspec.chat", cases, env=env)


def test_a_terminal_has_signs_and_colours(person):
    """Guards the commands as a person types them, and the colours of drafts.

    Ctrl-C stops the answer and not the program: guards against a chat that is lost with an answer,
    and a line that cannot be given up.
    """
    chat = person("--max_new_tokens=150")
    chat.type("tell\r")
    chat.wait_for("\n")
    time.sleep(0.01)
    chat.type("\x03")
    assert "(stopped)" in chat.wait_for(">>> ")
    chat.type("half")
    chat.wait_for("half")
    time.sleep(1)  # Python misses a Ctrl-C that comes just before it waits for a key
    chat.type("\x03")
    assert "Ctrl-D or /bye ends the chat" in chat.wait_for(">>> ")
    assert "set max_new_tokens=12" in chat.ask("/settings max_new_tokens=12")
    chat.ask("/clear")
    first = chat.ask("hello")
    assert "\033[2m[12 tokens (length)" in first
    assert "temperature=0.0" in chat.ask("/settings")
    assert "set temperature=0.5" in chat.ask("/settings temperature 0.5")
    chat.ask("/trace on")
    assert "\033[1;34m" in chat.ask("again")
    assert "be kind" not in chat.ask("/system")
    chat.ask("/system be kind")
    assert "be kind" in chat.ask("/system")
    chat.type('"""two\r')
    chat.wait_for("... ")
    assert "12 tokens" in chat.ask('lines"""')
    chat.type("\x04")
    assert chat.end() == 0


@pytest.mark.slow
def test_colours_can_be_switched_off(person):
    """By the variable that all programs know; then there is no trace in colours."""
    chat = person(NO_COLOR="1")
    assert "\033[2m" not in chat.ask("tell")
    assert "error: expected a terminal with colours" in chat.ask("/trace on")
    chat.type("/bye\r")
    assert chat.end() == 0


@pytest.mark.parametrize(
    ("is_terminal", "variables", "expected"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False),
     (True, {"TERM": "dumb"}, False)],
)  # fmt: skip
def test_where_there_are_colours(is_terminal, variables, expected, monkeypatch):
    """In a terminal that has not been asked for none."""
    for name, value in ({"TERM": "xterm", "NO_COLOR": ""} | variables).items():
        monkeypatch.setenv(name, value)
    assert _shows_colours(is_terminal) == expected
