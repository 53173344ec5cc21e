"""The kernels of a block compile for GPUs, as parts of one CUDA graph."""

import re

import jax
import jax.numpy as jnp
import pytest

from jspec import kernels
from jspec.kernels import cuda_block, library
from jspec.lab.accelerators.compiled import find_accelerator
from jspec.models import init_cache, make_apply
from tests.kernels.families import make_model

_KERNELS_OF_A_LAYER = {"attention": 1, "cuda": 5, "layer": 1, "layer-pdl": 1}  # calls


@pytest.mark.compile_gpu
@pytest.mark.parametrize("name", [candidate.name for candidate in cuda_block.CANDIDATES])
def test_decoding_is_one_graph(name, monkeypatch, tmp_path):
    """A loop of a plain step and a verify call of 5 tokens, compiled for an H100 that is not here:
    the host starts one command buffer, in which are the candidate's calls, and XLA copies no cache.
    """
    monkeypatch.setenv("JSPEC_KERNELS", name)
    device = find_accelerator("h100").devices()[0]
    config, params = make_model("llama")
    apply = make_apply(config)

    def decode(params, tokens, cache):
        def turn(carry):
            index, tokens, cache = carry
            for width in (1, 5):
                block = jnp.tile(tokens[:, None], (1, width))
                logits, _, cache = apply(params, block, cache)
                tokens = jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32)
                cache = cache.commit(jnp.full([1], width, jnp.int32))
            return index + 1, tokens, cache

        start = jnp.int32(0), tokens, cache
        return jax.lax.while_loop(lambda carry: carry[0] < 4, turn, start)

    cache = init_cache(config, batch_size=1, capacity=200, dtype=jnp.bfloat16)
    operands = params, jnp.zeros([1], jnp.int32), cache
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), operands
    )
    with kernels.compiling_for("gpu"):
        if not library.is_cuda_available():
            pytest.skip("no nvcc")
        options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
        lowered = jax.jit(decode, donate_argnums=2).lower(*shapes)
        program = lowered.compile(compiler_options={**kernels.run_options(), **options})
    calls = re.findall(r'custom_call_target="jspec_cuda_\w+"', program.as_text())
    assert len(calls) == 2 * config.num_layers * _KERNELS_OF_A_LAYER[name]
    assert not re.search(r"bf16\[1,2,216,32\]\S* copy\(", program.as_text())
    sequences = [*tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")]
    thunks = re.findall(r"^\d+: k(\w+)", sequences[0].read_text(), re.MULTILINE)
    assert thunks == ["CommandBuffer"]
