"""Packed kernels: the weights are those of the gguf library, and the products those of float64."""

import dataclasses
import functools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import library
from jspec.kernels.packed import (
    FORMATS,
    JoinedKernel,
    PackedKernel,
    pack,
    packed_product,
    packed_rows,
    unpack,
)
from jspec.weights.packed_weights import round_packed
from tests.cases import slow_unless

NUM_OUTPUTS, NUM_INPUTS = 50, 768  # 50 is no whole number of strips
# Where the float16 numbers of a block are: random bytes there could be infinite, or NaN.
HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82),
    "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip

# XLA multiplies what `unpack` returns, which is compared for every format.
KINDS_AND_METHODS = [*((kind, True) for kind in FORMATS), ("q4_0", False), ("q6_k", False)]


@functools.cache
def random_rows(kind, num_outputs=NUM_OUTPUTS, num_inputs=NUM_INPUTS):
    """Returns the bytes of random weights, [o bytes], and the weights as gguf reads them, [o i]."""
    rng, form = np.random.default_rng(0), FORMATS[kind]
    shape = num_outputs, num_inputs // form.inputs
    blocks = rng.integers(0, 256, (*shape, form.num_bytes)).astype(np.uint8)
    for begin in HALVES[kind]:
        halves = rng.uniform(0.01, 0.1, shape).astype(np.float16)
        blocks[..., begin : begin + 2] = halves[..., None].view(np.uint8)
    rows = blocks.reshape(num_outputs, -1)
    return rows, gguf.dequantize(rows, gguf.GGMLQuantizationType[kind.upper()])


def skip_without_cpp():
    if not library.has_packed():
        pytest.skip("no C++ for packed kernels on this processor")


def packed(rows, kind):
    return pack([rows], kind, np.arange(len(rows)))


def make_kernel(rows, kind, shape, dtype):
    return PackedKernel(jnp.asarray(packed(rows, kind)), kind, shape, jnp.dtype(dtype))


def without_cpp(monkeypatch):
    """Leaves everything to NumPy and XLA."""
    monkeypatch.setattr(library, "host_function", lambda name: None)
    monkeypatch.setattr(library, "has_packed", lambda: False)


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_those_of_gguf(kind):
    """Guards against a wrong bit: of random bytes every weight is equal, not only nearly."""
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    assert sizes == (FORMATS[kind].inputs, FORMATS[kind].num_bytes)
    rows, weights = random_rows(kind)
    np.testing.assert_array_equal(
        unpack(jnp.asarray(packed(rows, kind)), kind)[:NUM_OUTPUTS], weights
    )


@pytest.mark.parametrize("kind", ["q5_1", "q3_k"])
def test_strips_are_the_same_without_a_compiler(kind, monkeypatch):
    """Guards against two layouts; these two formats have elements of 1, 2 and 4 bytes."""
    rows, _ = random_rows(kind)
    by_cpp = packed(rows, kind)
    without_cpp(monkeypatch)
    np.testing.assert_array_equal(by_cpp, packed(rows, kind))


def compare(kind, is_native, monkeypatch, rows, expected, dtype, bound, **options):
    """Checks the products of rows with a random kernel, of few rows and of many."""
    if is_native:
        skip_without_cpp()
    else:
        without_cpp(monkeypatch)
    raw, weights = random_rows(kind)
    kernel = make_kernel(raw, kind, weights.shape, dtype).replace(**options)
    for count in (1, 8, 11):
        outputs = np.asarray(packed_product(rows[:count].astype(jnp.float32), kernel))
        assert np.abs(outputs - expected[:count]).max() <= bound * np.abs(expected).max()


@pytest.mark.parametrize(("kind", "is_native"), KINDS_AND_METHODS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_are_those_of_float64(kind, dtype, is_native, monkeypatch):
    """Against the rows as they are rounded. Only XLA's bfloat16 path rounds the weights as well.

    In C++ the rows of a bfloat16 model are integers of 15 bits, a unit for each 32 of them.
    """
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(11, NUM_INPUTS)), dtype)
    expected = np.asarray(rows, np.float64) @ random_rows(kind)[1].astype(np.float64).T
    by_xla = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    by_cpp = 3e-5 if dtype == jnp.bfloat16 else 1e-6
    bound = by_cpp if is_native else by_xla
    compare(kind, is_native, monkeypatch, rows, expected, dtype, bound)


@pytest.mark.parametrize(("kind", "is_native"), KINDS_AND_METHODS)
def test_inputs_rounded_to_bytes(kind, is_native, monkeypatch):
    """A product of rows rounded here, one at a time, is exact; that of the rows is not."""
    groups = np.random.default_rng(1).normal(size=(11, NUM_INPUTS // 32, 32)).astype(jnp.bfloat16)
    groups[0, :2] = 0  # nothing to take as 127
    rows, groups = jnp.asarray(groups.reshape(11, -1)), groups.astype(np.float32)
    largest = np.maximum(np.abs(groups).max(axis=2, keepdims=True), np.float32(1e-30))
    rounded = np.round(groups * (np.float32(127) / largest)).astype(np.float64) * (largest / 127)
    weights = random_rows(kind)[1].astype(np.float64)
    expected = rounded.reshape(11, -1) @ weights.T
    unrounded = np.asarray(rows, np.float64) @ weights.T
    assert np.abs(unrounded - expected).max() > 1e-4 * np.abs(expected).max()
    # On other devices than a CPU XLA rounds them to the kernel's bfloat16, too.
    bound = 2e-5 if jax.default_backend() == "cpu" else 4e-3
    compare(kind, is_native, monkeypatch, rows, expected, jnp.bfloat16, bound, takes_bytes=True)


def test_rows_of_like_numbers_are_multiplied_exactly():
    """Guards against lost bits: within 64 times of each other bfloat16 numbers are exact."""
    skip_without_cpp()
    raw, weights = random_rows("q8_0")
    kernel = make_kernel(raw, "q8_0", weights.shape, jnp.bfloat16)
    size = np.random.default_rng(1).uniform(1, 63, NUM_INPUTS) * 1e-3
    for row in (size, -size, np.where(np.arange(NUM_INPUTS) % 3, size, -size)):
        row = jnp.asarray(row[None], jnp.bfloat16)
        expected = np.asarray(row, np.float64) @ weights.astype(np.float64).T
        outputs = np.asarray(packed_product(row, kernel))
        np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("takes_bytes", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("kind", "count"), [("q6_k", 2), ("q4_k", 3)])
def test_one_rows_nan_stays_its_own(kind, count, bad, takes_bytes):
    """A row that is not finite fails alone: its outputs are NaN, its neighbours' are as before."""
    raw, weights = random_rows(kind)
    kernel = make_kernel(raw, kind, weights.shape, jnp.bfloat16).replace(takes_bytes=takes_bytes)
    rows = np.random.default_rng(3).normal(size=(count, NUM_INPUTS)).astype(np.float32)
    good = np.asarray(packed_product(jnp.asarray(rows), kernel))
    rows[0, 40] = bad
    outputs = np.asarray(packed_product(jnp.asarray(rows), kernel))
    assert not np.isfinite(outputs[0]).any()
    np.testing.assert_array_equal(outputs[1:], good[1:])


@pytest.mark.parametrize("takes_bytes", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_rows_result_does_not_depend_on_the_others(kind, takes_bytes):
    """Bit for bit: a token's logits are the same in a decoding step and in a verify call.

    One and two rows have loops of their own, and many are taken 64 at a time.
    """
    skip_without_cpp()
    raw, weights = random_rows(kind)
    kernel = make_kernel(raw, kind, weights.shape, jnp.bfloat16).replace(takes_bytes=takes_bytes)
    rows = np.random.default_rng(2).normal(size=(77, NUM_INPUTS)).astype(np.float32)
    rows[:, :32] = 0  # a group without any number to take as its unit
    rows = jnp.asarray(rows)
    alone = np.concatenate([packed_product(row[None], kernel) for row in rows])
    for count in (2, 3, 9, 64, 77):
        np.testing.assert_array_equal(packed_product(rows[:count], kernel), alone[:count])


@pytest.mark.parametrize("takes_bytes", [False, True])
@pytest.mark.parametrize("kind", ["q4_k", "q6_k", "q4_0"])
def test_an_outputs_result_does_not_depend_on_the_others(kind, takes_bytes):
    """Bit for bit, where the last strip is multiplied alone, and where it is not full."""
    skip_without_cpp()
    raw, _ = random_rows(kind)
    rows = jnp.asarray(np.random.default_rng(4).normal(size=(66, NUM_INPUTS)), jnp.float32)

    def outputs_of(num_outputs, num_rows):
        shape = num_outputs, NUM_INPUTS
        kernel = make_kernel(raw[:num_outputs], kind, shape, jnp.bfloat16)
        return np.asarray(packed_product(rows[:num_rows], kernel.replace(takes_bytes=takes_bytes)))

    for num_rows in (1, 2, 66):
        together = outputs_of(NUM_OUTPUTS, num_rows)
        for count in (7, 33, 48):
            np.testing.assert_array_equal(outputs_of(count, num_rows), together[:, :count])


@pytest.mark.slow  # the products are compiled once more
@pytest.mark.parametrize(
    "options",
    [("-mavx2", "-mfma", "-mf16c"), ("-march=native", "-mno-avx512vnni", "-mno-avx512bf16")],
    ids=["AVX2", "AVX-512 without VNNI"],
)
def test_products_are_the_same_on_other_processors(options, monkeypatch, tmp_path):
    """Bit for bit: rows of integers have exact sums, whatever instruction adds them up."""
    skip_without_cpp()
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    source = tmp_path / "all_formats.cc"
    products = "".join(f"JSPEC_PACKED({kind});\n" for kind in FORMATS)
    source.write_text(f'#include "packed_product.h"\n{products}')
    folder = f"-I{library._CPP}"
    recipe = dataclasses.replace(
        library.cpp_recipe(),
        sources=[source],
        options=("-std=gnu++17", "-O0", "-ffp-contract=off", "-fPIC", "-w", folder, *options),
    )
    elsewhere = library.load_library(recipe)
    rows = jnp.asarray(np.random.default_rng(5).normal(size=(9, NUM_INPUTS)), jnp.bfloat16)
    for kind in FORMATS:
        raw, weights = random_rows(kind)
        kernel = make_kernel(raw, kind, weights.shape, jnp.bfloat16)
        for takes_bytes in (False, True):
            name = f"jspec_{kind}_{'byte_' * takes_bytes}product"
            target = f"{name}_{options[0]}"
            handler = jax.ffi.pycapsule(getattr(elsewhere, name))
            jax.ffi.register_ffi_target(target, handler, platform="cpu")
            given = rows.astype(jnp.float32) if takes_bytes else rows
            for count in (1, 2, 9):  # few rows have a loop of their own
                call = jax.jit(jax.ffi.ffi_call(target, library.floats(count, NUM_OUTPUTS)))
                outputs = call(given[:count], kernel.strips)
                here = packed_product(rows[:count], kernel.replace(takes_bytes=takes_bytes))
                np.testing.assert_array_equal(outputs, here)


@pytest.mark.parametrize("kind", ["q5_1", "q3_k"])
def test_rows_of_a_table(kind, monkeypatch):
    """An embedding that stays packed; the ids lie in the first and in the last, padded strip.

    These two formats have elements of 1, 2 and 4 bytes.
    """
    raw, weights = random_rows(kind)
    table = make_kernel(raw, kind, weights.shape, jnp.float32)
    ids = np.array([[3, 49, 0], [17, 16, 15], [-1, 50, 64]])  # the last three are clipped
    program = jax.jit(packed_rows)
    assert "jspec_packed_rows" in program.lower(table, jnp.asarray(ids)).as_text()
    table_rows = program(table, jnp.asarray(ids))
    np.testing.assert_allclose(table_rows, weights[np.clip(ids, 0, 49)], rtol=1e-6)
    monkeypatch.setattr(library, "is_available", lambda: False)
    by_xla = jax.jit(lambda table, ids: packed_rows(table, ids))(table, jnp.asarray(ids))
    np.testing.assert_array_equal(table_rows, by_xla)


@pytest.mark.usefixtures("optimised")
def test_weights_are_decoded_inside_the_loop(monkeypatch):
    """Guards against XLA decoding all weights ahead of a decoding loop, and keeping the floats."""
    without_cpp(monkeypatch)
    rows = np.zeros((1024, 1024 // 32 * 34), np.uint8)
    kernel = make_kernel(rows, "q8_0", (1024, 1024), jnp.bfloat16)

    def steps(rows, kernel):
        step = lambda _, rows: rows + 1e-9 * packed_product(rows, kernel)  # noqa: E731
        return jax.lax.fori_loop(0, 3, step, rows)

    program = jax.jit(steps).lower(jnp.ones([1, 1024]), kernel).compile().as_text()
    assert "while(" in program
    assert "fusion(" not in program[program.index("ENTRY") :]


def weights_of(kernel):
    """Returns the weights of a packed kernel, [o i]."""
    outputs = int(np.prod(kernel.shape[:-1]))
    return np.asarray(unpack(kernel.strips, kernel.kind))[:outputs]


@pytest.mark.parametrize(
    "kind",
    [
        slow_unless(kind in ("q4_1", "q6_k"), kind)
        for kind in ("q4_1", "q5_0", "q5_1", "q8_0", "q5_k", "q6_k")
    ],
)
def test_cpp_rounds_to_q4_0_as_xla_does(kind, monkeypatch):
    """Guards against a scale of other inputs, a minimum that is added, exchanged outputs."""
    skip_without_cpp()
    rows, exact = random_rows(kind)
    kernel = make_kernel(rows, kind, exact.shape, "float32")
    by_cpp = round_packed(kernel, ("qkv",))
    without_cpp(monkeypatch)
    by_xla = round_packed(kernel, ("qkv",))
    assert by_cpp.kind == by_xla.kind == "q4_0"
    assert by_cpp.takes_bytes
    assert by_xla.takes_bytes
    # Sums in another order may choose another of two scales that are about as good.
    errors = [np.mean((weights_of(rounded) - exact) ** 2, axis=1) for rounded in (by_cpp, by_xla)]
    np.testing.assert_allclose(*errors, rtol=1e-2)
    assert np.mean(weights_of(by_cpp) == weights_of(by_xla)) > 0.99


def join(sizes, shape, order):
    """Returns a joined kernel of random parts, `sizes` outputs of each kind, and its weights."""
    parts, weights = [], []
    for kind, num_outputs in sizes.items():
        rows, exact = random_rows(kind, num_outputs)
        parts.append(make_kernel(rows, kind, exact.shape, "float32"))
        weights.append(exact)
    order = np.asarray(order, np.int32)
    return JoinedKernel(tuple(parts), jnp.asarray(order), shape), np.concatenate(weights)[order]


def test_a_joined_kernel_is_rounded_to_one():
    """Guards against outputs in another order, and the padding of a format's last strip."""
    order = np.random.default_rng(1).permutation(39)
    joined, exact = join({"q8_0": 18, "q4_k": 21}, (3, 13, NUM_INPUTS), order)
    rounded = round_packed(joined, ("qkv",))
    assert (rounded.kind, rounded.shape) == ("q4_0", joined.shape)
    errors = np.sum((weights_of(rounded) - exact) ** 2, axis=1) / np.sum(exact**2, axis=1)
    assert np.all(errors < 0.02)


def test_what_is_as_small_is_not_rounded_again():
    """A second rounding would lose bits and save none; of an embedding only floats are large."""
    for kind, path in (("q4_k", "qkv"), ("q3_k", "qkv"), ("q8_0", "embedding")):
        rows, exact = random_rows(kind, 5)
        kernel = make_kernel(rows, kind, exact.shape, "float32")
        rounded = round_packed(kernel, (path,))
        assert rounded.kind == kind
        assert rounded.takes_bytes
        np.testing.assert_array_equal(rounded.strips, kernel.strips)


def test_a_joined_kernel_that_would_grow_stays():
    """Guards against few outputs of many bits, for which many of few would be rounded up."""
    joined, _ = join({"q3_k": 48, "q5_k": 4}, (52, NUM_INPUTS), range(52))
    rounded = round_packed(joined, ("qkv",))
    assert [part.kind for part in rounded.parts] == ["q3_k", "q5_k"]
