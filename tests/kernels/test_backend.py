"""For which device programs are traced, what makes a run one graph on a GPU, and products there.

Products of few rows have sixteen there: one program for plain steps and verify calls.
"""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import kernels
from jspec.kernels import attention, backend
from jspec.weights.quantize import quantize


@pytest.fixture
def gpu(monkeypatch):
    """Lets the default device pass for a GPU, one that nothing has been tried on."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.delenv("JSPEC_ONE_GRAPH", raising=False)
    monkeypatch.setattr(backend, "_VERDICT", {})


def test_a_run_is_one_graph_on_a_gpu_where_a_trial_allows_it(gpu, monkeypatch):
    """Guards against a graph that nobody has tried, as where an engine is built by hand."""
    assert kernels.run_options() is None
    assert kernels.awaits_graph_trial()
    kernels.allow_one_graph(False)
    assert kernels.run_options() is None
    assert not kernels.awaits_graph_trial()
    kernels.allow_one_graph(True)
    assert kernels.run_options() == kernels.one_graph_options() == backend._ONE_GRAPH
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert kernels.run_options() is None
    assert not kernels.awaits_graph_trial()


def test_a_device_that_is_not_here_needs_no_trial(gpu):
    with backend.compiling_for("gpu"):
        assert kernels.run_options() == kernels.one_graph_options()
        assert not kernels.awaits_graph_trial()
    with backend.compiling_for("tpu"):
        assert kernels.run_options() is None


def test_options_on_trial_are_those_of_the_run(gpu):
    with kernels.trying_options({"xla_gpu_autotune_level": 0}):
        assert kernels.run_options() == {"xla_gpu_autotune_level": 0}
    assert kernels.run_options() is None


@pytest.mark.parametrize(
    ("name", "value", "is_left"),
    [
        ("JSPEC_ONE_GRAPH", "0", True),
        ("XLA_FLAGS", "--xla_gpu_enable_command_buffer=", True),
        ("XLA_FLAGS", "--xla_gpu_graph_min_graph_size=5", True),
        ("XLA_FLAGS", "--xla_dump_to=/nowhere", False),  # says nothing of graphs
    ],
)
def test_the_user_decides(gpu, monkeypatch, name, value, is_left):
    monkeypatch.setenv(name, value)
    assert kernels.awaits_graph_trial() != is_left
    kernels.allow_one_graph(True)
    assert (kernels.run_options() is None) == is_left


@pytest.mark.parametrize(
    ("capability", "is_new"), [("7.5", False), ("8.0", True), ("12.1", True), ("gfx942", True)]
)
def test_a_gpu_without_bfloat16_takes_no_fused_kernel(gpu, monkeypatch, capsys, capability, is_new):
    """Neither Triton's nor cuDNN's is tried there: their compilers might end the process."""
    device = SimpleNamespace(device_kind="Tesla T4", compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    backend._is_new_enough.cache_clear()
    try:
        assert backend.has_bfloat16() == attention._is_on() == is_new
        with backend.compiling_for("gpu"):
            assert backend.has_bfloat16()
    finally:
        backend._is_new_enough.cache_clear()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (0 if is_new else 1)
    assert all("Tesla T4, compute capability 7.5" in line for line in lines)


def test_a_program_for_another_device_is_traced_anew():
    """Guards against the C++ of this machine, or an older trace, in a GPU's program."""
    kernel, row = jnp.ones([64, 64], jnp.bfloat16), jnp.ones([1, 64])
    product = jax.jit(kernels.product)

    def text():
        return product.lower(row, kernel).as_text()

    native = text()
    with kernels.compiling_for("gpu"):
        assert backend.backend() == "gpu"
        assert kernels.prefers_unrolled_loops()
        assert "jspec" not in (foreign := text())
        assert foreign != native
    assert backend.backend() == jax.default_backend()
    assert text() == native


@pytest.fixture(params=["bfloat16", "float32", "int8", "int4"])
def kernel(request):
    kind = request.param
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(48, 64)), jnp.bfloat16)
    if kind in ("bfloat16", "float32"):
        return weights.astype(kind)
    return quantize(weights, ("down",), kind, jnp.bfloat16)


def test_a_gpu_multiplies_sixteen_rows_at_least(kernel):
    for count, expected in ((1, 16), (5, 16), (16, 16), (17, 17)):
        rows = jax.ShapeDtypeStruct((count, 64), jnp.float32)
        with kernels.compiling_for("gpu"):
            traced = jax.make_jaxpr(kernels.product)(rows, kernel)
        products = re.findall(r"f32\[(\d+),48\] = dot_general", str(traced))
        assert set(products) == {str(expected)}
        assert traced.out_avals[0].shape == (count, 48)


def test_zeros_beside_rows_change_nothing(kernel, monkeypatch):
    """Each row's result is the same at any width, bit for bit."""
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(16, 64)), jnp.float32)
    monkeypatch.setattr(backend, "backend", lambda: "gpu")
    monkeypatch.setattr("jspec.kernels.library.is_available", lambda: False)
    monkeypatch.setattr("jspec.kernels.quantized.backend", lambda: "gpu")
    run = jax.jit(lambda *operands: kernels.product(*operands))  # traced anew
    expected = np.asarray(run(rows, kernel))
    for count in (1, 15):
        np.testing.assert_array_equal(run(rows[:count], kernel), expected[:count])


def test_a_cpu_multiplies_the_rows_that_are_there():
    rows = jnp.ones([3, 64])
    assert backend.padded(rows) is rows
