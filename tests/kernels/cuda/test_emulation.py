"""The emulator does what a GPU does, and notices what a GPU might forgive."""

import ctypes

import jax.numpy as jnp
import numpy as np
import pytest


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def call(function, *arguments):
    return function(
        *(a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else a for a in arguments)
    )


@pytest.fixture(params=[0, 1, 2, 3])
def order(request, in_order):
    """Runs the test with fibers in an order."""
    with in_order(request.param):
        yield


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(
    ("name", "blocks", "size"),
    [("", 3, 96), ("_warp", 2, 32), ("_cluster", 2, 128), ("_copies", 3, 96)],
)
def test_a_barrier_makes_the_order_of_threads_irrelevant(emulator, name, blocks, size):
    given = numbers(blocks, size)
    results = np.zeros_like(given)
    assert call(getattr(emulator, f"check_reverse{name}"), 1, given, results) == 0
    np.testing.assert_array_equal(results, given[:, ::-1])


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("name", ["", "_warp", "_cluster", "_copies"])
def test_a_missing_barrier_is_noticed(emulator, name):
    """The negative control: some thread reads what no thread has written, which is NaN."""
    given = numbers(288)
    results = np.zeros_like(given)
    assert call(getattr(emulator, f"check_reverse{name}"), 0, given, results) == 0
    assert np.isnan(results).any()


@pytest.mark.usefixtures("order")
def test_lanes_exchange_numbers(emulator):
    given, results = numbers(32), np.zeros([2, 32], np.float32)
    assert call(emulator.check_shuffles, given, results) == 0
    np.testing.assert_array_equal(results, [given[[5] * 32], given[np.arange(32) ^ 3]])


def test_tensor_cores_multiply(emulator):
    """Against NumPy, from operands laid out as the instruction wants them."""
    a, b = (jnp.asarray(numbers(*shape)).astype(jnp.bfloat16) for shape in ((16, 16), (16, 8)))
    results = np.zeros([16, 8], np.float32)
    bits = [np.asarray(x).view(np.uint16) for x in (a, b)]
    assert call(emulator.check_multiply, *bits, results) == 0
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(results, expected, atol=1e-5)


@pytest.mark.parametrize("is_warp", [0, 1])
def test_threads_that_wait_forever_are_an_error(emulator, is_warp, capfd):
    assert emulator.check_hang(is_warp) == 719
    assert "wait at __syncthreads" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("to", "source", "waits", "reason"),
    [
        (8, 8, 1, ""),
        (4, 0, 1, "a copy is not aligned"),
        (0, 4, 1, "a copy is not aligned"),
        (0, 0, 0, "a thread has ended before its copies"),
    ],
)
def test_copies_that_a_gpu_may_refuse_are_an_error(emulator, to, source, waits, reason, capfd):
    """Of zeros, too: their address is looked at."""
    assert emulator.check_copy(to, source, waits) == (719 if reason else 0)
    assert reason in capfd.readouterr().err


def test_numbers_are_converted_as_numpy_converts_them(emulator):
    """All float16, and float32 around the ties of bfloat16."""
    emulator.check_half.restype = ctypes.c_float
    emulator.check_half.argtypes = [ctypes.c_uint16]
    halves = np.arange(0, 1 << 16, 7, dtype=np.uint16)
    results = np.array([emulator.check_half(int(bits)) for bits in halves], np.float32)
    np.testing.assert_array_equal(results, halves.view(np.float16).astype(np.float32))
    emulator.check_pair.restype = ctypes.c_uint32
    emulator.check_pair.argtypes = [ctypes.c_float, ctypes.c_float]
    bits = np.concatenate([np.arange(0x3F7F8000, 0x3F838000, 0x1FFF), [0x7F800000, 0x7F7FFFFF]])
    floats = bits.astype(np.uint32).view(np.float32)
    pairs = [emulator.check_pair(float(x), float(-x)) for x in floats]
    expected = np.asarray(jnp.asarray(floats).astype(jnp.bfloat16)).view(np.uint16)
    np.testing.assert_array_equal(np.array(pairs, np.uint32) & 0xFFFF, expected)
    np.testing.assert_array_equal(np.array(pairs, np.uint32) >> 16, expected ^ 0x8000)
    nan = emulator.check_pair(float("nan"), 1.0)
    assert nan & 0x7FFF > 0x7F80
