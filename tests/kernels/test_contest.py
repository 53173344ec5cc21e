"""Candidates compete, on a CPU: XLA's block, spoilt or not, stands in for a GPU's kernels.

No test reads a clock: the seconds of each candidate are given.
"""

import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import kernels
from jspec.common.errors import InputError
from jspec.kernels import candidates, contest, library, trial, verdicts
from jspec.kernels.contest import Candidate
from jspec.kernels.split import MODEL_AXIS, SplitKernel
from jspec.models import decoder, init_cache, make_apply
from jspec.models.cache import PagedKVCache, causal_mask
from jspec.models.layers import rope_cos_sin
from tests.cases import slow_unless
from tests.kernels.families import make_model

CONFIG, PARAMS = make_model("llama")
CONFIG = dataclasses.replace(CONFIG, num_layers=1)
FAST = {"xla": 1.0, "cuda": 0.9}


@pytest.fixture
def stage(monkeypatch, tmp_path):
    """A device on which nothing was tried, with stand-ins, and what was asked of them."""
    stage = types.SimpleNamespace(timed=[], ran=[], path=tmp_path)

    def medians(calls):
        for call in calls.values():
            call()
        stage.timed.append(sorted(calls))
        return {name: FAST[name] for name in calls}

    def take(*stand_ins):
        monkeypatch.setattr(candidates, "block_candidates", lambda: list(stand_ins))

    def record(candidate):
        def run(*operands):
            stage.ran.append((candidate.name, operands[3].shape[1]))
            return candidate.run(*operands)

        return candidate._replace(run=run)

    stage.take = lambda *stand_ins: take(*map(record, stand_ins))
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    monkeypatch.delenv("JSPEC_KERNELS", raising=False)
    for module, name, value in (
        (contest, "medians", medians), (contest, "_MOST_BLOCKS", 1), (contest, "_TURNS", 2),
        (trial, "_SLOTS", 128), (verdicts, "_VERDICTS", {}), (candidates, "_CHOICES", {}),
        (candidates, "_HAS_FAILED", threading.Event()),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    jax.clear_caches()
    yield stage
    jax.clear_caches()


def is_narrow(config, params, x, cache):
    return x.shape[1] <= 16


def stand_in(name="cuda", spoil=lambda x, cache, width: (x, cache), change=lambda seen: seen):
    """Returns XLA's block under a name, with its mask changed and its results spoilt."""

    def run(config, block_offset, params, x, rope, visible, cache):
        operands = x, rope, change(visible), cache, block_offset
        return spoil(*decoder.Block(config).apply({"params": params}, *operands), x.shape[1])

    return Candidate(name, is_narrow, run)


def call(width=3, **changed):
    cache = init_cache(CONFIG, batch_size=1, capacity=40, dtype=jnp.bfloat16)
    tokens = jnp.arange(width, dtype=jnp.int32)[None]
    jax.clear_caches()
    return jax.jit(make_apply(CONFIG))(PARAMS | changed, tokens, cache)[0]


def trace(width=3, batch_size=1, capacity=40):
    """Traces a block of tokens anew, for which a kernel is chosen."""
    cache = init_cache(CONFIG, batch_size=batch_size, capacity=capacity, dtype=jnp.bfloat16)
    jax.clear_caches()
    jax.eval_shape(make_apply(CONFIG), PARAMS, jnp.zeros([batch_size, width], jnp.int32), cache)


def verdict():
    (only,) = verdicts._VERDICTS.values()
    return only


@pytest.fixture
def narrow(monkeypatch):
    """Has contests held for plain steps only."""
    monkeypatch.setattr(contest, "WIDTHS", (1,))
    monkeypatch.setattr(contest, "_TIMED", (1,))


@pytest.fixture
def won(stage, monkeypatch):
    """A stage on which the stand-in has won; contests are counted, and not held."""

    def hold(self):
        stage.timed.append(self.what)
        return {"what": self.what, "choice": "cuda"}

    monkeypatch.setattr(contest.Contest, "hold", hold)
    stage.take(stand_in())
    trace()
    assert verdict()["choice"] == "cuda"
    stage.ran.clear()
    return stage


def test_a_right_and_fast_candidate_computes_blocks_of_all_widths(stage, monkeypatch, capsys):
    """One contest for plain steps and verify calls, and for caches of other sizes.

    A prompt's chunk, which it does not take, is the reference's. It may promise equal widths where
    there is the C++: XLA's results depend on the width.
    """
    expected = call(3)
    monkeypatch.setattr(contest, "_MOST_BLOCKS", 2)
    stage.take(stand_in()._replace(has_equal_widths=library.is_available()))
    assert kernels.chosen_kernels(CONFIG) in ("cpp", "xla")
    stage.ran.clear()
    np.testing.assert_array_equal(call(3), expected)
    assert stage.ran[-1] == ("cuda", 3)
    assert {width for _, width in stage.ran} == {1, 3, 5, 16}
    assert stage.timed == [["cuda", "xla"]] * 2
    assert {CONFIG: {"cuda"}} == candidates._CHOICES
    for width, capacity in ((1, 40), (16, 100), (20, 40)):
        stage.ran.clear()
        trace(width, capacity=capacity)
        assert stage.ran == [("cuda", width)] * (width <= 16)
    assert len(verdicts._VERDICTS) == 1
    assert verdict()["choice"] == "cuda"
    assert verdict()["seconds"]["cuda"] == {"1": 0.9 / 4, "5": 0.9 / 4}  # of 2 blocks, 2 turns
    assert capsys.readouterr().err == (
        "jspec: trying the kernels for a decoder block on this device, once\n"
    )


@pytest.mark.parametrize(
    ("xla", "cuda", "layer", "choice"),
    [
        ((1.0, 1.0), (0.975, 0.975), (1.0, 1.0), "xla"),
        ((1.0, 1.0), (0.965, 0.965), (1.0, 1.0), "cuda"),
        ((1.0, 1.0), (0.9, 0.9), (0.8, 0.8), "layer"),
        # Of a round's calls the wide one costs more than the narrow one saves.
        ((1.0, 1.0), (0.8, 1.25), (1.5, 1.5), "xla"),
        ((1.0, 2.0), (1.05, 1.5), (1.05, 1.6), "cuda"),
    ],
)
def test_the_fastest_is_taken_if_it_is_three_per_cent_faster(xla, cuda, layer, choice):
    seconds = {"xla": xla, "cuda": cuda, "layer": layer}
    widths = {name: {"1": one, "5": five} for name, (one, five) in seconds.items()}
    assert contest.fastest(widths) == choice


def test_what_trials_compute_is_not_reported(stage, monkeypatch):
    """XLA's block is tried with the packed products that win; the block that wins has none."""
    config, params = make_model("llama", "q4_0")
    stage.take(stand_in())
    product = Candidate("layer", lambda *_: True, kernels.packed.packed_product)
    monkeypatch.setattr(candidates, "product_candidates", lambda: [product])

    def hold(self):
        jax.eval_shape(self.candidates[0].run, jax.eval_shape(self.draw, 0))
        return {"what": self.what, "choice": self.candidates[-1].name}

    monkeypatch.setattr(contest.Contest, "hold", hold)
    cache = init_cache(config, batch_size=1, capacity=40, dtype=jnp.bfloat16)
    compute(config, params["layers_0"], cache.layer(0))
    chosen = {verdict["what"]: verdict["choice"] for verdict in verdicts._VERDICTS.values()}
    assert chosen == {"a decoder block": "cuda", "a packed product": "layer"}
    assert candidates._CHOICES[config] == {"cuda"}


def test_a_verdict_is_reached_once_by_several_threads(stage):
    names, reached, start = ["xla", "cuda"], [], threading.Barrier(6)

    def decide(number):
        def reach():
            time.sleep(0.05)
            reached.append(number % 3)
            return {"choice": "cuda"}

        start.wait()
        return verdicts.choose(("key", number % 3), names, reach)

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        assert list(threads.map(decide, range(6))) == ["cuda"] * 6
    assert sorted(reached) == [0, 1, 2]
    content = json.loads((stage.path / "kernels.json").read_text())
    assert list(content["cpu"]["verdicts"].values()) == [{"choice": "cuda"}] * 3


def siblings(seen):
    """All tokens of the block before a token, as if it were a chain."""
    t = seen.shape[1]
    before = jnp.tril(jnp.ones([t, t], bool))
    return jnp.any(before[None, :, :, None] & seen[:, None], axis=2)


def without_a_key(x, cache, width):
    return x, cache.replace(keys=(cache.keys[0].at[:, 0, 20].set(0),))


SPOILT = {
    "one number": {"spoil": lambda x, cache, width: (x.at[0, 0, 5].add(0.2), cache)},
    "three per cent": {"spoil": lambda x, cache, width: (x * 1.03, cache)},
    "hidden slots": {"change": lambda seen: seen.at[:, :, 0].set(True)},
    "a slot less": {"change": lambda seen: seen.at[:, :, 30].set(False)},
    "siblings": {"change": siblings},
    "another slot's keys": {"spoil": without_a_key},
    "values": {
        "spoil": lambda x, cache, width: (x, cache.replace(values=(cache.values[0] * 1.02,)))
    },
    "from width 16 on": {"spoil": lambda x, cache, width: (x + float(width > 5), cache)},
}


def vary(x, cache, width):
    """A token's result in a wider call is another in the last bits."""
    return x * (1 + 1e-6 * (width > 5)), cache


def test_only_right_candidates_compete(stage, capsys):
    """However fast it is, one that is wrong somewhere, that raises, whose runs differ, or that does
    not keep its promise is told in a line. Who promises no equal widths may vary, and wins.
    """
    widths, count = [], iter(range(10**6))

    def fail(*operands):
        raise RuntimeError("no kernel image.\nand more")

    def fail_later(x, cache, width):
        """What runs a block turn after turn does not compile, though a block by itself does."""
        if width == 1 and 16 in widths:
            raise RuntimeError("too many turns")
        widths.append(width)
        return x, cache

    def drift(x, cache, width):
        factor = jax.pure_callback(
            lambda: np.float32(1 + 1e-6 * next(count)), jax.ShapeDtypeStruct((), jnp.float32)
        )
        return x * factor, cache

    stage.take(
        *(stand_in(name, **how) for name, how in SPOILT.items()),
        stand_in("raises", fail), stand_in("runs", drift),
        stand_in("promise", vary)._replace(has_equal_widths=True),
        stand_in("layer", fail_later), stand_in("cuda", vary),
    )  # fmt: skip
    trace(batch_size=2)
    assert verdict()["choice"] == "cuda"
    assert candidates._CHOICES[CONFIG] == {"cuda"}
    assert stage.timed == [["cuda", "xla"]] * 2
    faults = verdict()["faults"]
    for name in SPOILT:
        width = {"from width 16 on": 16, "siblings": 5}.get(name, 1)
        assert f"at width {width} it is wrong" in faults.pop(name)
    assert faults == {
        "raises": "RuntimeError: no kernel image. and more",
        "runs": "at width 1 its runs differ",
        "promise": "at width 16 a token's result is another than at a smaller width",
        "layer": "RuntimeError: too many turns",
    }
    lines = capsys.readouterr().err.splitlines()[1:]
    assert len(lines) == len(SPOILT) + len(faults)
    beginning = "jspec: the kernel 'raises' is not used for a decoder block: "
    assert beginning + faults["raises"] in lines


@pytest.mark.skipif(not library.is_available(), reason="needs a C++ compiler")
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("is_poisoned", [True, False])
def test_a_candidate_that_leaves_memory_unwritten_is_not_used(is_poisoned, stage, monkeypatch):
    """The negative control: in memory that holds XLA's result it looks right, and would win."""

    def leave(x, cache, width):
        # What is multiplied by it is nothing that a compiler could leave out.
        return library.call("unwritten", jnp.zeros_like, library.floats(*x.shape)), cache

    if not is_poisoned:
        memory, errors, count = [], contest._errors, iter(range(100))
        num_calls = 2  # by two seeds

        def remember(operands, results, precise):
            memory.append(results[0])
            return errors(operands, results, precise)

        def leftover(shape):
            """Returns zeros for the reference's runs, then its result for each three runs."""
            place = next(count) - 2 * num_calls
            return jnp.zeros(shape.shape) if place < 0 else jnp.copy(memory[place // 3])

        monkeypatch.setattr(contest, "_errors", remember)
        monkeypatch.setattr(contest, "poisoned", leftover)
    stage.take(stand_in(spoil=leave))
    trace()
    assert verdict()["choice"] == ("xla" if is_poisoned else "cuda")
    if is_poisoned:
        assert "wrong, by nan" in verdict()["faults"]["cuda"]


def test_a_second_process_reads_the_verdict_and_tries_nothing(won):
    content = json.loads((won.path / "kernels.json").read_text())
    assert content["cpu"]["machine"] == verdicts._machine()
    code = "from tests.kernels.test_contest import decide_elsewhere\ndecide_elsewhere()"
    # Its cache is new: it would compile the C++, which takes half a minute.
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JSPEC_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, text=True,
        capture_output=True, check=False, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "cuda\n", "")


def decide_elsewhere():
    """Prints the choice, where a contest would fail."""
    contest.Contest.hold = None
    candidates.block_candidates = lambda: [stand_in()]
    trace()
    print(verdict()["choice"])


def test_a_damaged_verdict_is_reached_anew(won, capsys):
    path = won.path / "kernels.json"
    content = json.loads(path.read_text())
    (key,) = content["cpu"]["verdicts"]
    content["cpu"]["verdicts"][key] = {"choice": "another"}
    path.write_text(json.dumps(content))
    for _ in range(2):
        verdicts._VERDICTS.clear()
        capsys.readouterr()
        trace()
        assert len(won.timed) == 2  # the first of them before the damage
    assert capsys.readouterr().err == ""
    assert verdict()["choice"] == "cuda"
    assert {path.name for path in won.path.iterdir()} == {"kernels.json", "kernels.lock"}


def test_a_trial_that_ended_its_process_is_not_begun_again(stage, monkeypatch, capsys):
    """A kernel may end the process, and would do so at every start; Ctrl-C is no kernel's fault."""
    path, seen = stage.path / "kernels.json", []

    def end(self):
        seen.append(path.read_text())
        raise KeyboardInterrupt

    stage.take(stand_in())
    with monkeypatch.context() as patch:
        patch.setattr(contest.Contest, "hold", end)
        with pytest.raises(KeyboardInterrupt):
            trace()
    assert "is_unfinished" in seen[0]
    assert "is_unfinished" not in path.read_text()
    path.write_text(seen[0])  # as a process leaves it that could do nothing any more
    capsys.readouterr()
    trace()
    assert (verdict()["choice"], stage.timed) == ("xla", [])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: a trial did not end: xla is taken; remove ")


@pytest.mark.usefixtures("narrow")
def test_what_is_tried_on_a_device_that_is_lost_is_not_to_blame(stage, monkeypatch):
    """An illegal address of one candidate fails whatever comes after it, XLA's own block too."""
    asked = []

    def fail(candidate, program, checks):
        asked.append(candidate.name)
        return "an illegal address"

    monkeypatch.setattr(contest, "_fault", fail)
    stage.take(stand_in("cuda"), stand_in("layer"))
    lost = r"xla fails after another kernel did \(an illegal address\): start again"
    with pytest.raises(InputError, match=lost):
        trace()
    assert asked == ["cuda", "xla"]
    trace()  # as the next start
    assert verdict()["faults"] == {"cuda": "an illegal address"}
    assert verdict()["choice"] == "xla"


@pytest.mark.usefixtures("narrow")
def test_a_device_that_is_lost_in_the_race_is_not_tried_again(stage, monkeypatch):
    """A kernel is right, and fails when it is timed; after it so does XLA's own block."""

    def warm_up(program, operands):
        def call():
            raise jax.errors.JaxRuntimeError("INTERNAL: illegal address")

        stage.timed.append(len(stage.timed))
        if len(stage.timed) > 1:
            call()
        return call

    monkeypatch.setattr(contest, "_warm_up", warm_up)
    stage.take(stand_in("cuda"), stand_in("layer"))
    with pytest.raises(InputError, match="xla fails after another kernel did"):
        trace()
    assert len(stage.timed) == 2
    trace()
    assert list(verdict()["faults"]) == ["cuda"]
    assert verdict()["choice"] == "xla"


def test_a_trial_without_memory_is_tried_again_next_time(stage, monkeypatch, capsys):
    def fail(*arguments):
        raise MemoryError("none is left")

    monkeypatch.setattr(trial, "_draw_weights", fail)
    stage.take(stand_in())
    trace()
    assert verdict() == {"choice": "xla", "problem": "MemoryError: none is left"}
    assert json.loads((stage.path / "kernels.json").read_text())["cpu"]["verdicts"] == {}
    assert "the trial failed (MemoryError: none is left); xla is taken" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["xla", "cuda", "attention"])
def test_the_user_chooses(name, stage, monkeypatch, capsys):
    """Without a trial; where that candidate does not take a block, XLA computes it."""
    monkeypatch.setenv("JSPEC_KERNELS", name)
    stage.take(stand_in(spoil=lambda x, cache, width: (x + 1, cache)))
    trace()
    assert stage.ran == [("cuda", 3)] * (name == "cuda")
    assert verdicts._VERDICTS == {}
    assert capsys.readouterr().err == ""
    assert {CONFIG: {name if name == "cuda" else "xla"}} == candidates._CHOICES


def test_an_unknown_kernel_is_refused(monkeypatch):
    monkeypatch.setenv("JSPEC_KERNELS", "fastest")
    known = "xla, attention, cuda, layer, layer-pdl"
    with pytest.raises(InputError, match=f"expected JSPEC_KERNELS among {known}; got 'fastest'"):
        kernels.check_device()


def test_nothing_is_tried_for_a_device_that_is_not_here(stage, monkeypatch):
    stage.take(stand_in())
    with kernels.compiling_for("tpu"):
        trace()
        assert stage.ran == []
        monkeypatch.setenv("JSPEC_KERNELS", "cuda")
        trace()
        assert stage.ran == [("cuda", 3)]
    assert verdicts._VERDICTS == {}


def test_a_cpu_has_no_candidates_and_a_gpu_needs_products_of_bfloat16(monkeypatch):
    assert not candidates._has_choice()
    monkeypatch.setattr(candidates, "backend", lambda: "gpu")
    assert candidates._has_choice()
    monkeypatch.setattr(candidates, "has_bfloat16", lambda: False)
    assert not candidates._has_choice()
    assert candidates.block_candidates() == candidates.product_candidates() == ()


def test_derivatives_are_those_of_the_reference(won):
    def loss(embedding):
        return jnp.sum(jnp.sin(call(3, embedding=embedding)))

    won.take()
    plain, slope = jax.value_and_grad(loss)(PARAMS["embedding"])
    won.take(stand_in(spoil=lambda x, cache, width: (x.at[..., 0].add(1e-3), cache)))
    assert loss(PARAMS["embedding"]) != plain  # it is used
    np.testing.assert_array_equal(slope, jax.grad(loss)(PARAMS["embedding"]))


@pytest.mark.parametrize(
    ("name", "kind", "has_pages"),
    [slow_unless(False, "biased", "int8", False), ("gemma", "q4_0", True)],
)
def test_a_right_candidate_passes_whatever_the_model(name, kind, has_pages, stage):
    """Norms before and after, biases, both gates, integers and packed weights, in a cache and in
    pages, behind other slots of the same block: XLA's own block is right beside XLA's.
    """
    config, params = make_model(name, kind)
    cache = init_cache(config, batch_size=1, capacity=40, dtype=jnp.bfloat16).layer(0)
    if has_pages:
        shape = (3, config.num_kv_heads, kernels.PAGE, config.head_dim)
        layers = {part: (jnp.zeros(shape, jnp.bfloat16),) for part in ("keys", "values")}
        table = jnp.asarray([[1, 2]], jnp.int32)
        cache = PagedKVCache(**layers, length=cache.length, table=table)
    stage.take(stand_in())
    compute(config, params["layers_0"], cache)
    assert {one["choice"] for one in verdicts._VERDICTS.values()} == {"cuda"}


def compute(config, layer, cache, block_offset=2):
    positions = jnp.zeros([1, 3], jnp.int32)
    operands = (
        layer, jnp.zeros([1, 3, config.embed_dim]), rope_cos_sin(config, positions),
        cache.visible(causal_mask(3)), cache,
    )  # fmt: skip

    def run(*operands):
        return decoder.apply_layer(decoder.Block(config), config, block_offset, *operands)

    return jax.eval_shape(run, *operands)


def test_other_weights_are_another_shape(won):
    """But slots before the block are not."""
    cache = init_cache(CONFIG, batch_size=1, capacity=40, dtype=jnp.bfloat16).layer(0)
    for block_offset in (2, 0):
        compute(CONFIG, PARAMS["layers_0"], cache, block_offset)
    assert len(won.timed) == 1
    compute(CONFIG, make_model("llama", "int8")[1]["layers_0"], cache)
    assert len(won.timed) == 2


def compute_product(monkeypatch, factor=None):
    """Has a contest held for a product, between XLA's and the same times a factor, if any."""
    kernel = make_model("llama", "q4_0")[1]["layers_0"]["attention"]["out"]
    run = None if factor is None else lambda *o: factor * kernels.packed.packed_product(*o)
    stand_in = Candidate("cuda", lambda *_: True, run)
    monkeypatch.setattr(candidates, "product_candidates", lambda: [stand_in])
    jax.eval_shape(kernels.product, jnp.ones([3, 128]), kernel)
    return kernel


def test_products_with_parts_of_kernels_do_not_compete(stage, monkeypatch):
    """On a mesh: nothing has tried kernels there. The whole kernel is the control."""
    monkeypatch.setattr(candidates, "choose", lambda *operands: stage.ran.append("chosen"))
    part = SplitKernel(compute_product(monkeypatch), 2, by_inputs=True)
    assert stage.ran == ["chosen"]
    mesh = jax.make_mesh((1,), (MODEL_AXIS,))
    spec = jax.sharding.PartitionSpec()
    run = jax.shard_map(
        lambda rows: kernels.product(rows, part), mesh=mesh, in_specs=spec, out_specs=spec
    )
    jax.eval_shape(run, jnp.ones([3, 128]))
    assert stage.ran == ["chosen"]


def test_packed_products_are_compared_with_float64_in_a_contest_of_their_own(stage, monkeypatch):
    seen, errors = [], contest._errors

    def remember(operands, results, precise):
        seen.append((operands, precise[0]))
        return errors(operands, results, precise)

    compute_product(monkeypatch, 1.02)  # the negative control
    assert verdict()["choice"] == "xla"
    verdicts._VERDICTS.clear()
    (stage.path / "kernels.json").unlink()
    jax.clear_caches()
    monkeypatch.setattr(contest, "_errors", remember)
    compute_product(monkeypatch, 1.0)
    assert (verdict()["what"], verdict()["choice"]) == ("a packed product", "cuda")
    assert {precise.shape[1] for _, precise in seen} == set(trial.WIDTHS)
    for operands, precise in seen:
        weights = kernels.packed.unpack(operands.weights.strips, "q4_0")
        expected = np.float64(operands.stream[0]) @ np.float64(weights).T
        np.testing.assert_array_equal(precise[0], np.float32(expected)[:, : precise.shape[-1]])


def test_a_race_times_cold_blocks_in_turn(monkeypatch):
    """As many as fill 256 MB, at most 32, or half of the free memory; each candidate's median."""
    draw = jax.tree_util.Partial(lambda seed: trial.Operands(jnp.zeros([40 << 18]), *[()] * 3))
    assert len(contest._draw_layers(draw, 1)) == 7  # of 40 MB
    monkeypatch.setattr(contest, "available_bytes", lambda: 250 << 20)
    assert len(contest._draw_layers(draw, 1)) == 3
    assert len(contest._draw_layers(draw, 2)) == 1
    calls, ticking = [], iter(range(1000))
    ticks = {"a": 1, "b": 5}

    def run(name):
        calls.append(name)
        for _ in range(ticks[name]):
            next(ticking)

    named = {name: (lambda name=name: run(name)) for name in ticks}
    assert contest.medians(named, lambda: float(next(ticking))) == {"a": 2.0, "b": 6.0}
    assert calls == ["a", "b"] * 7


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_a_kernel_that_fails_while_it_runs_is_named(kind, stage, request):
    """JAX raises a ValueError where the program has run before. Before one is chosen, both pass."""
    error = kind("INTERNAL: illegal address")
    with pytest.raises(kind), kernels.explained_failures():
        raise error
    won = request.getfixturevalue("won")
    with (
        pytest.raises(InputError, match="kernels cuda failed") as failure,
        kernels.explained_failures(),
    ):
        raise error
    avoided = "JSPEC_KERNELS=xla in the environment avoids them"
    assert str(failure.value).endswith(f": XLA computes what comes next; {avoided}")
    trace()
    assert won.ran == []
    with pytest.raises(jax.errors.JaxRuntimeError), kernels.explained_failures():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")


def test_a_device_that_is_lost_is_said_in_one_line(stage, monkeypatch):
    """After an illegal address XLA cannot go on in the same process."""
    monkeypatch.setattr(candidates, "_may_compete", lambda: True)
    candidates._CHOICES[CONFIG] = {"cuda"}

    def program(params, state):
        raise jax.errors.JaxRuntimeError("INTERNAL: illegal address")

    with pytest.raises(InputError) as failure:
        candidates.Fallback().run(program, None, jnp.zeros(2))
    said = str(failure.value)
    assert said.startswith("a program with the kernels cuda failed (")
    assert said.endswith("start again with JSPEC_KERNELS=xla in the environment")
