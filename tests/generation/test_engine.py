"""Compiles are told when they happen, and only then; and how many rounds a visit has."""

import json
import os
import subprocess
import sys

import pytest

from jspec.common.timing import compile_clock
from jspec.common.user_cache import compile_listeners
from jspec.generation.engine import MAX_ROUNDS_PER_VISIT, CompileNotice, VisitLength

_PROGRAM = """
import json
from jspec.generation.request import SamplingParams
from tests.tiny_models import make_generator

lines = []
generator = make_generator("prompt_lookup", notify=lines.append, max_seq_len=None)
for settings in ({}, {"seed": 3}, {"top_p": 0.9}, {"top_p": 0.5}, {"logprobs": True}):
    generator.generate("abc", SamplingParams(max_new_tokens=9, temperature=1.0, **settings))
    lines.append(settings)
lines = [line for line in lines if not str(line).startswith("cpu: weights")]
print(json.dumps(lines))
"""


_STREAM = """
import json
from jspec.generation.request import SamplingParams
from tests.tiny_models import make_generator

events = []

def tell_compiling(line):
    if line.startswith("compiling"):
        events.append("notice")

for number, tell in ((1, None), (40, tell_compiling)):
    generator = make_generator("prompt_lookup", notify=tell, max_seq_len=None)
    for chunk in generator.stream("abc", SamplingParams(max_new_tokens=number)):
        events.append(chunk.result is not None)
print(json.dumps(events))
"""


def start(program, cache):
    """Returns what a program prints, whose compiled programs are in their own folder."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env | {"JSPEC_CACHE": str(cache)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.slow
def test_no_notice_stands_in_a_text(tmp_path):
    """Guards against "Hellocompiling once", where the loop alone is not known yet."""
    first, *chunks = start(_STREAM, tmp_path)
    assert first is True  # an answer of one token runs no loop
    assert chunks[0] == "notice"
    assert chunks[1:].count("notice") == 0
    assert len(chunks) > 3  # it is streamed


@pytest.mark.slow
def test_a_compile_is_told_once(tmp_path):
    """First uses alone are told; those that an earlier process has compiled are not."""
    first, *lines = start(_PROGRAM, tmp_path)
    assert first.startswith("compiling once for 1 row of ")
    assert "about" not in first  # nothing is known of it
    filters, logprobs = (line for line in lines if isinstance(line, str))
    assert filters.startswith("compiling once for new filters (top_p): about ")
    assert filters.endswith(" s")
    assert logprobs.startswith("compiling once for new log-probabilities: about ")
    assert lines.index(filters) == 2  # after {} and {"seed": 3}
    assert lines.index(logprobs) == 5
    assert [line for line in start(_PROGRAM, tmp_path) if isinstance(line, str)] == []


@pytest.fixture
def notice():
    lines = []
    return CompileNotice(lines.append), lines


def compile_large(program="jit_run_rounds-1"):
    for listener in tuple(compile_listeners):
        listener(program)
    compile_clock().seconds += 2.2


def test_rounds_after_a_prompt_are_no_news(notice):
    teller, lines = notice
    with teller.around(["1 row"], [64, 64]):
        compile_large("jit_prefill_chunk-1")
    with teller.around(["1 row"]):
        compile_large()
    assert lines == ["compiling once for 1 row, chunks of 64 tokens"]
    with teller.around(["8 rows"]):
        compile_large()
    assert lines[1:] == ["compiling once for new 8 rows: about 4 s"]


def test_parts_that_are_known_may_be_new_together(notice):
    teller, lines = notice
    for parts in (["1 row"], ["8 rows", "filters"], ["1 row", "filters"]):
        with teller.around(parts):
            compile_large()
    assert lines[-1] == "compiling once for 1 row, filters: about 2 s"


def test_small_programs_and_strangers_are_not_told(notice):
    """Guards against a line for a conversion, or for programs of others."""
    teller, lines = notice
    with teller.around(["1 row"]):
        compile_large("jit_convert_element_type-1")
    compile_large()
    assert lines == []
    with CompileNotice(None).around(["1 row"]):
        assert compile_listeners == []


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [(0.5, [16, MAX_ROUNDS_PER_VISIT]), (2.0, [16, 20]), (2.8, [15, 15]), (50.0, [8, 8])],
)
def test_a_visit_takes_forty_milliseconds(milliseconds, expected):
    """But has its least number of rounds, at most twice those of the visit before, and no more than
    the program has room for.
    """
    length = VisitLength(8)
    assert length.num_rounds == 8
    for number in expected:
        length.note(1e-3 * milliseconds * length.num_rounds, length.num_rounds)
        assert length.num_rounds == number


def test_the_last_visit_counts():
    """A GPU's first visits take long. One without rounds says nothing, nor does one whose seconds
    went into compiling.
    """
    length = VisitLength(2)
    length.note(0.3, 2)
    assert length.num_rounds == 2
    length.note(0.004, 2)
    assert length.num_rounds == 4
    for seconds, num_rounds in ((0.002, 0), (0.0, 4)):
        length.note(seconds, num_rounds)
        assert length.num_rounds == 4


def test_a_fixed_length_stays():
    length = VisitLength(4, is_fixed=True)
    length.note(1e-3, 4)
    assert length.num_rounds == 4
