"""Memory: what is free, and a clear word before it is too late."""

import dataclasses
import functools
import pathlib
import resource
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import psutil
import pytest

from jspec.common import memory
from jspec.common.errors import InputError
from jspec.common.memory import Budget, CacheSize, check_memory, device_name, tree_bytes
from jspec.common.timing import compile_clock
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.sampling.settings import Switches
from jspec.weights.resolver import load_model
from tests import tiny_models
from tests.cases import slow_unless
from tests.programs import check_refusal
from tests.tiny_models import small


@pytest.fixture
def free(monkeypatch):
    def say(num_bytes):
        monkeypatch.setattr(memory, "available_bytes", lambda: num_bytes)

    return say


@functools.cache
def model_generator(batch_size):
    """Returns a Generator that tests of any capacity but 512 leave alone."""
    return make_small(batch_size=batch_size)


def make_small(**options):
    options = {"drafter": "model", "num_draft_tokens": 4} | options
    return Generator(small(), small(disturbance=0.03), **options)


def test_what_fits_passes_and_what_does_not_is_named(free):
    needs = {"weights": 2_000_000_000, "caches": 1_000_000_000}
    free(3_060_000_000)
    check_memory(needs, "")
    free(None)  # nobody says
    check_memory({"weights": 1 << 60}, "")
    free(3_059_999_999)
    with pytest.raises(InputError) as caught:
        check_memory(needs, lambda: "take less")
    assert str(caught.value) == (
        "not enough memory: expected 3.06 GB to be free (weights 2 GB, caches 1 GB, margin 0.06 "
        "GB), got 3.06 GB; take less"
    )


def test_a_run_begins_with_its_device_and_what_it_needs_there(monkeypatch):
    """Weights of target and draft, and the caches that are budgeted; once, before any answer."""
    lines = []
    generator = make_small(batch_size=2, notify=lines.append)
    generator.engine = model_generator(2).engine
    request = Request([1, 2, 3], SamplingParams(max_new_tokens=2))
    chunks = generator.run([request] * 3)
    next(chunks)
    (line,) = (line for line in lines if not line.startswith("compiling"))
    list(chunks)
    state = generator.engine.state_bytes(3, 512, Switches())
    weights = tree_bytes([small().params, small(disturbance=0.03).params])
    note = "drafts by model, 4 a round"
    assert line == str(Budget(device_name(), weights, CacheSize(2, 512, state), note))
    assert lines.count(line) == 1
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(jax, "devices", lambda: [gpu] * 8)
    assert device_name() == "gpu (NVIDIA H100 80GB HBM3), the first of 8"
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    assert str(Budget(device_name(), 6_430_000_000, CacheSize(1, 2048, 235_000_000))) == (
        "gpu (NVIDIA H100 80GB HBM3): weights 6.43 GB, caches 0.23 GB (1 row of 2048 slots)"
    )


def test_weights_are_refused_before_any_is_made(free):
    """70B in bfloat16 is 141 GB, and a quarter of it in int4 and its scales."""
    free(30_000_000_000)
    with pytest.raises(InputError, match=r"expected 144 GB to be free \(weights 141 GB, margin"):
        load_model("random:llama3.1-70b")
    with pytest.raises(InputError, match=r"expected \d\d\.\d GB to be free"):
        load_model("random:llama3.1-70b", quantization="int4")


def test_weights_of_a_folder_are_refused(free, tmp_path):
    folder = tiny_models.save_folder(tmp_path / "tiny")
    free(1000)
    with pytest.raises(InputError, match="int8 or int4 weights, or a smaller model"):
        load_model(str(folder))


def test_caches_are_refused_by_rows_and_tokens(free):
    generator = model_generator(1)
    request = Request([1, 2, 3], SamplingParams(max_new_tokens=8))
    free(1000)
    with pytest.raises(InputError, match="caches of 1 row of 512 slots"):
        generator.generate(request)
    batched = tiny_models.make_generator("prompt_lookup", batch_size=4)
    with pytest.raises(InputError, match="caches of 4 rows and one prompt of 512 slots"):
        batched.generate([request] * 3)
    free(1 << 40)
    assert generator.generate(request).token_ids


def long_generator(drafter="prompt_lookup", **options):
    config = dataclasses.replace(tiny_models.CONFIG, max_seq_len=10_000)
    return tiny_models.make_generator(drafter, tiny_models.make_model(config), **options)


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("capacity", [3072, 2048, 512])
def test_the_largest_capacity_that_fits_is_said(free, batch_size, capacity):
    """Before anything is compiled: what is said to fit does, and one token more does not."""
    generator = long_generator(batch_size=batch_size)

    def budget(length):
        rows = [generator.make_row(Request([1, 2], SamplingParams(max_new_tokens=length - 2)))]
        return generator._make_batch(rows * batch_size)

    free(1 << 40)
    num_states = 1 if batch_size == 1 else 3
    sizes = generator.engine.state_bytes(num_states, capacity, Switches())
    temporary = generator.engine.temporary_bytes(num_states, capacity)
    before = compile_clock().num_programs
    free(int(1.021 * (sizes + temporary)))
    with pytest.raises(InputError, match=r"^not enough memory: .*temporary .*margin") as caught:
        budget(4000)
    tokens = capacity - generator.num_draft_tokens - 1
    assert f"; {tokens} tokens of prompt and answer (max_new_tokens) fit" in str(caught.value)
    assert ("fewer rows" in str(caught.value)) == (batch_size > 1)
    assert compile_clock().num_programs == before
    if batch_size == 1:  # a single stream makes no state yet
        budget(tokens)
    with pytest.raises(InputError, match="tokens of prompt and answer"):
        budget(tokens + 1)
    free(1000)
    if batch_size == 1:
        with pytest.raises(InputError, match=r"got 1e-06 GB; a smaller model takes less$"):
            budget(3000)


@pytest.mark.parametrize(
    ("drafter", "rows", "capacity"),
    [("model", 1, 2048), slow_unless(False, "none", 1, 512), slow_unless(False, "model", 4, 3072)],
)
def test_what_programs_need_besides_is_foreseen(drafter, rows, capacity):
    """At least what XLA has planned for a prompt's chunk and for rounds, and not many times that.

    By XLA's own operations, whose scores lie in memory.
    """
    generator = long_generator(drafter, batch_size=rows)
    engine, params, sizes = generator.engine, generator.params, []
    for function, batch, more in (
        (engine._prefill, 1, [(1, engine._widths_of_chunks.wide), (1,)]),
        (engine._run, rows, [()]),
    ):
        state = engine.empty_state.eval_shape(batch, capacity, Switches())
        shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in more]
        compiled = function.lower(params, state, *shapes).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    foreseen = engine.temporary_bytes(rows, capacity)
    assert max(sizes) <= foreseen <= 8 * max(sizes), (sizes, foreseen)


def test_a_single_stream_holds_one_cache_from_prompt_to_prompt(monkeypatch):
    """Guards against a second cache beside the one in use, and one that is left from before.

    Bytes of all arrays there are when the host looks at what a prompt or rounds have left.
    """
    requests = [Request([1 + index] * 9, SamplingParams(max_new_tokens=20)) for index in range(3)]
    generator = model_generator(1)
    generator.generate(requests)  # what stays is there
    get, sizes = jax.device_get, []

    def look(tree):
        sizes.append(sum(array.nbytes for array in jax.live_arrays()) - before)
        return get(tree)

    before = sum(array.nbytes for array in jax.live_arrays())
    monkeypatch.setattr(jax, "device_get", look)
    generator.generate(requests)
    state = generator.engine.state_bytes(1, 512, Switches())
    assert len(sizes) > len(requests)
    assert 0.95 * state <= min(sizes) <= max(sizes) <= 1.05 * state


@pytest.mark.parametrize("batch_size", [1, 2])
def test_rows_are_filled_anew_by_one_program(batch_size):
    """Guards invariant 6: the rounds take a prompt's state, and a round's, for one and the same."""
    generator = model_generator(batch_size)
    settings = [
        SamplingParams(max_new_tokens=number, temperature=temperature, seed=number)
        for number, temperature in ((1, 0.0), (9, 0.7), (20, 0.0), (3, 1.0))
    ]
    requests = [Request([1 + number] * 70, one) for number, one in enumerate(settings)]
    generator.generate([requests[1]] * batch_size)
    before = compile_clock().num_programs
    results = generator.generate(requests * 2)
    assert [len(result.token_ids) for result in results] == 2 * [1, 9, 20, 3]
    assert compile_clock().num_programs == before
    assert generator.engine._run._cache_size() == 1


@pytest.fixture
def system(monkeypatch, tmp_path):
    """A system with 5 MB and 1 MB of swap, whose control groups are in the folder."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5000 * 1024))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=1000 * 1024))
    monkeypatch.setattr(memory, "_OWN_GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks the system's memory")
def test_what_the_system_says(system, tmp_path):
    """Of a group that may take 4 MB, 1 of 3 MB are files."""
    assert memory.available_bytes() == 6000 * 1024  # no group
    (tmp_path / "cgroup").write_text("4:cpu:/old\n0::/outer/own\n")
    group = tmp_path / "outer" / "own"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("3000000\n")
    (group / "memory.stat").write_text("anon 2000000\ninactive_file 400000\nactive_file 600000\n")
    assert memory.available_bytes() == 6000 * 1024  # no limit
    (group / "memory.max").write_text("4000000\n")
    assert memory.available_bytes() == 2_000_000
    for name, text in (("memory.max", "3500000"), ("memory.current", "3000000")):
        (tmp_path / "outer" / name).write_text(text)  # the group around it is nearer its limit
    (tmp_path / "outer" / "memory.stat").write_text("anon 1\n")
    assert memory.available_bytes() == 500_000


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks the system's memory")
def test_a_group_of_version_1(system, tmp_path):
    (tmp_path / "cgroup").write_text("5:cpuset:/\n4:memory:/own\n")
    group = tmp_path / "memory" / "own"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("4000000\n")
    (group / "memory.usage_in_bytes").write_text("3000000\n")
    (group / "memory.stat").write_text("cache 1\ninactive_file 5\n")
    assert memory.available_bytes() == 1_000_005


def test_an_answer_asks_for_a_shape_it_knows_without_tracing(monkeypatch):
    """Guards against a trace for every answer, which takes as long as a round."""
    generator = model_generator(1)
    request = Request([1, 2, 3], SamplingParams(max_new_tokens=2))
    generator.generate(request)
    monkeypatch.setattr(jax, "eval_shape", None)
    assert generator.generate(request).token_ids


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("jnp.zeros([2**40, 64], jnp.float32).block_until_ready()", "RESOURCE_EXHAUSTED"),
        ("np.empty([2**50, 64])", "Unable to allocate"),
    ],
)
def test_what_runs_out_on_the_method_is_one_line(tmp_path, action, said):
    """XLA's and numpy's own complaints, of arrays that no machine can hold."""
    program = tmp_path / "program.py"
    program.write_text(
        "import jax.numpy as jnp\nimport numpy as np\nfrom jspec.cli import program as cli\n"
        f"cli.run_main(lambda: {action})\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    line = check_refusal(done.returncode, done.stdout, done.stderr)
    assert line.startswith(f"error: not enough memory: {said}")


def test_what_compiling_has_freed_is_given_back(monkeypatch):
    """Guards against another name of JAX's events; a second call must not listen twice."""
    given = []
    monkeypatch.setattr(memory, "give_back_freed", lambda: given.append(1))
    monkeypatch.setattr(memory, "_LONG_COMPILATION", 3600.0)
    memory.give_back_after_compiling()
    memory.give_back_after_compiling()
    jax.jit(lambda x: 3 * x + 1)(jnp.ones(7))
    assert not given
    monkeypatch.setattr(memory, "_LONG_COMPILATION", 0.0)
    jax.jit(lambda x: 5 * x + 1)(jnp.ones(7))
    assert 1 <= len(given) <= 3  # tracing, lowering, compiling


_FAULTS = """
import resource, sys, threading
from jspec.common import memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def use():
    len(sys.argv[1][:1] * 40_000_000)

if sys.argv[1] == "keep":
    memory.keep_freed_memory()
for _ in range(2):
    before = faults()
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
print(faults() - before)
"""


_HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
@pytest.mark.skipif(
    _HUGE_PAGES.exists() and "[always]" in _HUGE_PAGES.read_text(),
    reason="pages so large that hardly any are counted",
)
def test_what_was_freed_is_not_cleared_anew():
    """Guards against temporary arrays that the system gives anew to every run of a program."""
    pages_of = {}
    for name in ("keep", "as it is"):
        command = [sys.executable, "-c", _FAULTS, name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        pages_of[name] = int(done.stdout)
    pages = 40_000_000 // resource.getpagesize()
    assert pages_of["keep"] < 0.1 * pages < pages_of["as it is"]
