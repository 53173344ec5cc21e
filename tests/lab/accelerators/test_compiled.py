"""What is read beside a compiled program's text. The tests of compile_for.py compile for GPUs."""

import jax
import jax.numpy as jnp
import pytest

from jspec.common.errors import InputError
from jspec.lab.accelerators.compiled import compile_program


def test_a_gpus_program_whose_thunks_are_not_written_is_refused():
    """Guards against one graph where nothing was found: a CPU's compiler writes none of a GPU's."""
    lowered = jax.jit(jnp.sin).lower(1.0)
    with pytest.raises(InputError, match="expected XLA to write the thunks of a GPU's program"):
        compile_program(lowered, "gpu")
    program = compile_program(lowered, "tpu")
    assert "ENTRY" in program.text
    assert program.is_one_graph is program.loops_without_condition is None
