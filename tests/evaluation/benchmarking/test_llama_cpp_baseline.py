"""llama.cpp's programs: what they are asked, and what is read from the times that they print."""

import stat

import pytest

from jspec.common.errors import InputError
from jspec.evaluation.benchmarking import llama_cpp_baseline
from jspec.evaluation.benchmarking.llama_cpp_baseline import llama_methods

PLAIN = """\
0.00.812.406 I common_perf_print: prompt eval time =     250.00 ms /    57 tokens
0.01.313.508 I common_perf_print:        eval time =     500.00 ms /    63 runs   (    7.94 ms each)
"""
SPECULATIVE = """\
encoded   57 tokens in    0.250 seconds, speed:  228.000 t/s
decoded   64 tokens in    0.500 seconds, speed:  128.000 t/s
"""
PRINTED = {
    "llama-completion": PLAIN,
    "llama-lookup": SPECULATIVE,
    "llama-speculative-simple": SPECULATIVE,
}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Returns a folder of programs that keep their arguments and print times."""
    model = tmp_path / "SmolLM2.gguf"
    model.write_bytes(b"weights")
    monkeypatch.setattr(llama_cpp_baseline, "fetch", lambda name: model)
    for name, printed in PRINTED.items():
        keep = 'echo "$@" >"$0.args"\ncat "${@: -3:1}" >"$0.prompt"\n'
        write_program(tmp_path / name, f'{keep}cat >&2 <<"END"\n{printed}END\n')
    write_program(tmp_path / "llama-quantize", 'echo x >>"$0.runs"\ncp "$2" "$3"\n')
    return tmp_path


def make_methods(programs):
    return llama_methods(programs, {(1, 2): "Why?"}, 64, num_drafts=5)


def write_program(path, text):
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_seconds_are_those_of_prompt_and_answer_and_no_token_is_lost(programs):
    """Plain decoding counts runs, which come after the first token; the others count tokens."""
    methods = make_methods(programs)
    assert len(methods) == 3
    for answer in methods.values():
        found = answer([1, 2], 0)
        assert (found.seconds, found.num_tokens) == (pytest.approx(0.75), 64)
        assert found.token_ids == []
    for name in PRINTED:
        arguments = (programs / f"{name}.args").read_text().split()
        assert (arguments[-4], *arguments[-2:]) == ("-f", "-n", "64")
        assert (programs / f"{name}.prompt").read_text() == "Why?"
        assert "SmolLM2-135M-Instruct.BF16.gguf" in arguments[1]
        assert arguments[arguments.index("--temp") + 1] == "0"
    lookup = (programs / "llama-lookup.args").read_text()
    assert "--spec-draft-n-max 5" in lookup


def test_the_model_is_converted_once(programs):
    for _ in range(2):
        make_methods(programs)
    assert (programs / "llama-quantize.runs").read_text() == "x\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [("echo hello", "expected times in what"), ("echo 'no model'; exit 3", "status 3.*no model")],
)
def test_a_program_that_fails_or_says_no_times_is_named(programs, text, said):
    write_program(programs / "llama-lookup", text)
    answer = make_methods(programs)["llama.cpp lookup:5"]
    with pytest.raises(InputError, match=said):
        answer([1, 2], 0)
