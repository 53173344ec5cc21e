"""llama.cpp's programs: what they are asked, and what is read from the times that they print."""

import stat
import types

import pytest

from jspec.common.errors import InputError
from jspec.lab.benchmarking.baselines import LlamaCpp

PLAIN = """\
0.00.812.406 I common_perf_print: prompt eval time =     250.00 ms /     2 tokens
0.01.313.508 I common_perf_print:        eval time =     500.00 ms /    63 runs   (    7.94 ms each)
"""
SPECULATIVE = """\
encoded    2 tokens in    0.250 seconds, speed:  228.000 t/s
decoded   64 tokens in    0.500 seconds, speed:  128.000 t/s
n_draft   = 5
n_drafted = 60
n_accept  = 40
"""
PRINTED = {
    "llama-completion": PLAIN,
    "llama-lookup": SPECULATIVE,
    "llama-speculative-simple": SPECULATIVE,
}
COUNTS = {  # tokens after the prompt's call, calls, drafts, accepted
    "llama.cpp plain": (63, 63, 0, 0),
    "llama.cpp lookup:4": (63, 23, 60, 40),
    "llama.cpp model:5": (64, 24, 60, 40),
}


@pytest.fixture
def programs(tmp_path):
    """Returns a folder of programs that keep their arguments and print times."""
    for name, printed in PRINTED.items():
        keep = 'echo "$@" >"$0.args"\ncat "${@: -3:1}" >"$0.prompt"\n'
        write_program(tmp_path / name, f'{keep}cat >&2 <<"END"\n{printed}END\n')
    write_program(tmp_path / "llama-quantize", 'echo x >>"$0.runs"\ncp "$2" "$3"\n')
    return tmp_path


def model_of(folder, name, quantization="packed"):
    path = folder / f"{name}.gguf"
    path.write_bytes(b"weights")
    return types.SimpleNamespace(name=str(path), quantization=quantization)


def make_methods(programs, quantization="packed", **options):
    target, draft = (model_of(programs, name, quantization) for name in ("target", "draft"))
    beside = {"a": ("none", 0), "b": ("model", 5), "c": ("prompt_lookup", 4)}
    return LlamaCpp(programs, {(1, 2): "Why?\n"}, 64, **options).methods(target, draft, beside)


def write_program(path, text):
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def arguments_of(programs, name):
    return (programs / f"{name}.args").read_text().split()


def test_seconds_are_those_of_prompt_and_answer_and_no_token_is_lost(programs):
    """Plain decoding counts runs, which come after the first token; the others count tokens.

    The programs take one line's end off a prompt.
    """
    methods = make_methods(programs)
    assert list(methods) == list(COUNTS)
    for name, answer in methods.items():
        timing = answer([1, 2], 0)
        assert (timing.seconds, timing.num_tokens) == (pytest.approx(0.75), 64)
        assert timing[:5] == ([], *COUNTS[name])
    for name in PRINTED:
        arguments = arguments_of(programs, name)
        assert (arguments[-4], *arguments[-2:]) == ("-f", "-n", "64")
        assert arguments[arguments.index("--temp") + 1] == "0.0"
        assert arguments[arguments.index("-m") + 1] == str(programs / "target.gguf")
    assert (programs / "llama-completion.prompt").read_text() == "Why?\n\n"


def test_a_prompt_that_is_read_as_other_tokens_is_said(programs, capsys):
    answer = LlamaCpp(programs, {(1, 2, 3): "Why?"}, 64).methods(
        model_of(programs, "target"), None, {"c": ("prompt_lookup", 4)}
    )["llama.cpp plain"]
    answer([1, 2, 3], 0)
    assert capsys.readouterr().err.endswith("reads a prompt of 3 tokens as 2\n")


def test_decoding_counts_no_prompt(programs):
    """And no token that comes out of the prompt's own logits."""
    for name, answer in make_methods(programs, decoding=True).items():
        timing = answer([1, 2], 0)
        assert (timing.seconds, timing.num_tokens) == (pytest.approx(0.5), COUNTS[name][0])


def test_speculation_has_the_numbers_and_the_files_of_the_pair(programs):
    """Lookup has its own number, or that of the draft model."""
    for answer in make_methods(programs).values():
        answer([1, 2], 0)
    model = arguments_of(programs, "llama-speculative-simple")
    assert model[model.index("-md") + 1] == str(programs / "draft.gguf")
    assert model[model.index("--spec-draft-n-max") + 1] == "5"
    lookup = arguments_of(programs, "llama-lookup")
    assert lookup[lookup.index("--spec-draft-n-max") + 1] == "4"
    alone = LlamaCpp(programs, {}, 64).methods(
        model_of(programs, "target"), model_of(programs, "draft"), {"b": ("model", 5)}
    )
    assert list(alone) == ["llama.cpp plain", "llama.cpp lookup:5", "llama.cpp model:5"]


def test_sampled_answers_have_a_seed_and_no_filters(programs):
    make_methods(programs, temperature=1.0)["llama.cpp plain"]([1, 2], 7)
    text = (programs / "llama-completion.args").read_text()
    assert "--temp 1.0 -s 7" in text
    assert "--top-k 0 --top-p 1 --min-p 0" in text


def test_floats_are_converted_once(programs):
    """Both models, for both of the runs."""
    for _ in range(2):
        make_methods(programs, None)["llama.cpp plain"]([1, 2], 0)
    assert (programs / "llama-quantize.runs").read_text() == "x\n" * 2
    assert str(programs / "target.BF16.gguf") in arguments_of(programs, "llama-completion")


@pytest.mark.parametrize(
    ("text", "said"),
    [("echo hello", "expected times in what"), ("echo 'no model'; exit 3", "status 3.*no model")],
)
def test_a_program_that_fails_or_says_no_times_is_named(programs, text, said):
    write_program(programs / "llama-lookup", text)
    answer = make_methods(programs)["llama.cpp lookup:4"]
    with pytest.raises(InputError, match=said):
        answer([1, 2], 0)


def test_rounded_weights(programs):
    """Those of a draft change no answer: its file is taken. llama.cpp has none of the target's."""
    with pytest.raises(InputError, match=r"expected a .gguf file, packed or .*target.gguf, int8"):
        make_methods(programs, "int8")
    target, draft = model_of(programs, "target"), model_of(programs, "draft", "q4_0")
    methods = LlamaCpp(programs, {(1, 2): "Why?"}, 64).methods(target, draft, {"b": ("model", 5)})
    methods["llama.cpp model:5"]([1, 2], 0)
    model = arguments_of(programs, "llama-speculative-simple")
    assert model[model.index("-md") + 1] == str(programs / "draft.gguf")
