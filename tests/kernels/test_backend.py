"""For which device programs are traced, and the options that make a run one graph on a GPU."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jspec import kernels
from jspec.kernels import backend, cudnn


@pytest.fixture
def gpu(monkeypatch):
    """Lets the default device pass for a GPU, one that nothing has been tried on."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.delenv("JSPEC_ONE_GRAPH", raising=False)
    backend._can_loop.cache_clear()
    yield
    backend._can_loop.cache_clear()


def test_a_run_is_one_graph_on_a_gpu_only(gpu, monkeypatch):
    """The options work: XLA on CPU knows them, too, and does nothing about them."""
    assert kernels.run_options() == backend._ONE_GRAPH
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert kernels.run_options() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JSPEC_ONE_GRAPH", "0"),
        ("XLA_FLAGS", "--xla_gpu_enable_command_buffer="),
        ("XLA_FLAGS", "--xla_gpu_graph_min_graph_size=5"),
    ],
)
def test_the_user_decides(gpu, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert kernels.run_options() is None


@pytest.mark.parametrize(
    ("capability", "is_new"), [("7.5", False), ("8.0", True), ("12.1", True), ("gfx942", True)]
)
def test_a_gpu_without_bfloat16_takes_no_fused_kernel(gpu, monkeypatch, capsys, capability, is_new):
    """Neither Triton's nor cuDNN's is tried there: their compilers might end the process."""
    device = SimpleNamespace(device_kind="Tesla T4", compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    backend._is_new_enough.cache_clear()
    try:
        assert backend.has_bfloat16() == cudnn._is_on() == is_new
        with backend.compiling_for("gpu"):
            assert backend.has_bfloat16()
    finally:
        backend._is_new_enough.cache_clear()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (0 if is_new else 1)
    assert all("Tesla T4, compute capability 7.5" in line for line in lines)


def test_other_flags_are_no_choice(gpu, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    assert kernels.run_options() is not None


def test_an_option_that_xla_does_not_know_is_left_out_with_one_line(gpu, monkeypatch, capfd):
    """Guards against an XLA that has renamed it: every program would fail."""
    monkeypatch.setattr(backend, "_ONE_GRAPH", {"xla_gpu_no_such_option": 1})
    assert kernels.run_options() is None
    assert kernels.run_options() is None
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "xla_gpu_no_such_option" in lines[0]


def test_a_loop_that_goes_wrong_is_the_hosts(gpu, monkeypatch, capfd):
    monkeypatch.setattr(jax.lax, "cond", lambda condition, grow, shrink, total: shrink(total))
    assert kernels.run_options() is None
    assert "a loop came to a wrong number" in capfd.readouterr().err


def test_a_program_for_another_device_is_traced_anew():
    """Guards against the C++ of this machine, or an older trace, in a GPU's program."""
    kernel, row = jnp.ones([64, 64], jnp.bfloat16), jnp.ones([1, 64])
    product = jax.jit(kernels.product)

    def text():
        return product.lower(row, kernel).as_text()

    own = text()
    with kernels.compiling_for("gpu"):
        assert backend.backend() == "gpu"
        assert kernels.prefers_unrolled_loops()
        assert "jspec" not in (foreign := text())
        assert foreign != own
    assert backend.backend() == jax.default_backend()
    assert text() == own
