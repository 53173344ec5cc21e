"""The C++ library: compiled on first use, loaded once, and called as a part of XLA's programs.

XLA on CPU leaves much of the machine unused where decoding spends its time. It reads the weights of
a bfloat16 product at half the speed of memory, and at a tenth of it for one row. Its attention
reads the whole buffer of a cache. And a row's result may depend on the rows beside it. The C++
sources in `cpp/` do better. They are called through XLA's foreign function interface. Where there
is no C++ compiler, XLA computes everything.
"""

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec.kernels.backend import backend
from jspec.kernels.build import load_library

_LOCK = threading.Lock()  # so that the library is built and loaded once
_FUNCTIONS = (
    "product", "int8_product", "int4_product", "attention", "rms_norm", "rotate_heads", "swiglu",
    "smallest_rank", "first_argmax", "write_rows", "grouped_product", "attend_pages", "write_pages",
    "unwritten",
)  # fmt: skip
_PACKED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
_IN_PLACE = {"write_rows": {0: 0}, "write_pages": {0: 0}}  # operands that are changed and returned


def is_available() -> bool:
    """Returns whether C++ computes on this device; builds the library first if need be.

    A build that fails is reported by one warning. `JSPEC_NATIVE=0` in the environment leaves
    everything to XLA.
    """
    return _load() is not None


def has_pairs() -> bool:
    """Returns whether bfloat16 products are fast in C++ for many rows, too (AVX-512 BF16)."""
    library = _load()
    return library is not None and library.jspec_has_pairs()


def has_tiles() -> bool:
    """Returns whether more rows of a bfloat16 product make each of them cheaper (AMX)."""
    library = _load()
    return library is not None and library.jspec_has_tiles()


def has_packed() -> bool:
    """Returns whether packed kernels are multiplied in C++ (AVX2 or AVX-512)."""
    library = _load()
    return library is not None and library.jspec_has_packed()


def host_function(name: str) -> Callable[..., None] | None:
    """Returns a function of the library that the host calls, on pointers; None without it."""
    library = _load()
    return None if library is None else getattr(library, f"jspec_{name}")


def _load() -> ctypes.CDLL | None:
    # Not under the cache of `_prepare`: a program for another device says nothing about this one.
    if backend() != "cpu":
        return None
    with _LOCK:
        return _prepare()


@functools.cache
def _prepare() -> ctypes.CDLL | None:
    if os.environ.get("JSPEC_NATIVE") == "0":
        return None
    try:
        library = load_library()
    except (OSError, ValueError) as error:  # ValueError: no home folder, or quotes in $CXX
        slow = "XLA computes everything, and decoding takes longer"
        print(f"jspec: {error}; {slow}", file=sys.stderr, flush=True)
        return None
    for has in (library.jspec_has_pairs, library.jspec_has_tiles, library.jspec_has_packed):
        has.restype = ctypes.c_bool
    kinds = _PACKED if library.jspec_has_packed() else ()
    packed = (f"{kind}_{name}" for kind in kinds for name in ("product", "byte_product"))
    for function in (*_FUNCTIONS, *packed):
        handler = jax.ffi.pycapsule(getattr(library, f"jspec_{function}"))
        jax.ffi.register_ffi_target(f"jspec_{function}", handler, platform="cpu")
    return library


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns a float32 result's shape."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def in_cpp(
    name: str, result: Callable[..., Any], takes: Callable[..., bool] = lambda *operands: True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Lets C++ compute an operation written in JAX, for the operands that the C++ takes.

    `result` tells the shapes of the results: tracing the JAX for them would slow down every start.
    """

    def decorate(reference: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(reference)
        def operation(*operands: Any) -> Any:
            if takes(*operands) and is_available():
                return call(name, reference, result(*operands), *operands)
            return reference(*operands)

        return operation

    return decorate


def call(name: str, reference: Callable[..., Any], result: Any, *operands: Any) -> Any:
    """Returns what the reference returns, up to rounding, computed by a function in C++.

    The one exception is attention for a query that may see nothing: C++ returns zeros, the
    reference the mean of all values. Derivatives are the reference's.
    """
    return with_derivatives_of(reference, functools.partial(_call, name, result), *operands)


# Under jit, so that the call stays a function of its own: within a loop that also carries an empty
# array, XLA would lose the call's interface.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(name: str, result: Any, *operands: Array) -> Any:
    function = jax.ffi.ffi_call(
        f"jspec_{name}", result, vmap_method="sequential", input_output_aliases=_IN_PLACE.get(name)
    )
    return function(*operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def with_derivatives_of(
    reference: Callable[..., Any], function: Callable[..., Any], *operands: Any
) -> Any:
    """Returns function(*operands); to differentiate it computes the reference instead."""
    return function(*operands)


@with_derivatives_of.defjvp
def _jvp(
    reference: Callable[..., Any],
    function: Callable[..., Any],
    operands: tuple[Any, ...],
    tangents: tuple[Any, ...],  # an integer operand's is no array of JAX, but NumPy's float0
) -> tuple[Any, Any]:
    return jax.jvp(reference, operands, tangents)
