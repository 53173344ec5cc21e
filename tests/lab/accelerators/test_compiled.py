"""What is read beside a compiled program's text. The tests of compile_for.py compile for GPUs."""

import jax
import jax.numpy as jnp
import pytest

from jspec.common.errors import InputError
from jspec.lab.accelerators.compiled import compile_program, count_moves


def test_a_gpus_program_whose_thunks_are_not_written_is_refused():
    """Guards against one graph where nothing is known: a CPU's compiler writes none of a GPU's."""
    lowered = jax.jit(jnp.sin).lower(1.0)
    with pytest.raises(InputError, match="expected XLA to write the thunks of a GPU's program"):
        compile_program(lowered, "gpu")
    program = compile_program(lowered, "tpu")
    assert "ENTRY" in program.text
    assert program.is_one_graph is program.loops_without_condition is None


_TURN = """\
%turn (q: bf16[1024,1024]) -> bf16[1024,1024] {
  %q = bf16[1024,1024]{1,0} parameter(0)
  %flat = bf16[1048576]{0} bitcast(%q)
  ROOT %t = bf16[1024,1024]{1,0} transpose(%q), dimensions={1,0}
}

"""
_TEXT = """HloModule m

%update (p0: bf16[1024,1024], p1: bf16[1,1024], p2: s32[]) -> bf16[1024,1024] {
  %p0 = bf16[1024,1024]{1,0} parameter(0)
  %p1 = bf16[1,1024]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %turned = bf16[1,1024]{1,0} copy(%p1)
  ROOT %u = bf16[1024,1024]{1,0} dynamic-update-slice(%p0, %turned, %p2, %p2)
}

TURNENTRY %main (a: bf16[1024,1024]) -> bf16[1024,1024] {
  %a = bf16[1024,1024]{1,0} parameter(0)
  %row = bf16[1,1024]{1,0} constant({...})
  %at = s32[] constant(0)
  %wrote = bf16[1024,1024]{1,0} fusion(%a, %row, %at), kind=kLoop, calls=%update
  LINE
  ROOT %out = bf16[1024,1024]{1,0} add(%wrote, %a)
}
"""


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("%moved = bf16[1024,1024]{1,0} fusion(%a), kind=kInput, calls=%turn", 1),
        ("%moved = bf16[1024,1024]{0,1} copy(%a)", 1),
        ("%moved = (bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0:S(5)}) copy-start(%a)", 1),
        ("%moved = (bf16[1024,1024]{1,0:S(1)}, bf16[1024,1024]{1,0}) copy-start(%a)", 0),
        ("%moved = f32[512,512]{1,0} convert(%a)", 1),
        ("%moved = f32[511,489]{1,0} convert(%a)", 0),  # less than a megabyte
        ("%moved = bf16[1024,1024]{1,0} multiply(%a, %a)", 0),
    ],
)
def test_large_moves_are_counted(line, count):
    """Guards against the copy of a cache in every round; one slot of it is written in place."""
    text = _TEXT.replace("TURN", _TURN if "%turn" in line else "")
    assert count_moves(text.replace("LINE", line)) == count


def test_a_transposed_result_is_a_move():
    """On a text that XLA has written: the negative control computes on the way."""
    x = jnp.zeros([1024, 1024])
    for function, count in ((lambda x: x.T.copy(), 1), (lambda x: jnp.sin(x).T, 0)):
        assert count_moves(jax.jit(function).lower(x).compile().as_text()) == count
