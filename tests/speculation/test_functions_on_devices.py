"""Guesses over the devices of a mesh."""

import pytest

from tests.meshes import run_on_devices

CODE = """
import jax, jax.numpy as jnp
import jspec
from jspec.speculation import functions

table = jax.random.normal(jax.random.key(0), [5, 5])

def g(state):
    return jspec.Categorical(table[state])

def f(state):
    return jspec.Categorical(0.5 * table[state])

def run(num_drafts=3):
    return jspec.speculate(f, g, 0, jax.random.key(1), num_steps=20, num_drafts=num_drafts)

alone = run()
mesh = jax.sharding.Mesh(jax.devices(), ("guesses",))
states = jnp.arange(4)
with jax.set_mesh(mesh):
    spread = run()
    placed = jax.jit(functions.side_by_side(g))(states).logits.sharding.spec
    try:
        run(num_drafts=2)
        message = ""
    except ValueError as error:
        message = str(error)
report([alone.values.tolist(), spread.values.tolist(), str(placed), message])
"""


@pytest.mark.slow  # another process
def test_a_mesh_divides_the_guesses():
    """Guards against another chain on a mesh, against guesses that all devices compute, and against
    a number of guesses that the devices do not divide.
    """
    alone, spread, placed, message = run_on_devices(CODE, num_devices=4)
    assert alone == spread
    assert "guesses" in placed
    assert message == (
        "expected num_drafts + 1 to be a multiple of the mesh's 4 devices for guesses, got 2 + 1"
    )
