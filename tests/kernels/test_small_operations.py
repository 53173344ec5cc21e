"""Small operations in C++: those of float64 or of XLA, and no row's result depends on others."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import library as native
from jspec.kernels import rms_norm, rotate_heads, swiglu, table_rows, zeros_if
from jspec.models.layers import RMSNorm, linear

pytestmark = pytest.mark.usefixtures("library")
EPSILON = 1e-5


def norm(inputs, scale):
    return RMSNorm(EPSILON).apply({"params": {"scale": scale}}, inputs)


def draw(*shape, factor=1, seed=0):
    return jnp.asarray(factor * np.random.default_rng(seed).normal(size=shape), jnp.float32)


def draw_scale(width, dtype="bfloat16"):
    return jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, width), dtype)


def draw_heads(b, t, k, heads, h):
    """Returns heads beside each key head, g + 2 of them, and cosines and sines."""
    angles = np.random.default_rng(0).uniform(0, 6, [b, t, h // 2]).astype(np.float32)
    return draw(b, t, k, heads, h), jnp.cos(angles), jnp.sin(angles)


def check_norm(outputs, inputs, scale):
    wide = np.asarray(inputs, np.float64)
    exact = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + EPSILON)
    np.testing.assert_allclose(outputs, exact * np.asarray(scale, np.float64), rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("bfloat16", (2, 9, 70)),
        ("float32", (2, 9, 70)),
        ("bfloat16", (1, 300, 2048)),
        ("bfloat16", (3, 2, 5)),
    ],
)
def test_norms_are_those_of_float64(shape, dtype):
    """Guards the rest behind the last whole step."""
    inputs, scale = draw(*shape, factor=3), draw_scale(shape[-1], dtype)
    assert "jspec_rms_norm" in jax.jit(norm).lower(inputs, scale).as_text()
    check_norm(jax.jit(norm)(inputs, scale), inputs, scale)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_norms_without_the_library_are_the_same(dtype, monkeypatch):
    """Nothing is promoted on the way: the scale is of another type than the numbers."""
    inputs, scale = draw(2, 9, 70, factor=3), draw_scale(70, dtype)
    if dtype == "float16":  # of two bytes as well: C++ would read it as bfloat16
        check_norm(jax.jit(norm)(inputs, scale), inputs, scale)
    monkeypatch.setattr("jspec.kernels.library.is_available", lambda: False)
    check_norm(norm(inputs, scale), inputs, scale)


def test_the_library_refuses_a_scale_that_it_cannot_read():
    inputs, scale = draw(2, 9, 70), draw_scale(70, "float16")
    result = native.floats(*inputs.shape)
    with pytest.raises(Exception, match="neither float32 nor bfloat16"):
        native.call("rms_norm", rms_norm.__wrapped__, result, inputs, scale, jnp.float32(EPSILON))


@pytest.mark.parametrize("shape", [(2, 9, 2, 70), (1, 300, 2, 2048), (3, 2, 2, 5)])
def test_gates_are_those_of_float64(shape):
    """Guards the rest behind the last whole vector."""
    gate_up = draw(*shape, factor=6)
    assert "jspec_swiglu" in jax.jit(swiglu).lower(gate_up).as_text()
    gate, up = np.moveaxis(np.asarray(gate_up, np.float64), 2, 0)
    np.testing.assert_allclose(jax.jit(swiglu)(gate_up), gate / (1 + np.exp(-gate)) * up, rtol=1e-6)


def test_it_holds_for_all_gates():
    """Guards the powers of two at both ends, and what is no number."""
    gate = np.linspace(-86.5, 100, 100_003, dtype=np.float32)
    gated = swiglu(jnp.stack([gate, np.ones_like(gate)])[None, None])[0, 0]
    wide = gate.astype(np.float64)
    np.testing.assert_allclose(gated, wide / (1 + np.exp(-wide)), rtol=4e-7)
    odd = np.array([0.0, -0.0, -88.0, -1e30, 1e30, np.inf, -np.inf, np.nan], np.float32)
    gated = np.asarray(swiglu(jnp.stack([odd, np.ones_like(odd)])[None, None])[0, 0])
    np.testing.assert_array_equal(gated[:4], 0)
    np.testing.assert_array_equal(gated[4:6], odd[4:6])
    assert np.isnan(gated[6:]).all()


@pytest.mark.parametrize("shape", [(2, 7, 2, 3, 10), (1, 300, 1, 6, 32)])
def test_rotated_heads_are_those_of_xla(shape):
    """Guards against a value head that is turned, and keys that are scaled."""
    operands = draw_heads(*shape)
    assert "jspec_rotate_heads" in jax.jit(rotate_heads).lower(*operands).as_text()
    rotated = jax.jit(rotate_heads)(*operands)
    for ours, theirs in zip(rotated, rotate_heads.__wrapped__(*operands), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
        assert np.abs(ours).max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_table_are_those_of_jax(dtype):
    """Also for ids that the table has not."""
    table, ids = draw(50, 33).astype(dtype), jnp.array([[0, 49, 7], [-1, 50, -60]], jnp.int32)
    program = jax.jit(table_rows)
    assert "jspec_table_rows" in program.lower(table, ids).as_text()
    np.testing.assert_array_equal(program(table, ids), table[ids])
    assert program(table, ids[:, :0]).shape == (2, 0, 33)


def test_a_gradient_of_rows_is_that_of_jax():
    """Training reads embeddings, too: a row that is asked for twice gets both parts."""
    ids = jnp.array([[1, 1, 4]], jnp.int32)
    gradient = jax.grad(lambda table: table_rows(table, ids).sum())(jnp.ones([5, 3]))
    np.testing.assert_array_equal(gradient[:, 0], [0, 2, 0, 0, 1])


@pytest.mark.parametrize(
    ("operation", "operands", "others"),
    [
        (norm, (draw(1, 40, 576, factor=3),), (draw_scale(576),)),
        (swiglu, (draw(1, 40, 2, 70, factor=6),), ()),
        (rotate_heads, draw_heads(1, 40, 1, 6, 32), ()),
    ],
    ids=["norm", "swiglu", "rotation"],
)
def test_a_rows_result_does_not_depend_on_its_neighbours(operation, operands, others):
    """XLA's does, from eight rows on."""
    together = jax.tree.leaves(jax.jit(operation)(*operands, *others))
    for count in (1, 7, 8, 33):
        some = jax.jit(operation)(*(leaf[:, :count] for leaf in operands), *others)
        for result, expected in zip(jax.tree.leaves(some), together, strict=True):
            np.testing.assert_array_equal(result, expected[:, :count])
    in_rows = [leaf.reshape(8, 5, *leaf.shape[2:]) for leaf in operands]
    batched = jax.jit(operation)(*in_rows, *others)
    for result, expected in zip(jax.tree.leaves(batched), together, strict=True):
        np.testing.assert_array_equal(result.reshape(expected.shape), expected)


@pytest.mark.parametrize(
    ("operation", "by_xla", "operands"),
    [
        *(
            (norm, lambda *x: rms_norm.__wrapped__(*x, jnp.float32(EPSILON)),
             (draw(2, 3, 70), draw_scale(70, dtype)))
            for dtype in ("bfloat16", "float32")
        ),
        (swiglu, swiglu.__wrapped__, (draw(2, 3, 2, 20),)),
        (rotate_heads, rotate_heads.__wrapped__, draw_heads(2, 7, 2, 3, 10)),
    ],
    ids=["norm, bfloat16", "norm, float32", "swiglu", "rotation"],
)  # fmt: skip
def test_derivatives_are_those_of_xla(operation, by_xla, operands):
    numbers = tuple(range(len(operands) if operation is norm else 1))

    def slopes_of(function):
        loss = lambda *x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(function(*x)))  # noqa: E731
        return jax.jit(jax.grad(loss, numbers))(*operands)

    for ours, theirs in zip(slopes_of(operation), slopes_of(by_xla), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("is_read", [True, jnp.array(True)])
def test_what_is_read_is_zero(is_read):
    numbers = jax.jit(lambda: zeros_if(is_read, 3, 5))()
    np.testing.assert_array_equal(numbers, np.zeros([3, 5], np.float32))


def test_what_is_not_read_is_not_written():
    program = jax.jit(lambda is_read: zeros_if(is_read, 7, 4096)[:2].at[0, 0].set(1.0))
    assert "jspec_unwritten" in program.lower(True).as_text()
    numbers = program(jnp.array(False))
    assert numbers.shape == (2, 4096)
    assert numbers[0, 0] == 1
    assert not np.asarray(program(jnp.array(True)))[1].any()


def test_products_at_the_same_time_are_those_one_after_the_other():
    """The team of threads helps one caller at a time; the others do all of their work alone."""
    kernels = [draw(outputs, 576, seed=outputs) for outputs in (960, 577, 3072, 1001)]
    rows = draw(1, 3, 576)
    alone = [np.asarray(linear(rows, kernel)) for kernel in kernels]

    def call(caller):
        return [
            np.array_equal(linear(rows, kernels[number % 4]), alone[number % 4])
            for number in range(caller, caller + 40)
        ]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        equal = [is_equal for own in pool.map(call, range(4)) for is_equal in own]
    assert equal == [True] * 4 * 40
