"""What the rest of jspec needs to know of the device, by purpose rather than by name."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec.kernels import library
from jspec.kernels.backend import backend
from jspec.kernels.build import fingerprint


class TimedProducts(NamedTuple):
    """Products to measure the default device by: a kernel of `num_bytes`, which no cache holds, for
    the rate of reading weights; and `rows` of `width` inputs and outputs, bound by arithmetic, for
    the rate of operations. They take rows of `rows_dtype` without a conversion.
    """

    num_bytes: int
    rows: int
    width: int
    rows_dtype: DTypeLike


def timed_products(kernel_dtype: DTypeLike) -> TimedProducts:
    """Returns the products by which the default device is measured with kernels of that type."""
    if backend() == "cpu":
        # The C++ reads float32 rows, whatever the kernel's type.
        return TimedProducts(256 << 20, 512, 2048, jnp.float32)
    return TimedProducts(2 << 30, 8192, 8192, kernel_dtype)


def prefers_unrolled_loops() -> bool:
    """Returns whether a short loop of small operations is better written out.

    On a GPU the turns of a loop are what costs. On CPU operations are machine code to compile.
    """
    return backend() != "cpu"


def describe_device() -> dict[str, str | None]:
    """Returns JAX's names for the default device, and the C++ library's fingerprint or None."""
    kind = jax.devices()[0].device_kind
    native = fingerprint() if library.is_available() else None
    return {"backend": jax.default_backend(), "device": kind, "native": native}
