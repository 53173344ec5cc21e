"""Runs the programs: in their own process, or in this one where that is too slow."""

import functools
import importlib
import json
import os
import subprocess
import sys

from absl.testing import flagsaver

from jspec.common.user_cache import cache_dir

# Of a chat model that begins with BOS.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def command(module, *flags):
    """Returns the command line of a program."""
    return [sys.executable, "-m", module, *flags]


def environment(compile_cache, home):
    """Returns variables that keep a program off the network and off the user's own caches.

    But for the C++ library, which is compiled once for all.
    """
    native, shared = home / "native", cache_dir() / "native"
    if not native.is_symlink():
        home.mkdir(parents=True, exist_ok=True)
        shared.mkdir(parents=True, exist_ok=True)
        native.symlink_to(shared, target_is_directory=True)
    variables = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(home),
        "JSPEC_CACHE": str(home),
        "JAX_COMPILATION_CACHE_DIR": str(compile_cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    return {**os.environ, **variables}


def as_users(env):
    """Returns variables without those by which tests/conftest.py spares compiling."""
    quick = "XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"
    return {name: value for name, value in env.items() if name not in quick}


def run(module, *flags, env, stdin=None, timeout=120):
    """Runs a program to its end; returns its status, output and errors."""
    done = subprocess.run(
        command(module, *flags), env=env, input=stdin, capture_output=True, timeout=timeout
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


# A program's main with each command line in turn, in one process; JSON on standard output.
_MANY = """
import contextlib, importlib, io, json, sys
from absl.testing import flagsaver
from jspec.cli import program as cli
program = importlib.import_module(sys.argv[1])
lines, max_arguments, before = json.loads(sys.argv[2])
exec(before)
outcomes = []
for line in lines:
    if isinstance(line, str):
        exec(line)
        continue
    sys.argv, out, err, status = [program.__name__, *line], io.StringIO(), io.StringIO(), 0
    with flagsaver.flagsaver(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.run_main(program.main, max_arguments=max_arguments)
        except SystemExit as error:
            status = error.code or 0
    outcomes.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(outcomes))
"""


def run_many(module, lines, *, env, max_arguments=0, before=""):
    """Runs a program with several command lines; returns the status, output and errors of all.

    All in one process, after the statements `before`: starting one takes seconds. A string among
    the command lines is a statement that is executed between them.
    """
    arguments = [module, json.dumps([lines, max_arguments, before])]
    done = subprocess.run([sys.executable, "-c", _MANY, *arguments], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def call(module, monkeypatch, capsys, *flags):
    """Runs a program in this process; returns its status, output and errors."""
    from jspec.cli import program as cli

    program = importlib.import_module(module)
    monkeypatch.setattr(sys, "argv", [module, *map(str, flags)])
    capsys.readouterr()
    status = 0
    with flagsaver.flagsaver():
        try:
            cli.run_main(program.main)
        except SystemExit as error:
            status = error.code or 0
    return (status, *capsys.readouterr())


call_generate = functools.partial(call, "jspec.generate")


def check_refusal(status, output, errors):
    """Checks for one line that begins with "error:", and nothing else; returns it."""
    assert status not in (0, None)
    assert output == ""
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert errors.endswith("\n")
    assert "Traceback" not in errors
    return errors


def refuse_all(module, cases, *, env, fixed=(), **options):
    """Runs a program with command lines that it must refuse, each with its message.

    All in one process, as `run_many` does it.

    Args:
      module: the program.
      cases: the message of each command line, which is a text or a tuple of flags.
      env: variables of the process.
      fixed: flags that come first in each line.
      **options: those of `run_many`.
    """
    lines = [flags.split() if isinstance(flags, str) else flags for flags in cases]
    outcomes = run_many(module, [[*fixed, *line] for line in lines], env=env, **options)
    for outcome, message in zip(outcomes, cases.values(), strict=True):
        assert message in check_refusal(*outcome)


def read_lines(path):
    """Returns the records of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path, records):
    """Writes a JSONL file; returns its name."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)
