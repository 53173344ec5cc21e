"""Where answers end, what is streamed and counted, and that nothing is compiled twice."""

import jax
import pytest

from jspec.common.timing import compile_clock
from jspec.generation.request import Request, SamplingParams
from tests import tiny_models
from tests.cases import slow_unless
from tests.tiny_models import make_generator, shared_generator

_PROMPT = list(b"an open end")
_LONG = SamplingParams(max_new_tokens=40)
DRAFTERS = ["none", "self", "self tree",
            *(slow_unless(False, name) for name in ("prompt_lookup", "merged tree"))]  # fmt: skip


@pytest.fixture(scope="module")
def answer():
    return shared_generator("none").generate(Request(_PROMPT, _LONG)).token_ids


def ends(answer):
    """Returns the first time of tokens that first come at index 2 or later, some apart."""
    return [i for i, token in enumerate(answer) if i >= 2 and token not in answer[:i]][:6]


def generate(drafter, **settings):
    settings = SamplingParams(**{"max_new_tokens": 40, **settings})
    return shared_generator(drafter).generate(Request(_PROMPT, settings))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stop_tokens_end_inside_a_block(answer, drafter):
    """Guards invariant 7: a stop seen only at a block's end, or the rest of the block given out."""
    for end in ends(answer):
        result = generate(drafter, stop_token_ids=(answer[end], 127))
        assert result.token_ids == answer[: end + 1]
        assert result.finish_reason == "stop"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stop_strings_end_inside_a_block(answer, drafter):
    """Guards against stops of two tokens, over rounds, missed or cut somewhere else."""
    for end in ends(answer):
        result = generate(drafter, stop=("never", bytes(answer[end - 1 : end + 1]).decode()))
        assert result.token_ids == answer[: end + 1]
        assert result.finish_reason == "stop"
        assert result.text == bytes(answer[: end - 1]).decode()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_limit_is_exact(answer, drafter):
    """Guards against drafts emitted past max_new_tokens, or lost before it."""
    for limit in range(1, 12):
        result = generate(drafter, max_new_tokens=limit)
        assert (result.token_ids, result.finish_reason) == (answer[:limit], "length")


def test_pieces_add_up_to_the_result(answer):
    """Guards against text or counts lost or doubled between chunks, greedy and sampled."""
    for drafter in ("prompt_lookup", "self", "model"):
        for temperature in (0.0, 0.8):
            settings = SamplingParams(max_new_tokens=40, temperature=temperature, stop=("zq",))
            chunks = list(shared_generator(drafter).stream(Request(_PROMPT, settings)))
            result = chunks[-1].result
            assert [chunk.result for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
            assert len(chunks) > 1
            assert "".join(chunk.text for chunk in chunks) == result.text
            assert [i for chunk in chunks for i in chunk.token_ids] == result.token_ids
            assert sum(chunk.num_accepted for chunk in chunks) == result.stats.num_accepted
            assert all(0 <= chunk.num_accepted <= len(chunk.token_ids) for chunk in chunks)
            assert len(result.token_ids) == 40
    assert generate("self").stats.num_accepted > 0


@pytest.mark.parametrize(
    ("drafter", "batch_size"),
    [slow_unless(False, "none", 1), slow_unless(False, "model", 1), ("model", 3)],
)
def test_a_second_request_compiles_nothing(drafter, batch_size):
    """Guards invariant 6: other prompts, seeds, temperatures and limits are data, insertion too.

    Each of the two widths of a prompt's chunks compiles once: a long prompt is among the first.
    """
    generator = shared_generator(drafter, batch_size=batch_size, rounds_per_visit=2)
    first = SamplingParams(max_new_tokens=5)
    generator.generate([Request(_PROMPT, first)] * batch_size + [Request([5] * 129, first)])
    clock = compile_clock()
    assert clock.num_programs > 0
    before = clock.num_programs
    second = SamplingParams(
        max_new_tokens=17, temperature=0.7, draft_temperature=None if drafter == "none" else 0.3,
        seed=9, stop=("x", "yy"), stop_token_ids=(3, 4),
    )  # fmt: skip
    lengths = range(1, 130, 128 // (batch_size + 1))
    results = generator.generate([Request([5] * n, second) for n in lengths])
    assert clock.num_programs == before
    assert [result.stats.compile_seconds for result in results] == [0.0] * len(results)


def test_counts_do_not_depend_on_the_visit(answer):
    """Guards against rounds counted that the device ran after a stop string had ended the row."""
    end = ends(answer)[-1]
    settings = SamplingParams(max_new_tokens=40, stop=(chr(answer[end]),))
    counts = set()
    for visit in (1, 8):
        generator = make_generator("self", rounds_per_visit=visit)
        generator.engine = shared_generator("self").engine
        counts.add(generator.generate(Request(_PROMPT, settings)).stats.accepted_per_round)
    assert len(counts) == 1


def test_every_part_of_compiling_is_on_the_clock():
    """Guards against tracing and lowering taken for run time, and one program counted thrice."""
    clock = compile_clock()
    seconds, num_programs = clock.seconds, clock.num_programs
    parts = ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
    for name in (*(f"/jax/core/compile/{part}_duration" for part in parts), "/jax/other"):
        jax.monitoring.record_event_duration_secs(name, 1.0)
    assert clock.seconds - seconds == pytest.approx(3)
    assert clock.num_programs - num_programs == 1


def spy_on_rounds(monkeypatch, generator):
    """Returns a list that will hold how many tokens each row emitted in each visit."""
    visits, run = [], generator.engine.run

    def spy(*args):
        state, infos = run(*args)
        visits.append(infos.num_tokens.sum(axis=0).tolist())
        return state, infos

    monkeypatch.setattr(generator.engine, "run", spy)
    return visits


def test_the_device_knows_the_ends_too(answer, monkeypatch):
    """Guards against rounds run for nothing: the host would cut what comes after an end anyway."""
    end = ends(answer)[2]
    model = tiny_models.with_eos(tiny_models.target(), answer[end], 126)
    with_end = make_generator("self", model)
    with_end.engine = shared_generator("self").engine
    for generator, stop, reason in (
        (with_end, (), "eos"),
        (shared_generator("self"), (answer[end],), "stop"),
    ):
        visits = spy_on_rounds(monkeypatch, generator)
        settings = SamplingParams(max_new_tokens=40, stop_token_ids=stop)
        result = generator.generate(Request(_PROMPT, settings))
        assert (result.token_ids, result.finish_reason) == (answer[: end + 1], reason)
        assert sum(row for (row,) in visits) == end  # the first token is the prefill's


def test_a_row_that_the_host_ended_is_silent(answer, monkeypatch):
    """Guards against a device that goes on with what a stop string has ended."""
    stopped = SamplingParams(max_new_tokens=40, stop=(chr(answer[ends(answer)[0]]),))
    generator = shared_generator("none", batch_size=3, rounds_per_visit=2)
    visits = spy_on_rounds(monkeypatch, generator)
    results = generator.generate([Request(_PROMPT, s) for s in (stopped, _LONG, _LONG)])
    assert [result.finish_reason for result in results] == ["stop", "length", "length"]
    first_row = [rows[0] for rows in visits]
    num_visits = -(-(len(results[0].token_ids) - 1) // 2)
    assert all(first_row[:num_visits])
    assert not any(first_row[num_visits:])
    assert len(first_row) > num_visits
