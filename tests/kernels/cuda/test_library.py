"""The CUDA C++ library: built by nvcc without spills, or done without where it cannot be."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import kernels
from jspec.kernels import library
from jspec.kernels.cuda_block import Fused, multiply
from jspec.lab.accelerators.compiled import find_accelerator
from tests.kernels.cuda.conftest import CUDA, FOLDER
from tests.kernels.test_library import check_line, prepare_cuda


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Has a library of one small source, which is soon compiled."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    for name in ("problem.cu", "common.cuh"):
        (folder / name).write_text((CUDA / name).read_text())
    monkeypatch.setattr(library, "_CUDA", folder)
    return folder


def compile_source(nvcc, source, architecture, tmp_path):
    recipe = library.cuda_recipe(architecture)
    command = [nvcc, *recipe.options, f"-I{jax.ffi.include_dir()}", "-Xptxas", "-v", "-c"]
    done = subprocess.run(
        [*command, str(source), "-o", str(tmp_path / "kernels.o")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def check_spills(said):
    """Checks that every kernel keeps its numbers in registers."""
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills
    assert set(spills) == {("0", "0")}, said


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize(
    "name", ["attention.cu", *sorted(path.name for path in CUDA.glob("multiply_*.cu"))]
)
def test_kernels_compile_without_spills(nvcc, name, architecture, tmp_path):
    check_spills(compile_source(nvcc, CUDA / name, architecture, tmp_path))


@pytest.mark.slow  # as the test that it is the control of
def test_spills_are_seen(nvcc, tmp_path):
    """The negative control: a kernel that needs more registers than it is given."""
    source = tmp_path / "spills.cu"
    source.write_text(
        textwrap.dedent("""
            __global__ void __launch_bounds__(1024, 2) Spill(float* x) {
              float numbers[96];
            #pragma unroll
              for (int i = 0; i < 96; ++i) numbers[i] = x[i * 1024 + threadIdx.x];
              __syncthreads();
            #pragma unroll
              for (int i = 0; i < 96; ++i) x[threadIdx.x * 96 + i] = numbers[95 - i] * numbers[i];
            }
        """)
    )
    with pytest.raises(AssertionError, match="spill"):
        check_spills(compile_source(nvcc, source, "sm_90a", tmp_path))


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ("7.5", "expected compute capability 8.0 or newer, got 7.5"),
        ("gfx942", "expected a GPU by NVIDIA, got compute capability gfx942"),
        ("", "got compute capability none"),
    ],
)
def test_a_gpu_that_is_too_old_or_unknown(cache, capsys, capability, reason):
    assert prepare_cuda(capability) is None
    check_line(capsys, reason)


def test_sources_that_do_not_compile(nvcc, small, cache, capsys):
    (small / "problem.cu").write_text('#include "common.cuh"\nint Nonsense() { return nothing; }\n')
    assert prepare_cuda("9.0") is None
    check_line(capsys, 'identifier "nothing" is undefined')
    assert not list(cache.glob("native/*"))


def test_a_driver_that_is_missing_or_too_old(nvcc, small, cache, capsys):
    """Here there is none, as `jspec_cuda_problem` tells."""
    if jax.default_backend() == "gpu":
        pytest.skip("there is a driver")
    assert prepare_cuda("9.0") is None
    check_line(capsys, "the CUDA C++ kernels do not load: CUDA driver version is insufficient")


@pytest.mark.parametrize(
    ("capability", "name"),
    [("8.0", "sm_80"), ("8.9", "sm_89"), ("9.0", "sm_90a"), ("10.0", "sm_100")],
)
def test_architectures_have_nvccs_names_and_their_own_libraries(capability, name):
    assert library.architecture_of(capability) == name
    others = {"sm_80", "sm_90a"} - {name}
    path = library.cuda_recipe(name).path()
    assert path not in {library.cuda_recipe(other).path() for other in others}


def test_the_compiler_is_the_users_or_jaxs_or_on_the_path(monkeypatch, tmp_path):
    """A package without its headers is passed over."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    package = tmp_path / "nvidia" / "cu13"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(library.shutil, "which", lambda name: f"/path/{name}")
    for name in ("bin/nvcc", "include/cuda_runtime.h", "nvvm/bin/cicc"):
        assert library.find_nvcc() != str(package / "bin/nvcc")
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    compiler = library.find_nvcc()
    assert compiler is not None
    assert compiler.endswith("nvidia/cu13/bin/nvcc")
    monkeypatch.setenv("CUDA_HOME", "/home/cuda")
    assert library.find_nvcc() == "/home/cuda/bin/nvcc"


def test_all_handlers_can_be_parts_of_a_graph():
    """XLA leaves a call without the trait out of a graph, and with it the loop around it."""
    names = library.cuda_handlers()
    assert names == ["jspec_cuda_attention", "jspec_cuda_layer", "jspec_cuda_product"]
    texts = {path.name: path.read_text() for path in CUDA.iterdir()}
    handlers = {name: text.count("DEFINE_HANDLER_SYMBOL") for name, text in texts.items()}
    assert {name: count for name, count in handlers.items() if count} == {"operands.cuh": 1}
    assert texts["operands.cuh"].count("{xla::ffi::Traits::kCmdBufferCompatible})") == 1
    emulated = "".join(path.read_text() for path in FOLDER.glob("*.cc"))
    for name in names:
        assert f"JSPEC_EMULATED({name})" in emulated, "every handler is run in the emulator"


def test_it_is_off_on_a_cpu_and_where_the_user_says_so(monkeypatch):
    assert not library.is_cuda_available()
    monkeypatch.setattr(library, "backend", lambda: "gpu")
    monkeypatch.setenv("JSPEC_NATIVE", "0")
    assert not library.is_cuda_available()


@pytest.mark.compile_gpu
def test_a_program_for_an_h100_has_the_product_in_its_graph():
    """In its own process: the tests' own XLA optimises less."""
    variables = {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "JAX_PLATFORMS": "cpu"}
    code = "from tests.kernels.cuda.test_library import check_graph\ncheck_graph()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, cwd=CUDA.parents[2],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def check_graph():
    """Compiles a loop of two products for an H100: it is one graph with both calls and no copies.

    The second result takes the memory of the residual.
    """

    def run(rows, up, down, norm):
        def body(carry):
            turn, rows = carry
            gated = multiply(rows, up, Fused(norm, 1e-5, activation="silu", dtype=jnp.bfloat16))
            return turn + 1, multiply(gated, down, Fused(residual=rows))

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (np.int32(0), rows))[1]

    sharding = jax.sharding.SingleDeviceSharding(find_accelerator("h100").devices()[0])
    floats, pairs = jnp.float32, jnp.bfloat16
    shapes = ((5, 256), floats), ((1024, 256), pairs), ((256, 512), pairs), ((256,), pairs)
    given = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
    with kernels.compiling_for("gpu"), tempfile.TemporaryDirectory() as folder:
        assert library.is_cuda_available()
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        options = dump | (kernels.run_options() or {})
        jax.jit(run).lower(*given).compile(compiler_options=options)
        (path,) = pathlib.Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
        text = path.read_text()
    # What stands at the margin is started by the host.
    assert re.findall(r"^\d+: (\w+)", text, re.MULTILINE) == ["kCommandBuffer"], text
    body = text.partition("body:")[2]
    assert (
        re.findall(r"^ +\d+: (kCustomCall|kCopy)\b", body, re.MULTILINE) == ["kCustomCall"] * 2
    ), text
