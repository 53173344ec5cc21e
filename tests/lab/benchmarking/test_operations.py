"""A round by its operations: times of nested events, parts and kinds, and a real profile."""

import jax
import pytest

from jspec.drafters import DEFAULT_NUM_DRAFT_TOKENS, DrafterOptions
from jspec.generation.generator import Generator
from jspec.lab.benchmarking import operations
from jspec.lab.benchmarking.measurement import Measurement, parse_methods
from jspec.lab.benchmarking.operations import Event, Instruction, measure_operations, own_times
from tests import tiny_models


def test_a_loop_has_the_time_that_its_body_leaves():
    """Guards against operations counted twice; the profiler gives them in any order."""
    loop, first, inner, second, after = events = [
        Event(name, begin, end)
        for name, begin, end in (
            ("loop", 0, 100), ("a", 10, 40), ("b", 20, 30), ("c", 50, 90), ("d", 100, 120),
        )
    ]  # fmt: skip
    times = dict(own_times(events[::-1]))
    assert times == {loop: 30, first: 20, inner: 10, second: 40, after: 20}


def test_threads_are_added_up_apart(monkeypatch):
    """An operation of one thread is not inside a loop of another that runs at the same time."""
    loop, inside = Event("while.3", 0, 100), Event("copy.1", 10, 30)
    beside = Event("fusion.2", 5, 95)
    monkeypatch.setattr(operations, "_threads", lambda folder: iter([[loop, inside], [beside]]))
    known = operations.read_instructions(_TEXT)
    monkeypatch.setattr(operations, "_instructions", lambda names: known)
    assert operations._times_by_operation(None) == {
        ("commit", "loop"): 80, ("commit", "copy"): 20, ("choice", "XLA"): 90,
    }  # fmt: skip


_TEXT = """HloModule jit_run
%body (arg: f32[2,8]) -> f32[2,8] {
  %ffi_call.7 = f32[2,8]{1,0} custom-call(%x), custom_call_target="jspec_q4_k_byte_product", \
metadata={op_name="jit(run)/while/body/draft/while/body/target/ffi_call"}
  %ffi_call.8 = f32[2,8]{1,0} custom-call(%x), custom_call_target="jspec_attend_pages", \
metadata={op_name="jit(run)/while/body/target/Decoder/ffi_call"}
  ROOT %copy.1 = f32[2,8]{1,0} copy(%ffi_call.7)
  %while.3 = (s32[], f32[2,8]{1,0}) while(%tuple.1), condition=%c, body=%b
  %fusion.2 = f32[2]{0} fusion(%x), kind=kLoop, metadata={op_name="jit(run)/choice/cond/add"}
}
"""


def test_parts_come_from_scopes_and_kinds_from_kernels():
    """A draft model is called inside `draft`: the outermost scope says whose time it is."""
    assert operations.read_instructions(_TEXT) == {
        "ffi_call.7": Instruction("draft", "product"),
        "ffi_call.8": Instruction("target", "attention"),
        "copy.1": Instruction("commit", "copy"),
        "while.3": Instruction("commit", "loop"),
        "fusion.2": Instruction("choice", "XLA"),
    }


@pytest.fixture
def compile_cache_setting():
    """Puts the compile cache back, which profiles switch off."""
    was = jax.config.jax_enable_compilation_cache
    yield
    jax.config.update("jax_enable_compilation_cache", was)


@pytest.mark.slow
@pytest.mark.usefixtures("library", "compile_cache_setting")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="names the kernels of a CPU")
def test_a_profile_of_real_rounds(tmp_path):
    """Plain decoding drafts nothing; a drafter's round has all parts; the kernels are named."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abcabcabc"}\n')
    target = tiny_models.target()

    class Tiny(Measurement):
        def models(self):
            return target, None

        def generators(self, target, draft, *names, **options):
            return {
                name: Generator(target, **self.methods[name]._asdict(), **options) for name in names
            }

    asked = Tiny(
        methods=parse_methods(["none", "prompt_lookup"], DEFAULT_NUM_DRAFT_TOKENS),
        options=DrafterOptions(), prompts_file=str(path), num_prompts=1, per_category=None,
        max_new_tokens=12, temperature=0.0, batch_sizes=[2],
    )  # fmt: skip
    *_, last = measure_operations(asked)
    plain, lookup = last.record["lines"]
    parts = {
        line["name"]: {(one["part"], one["kind"]) for one in line["operations_ms"]}
        for line in (plain, lookup)
    }
    assert ("target", "product") in parts["jspec plain"]
    assert not {part for part, _ in parts["jspec plain"]} & {"draft", "observe"}
    assert {"draft", "target", "observe"} <= {part for part, _ in parts["jspec prompt_lookup"]}
    assert plain["num_tokens"] == lookup["num_tokens"] == 24
    assert plain["num_drafts"] == 0
    assert all(one["ms"] > 0 for one in plain["operations_ms"])
    assert "a round, without profiler" in last.text


def test_a_device_whose_profiler_says_nothing_is_refused(tmp_path):
    with pytest.raises(operations.InputError, match="expected operations of jit_run"):
        operations._times_by_operation(tmp_path)
