"""The C++ library: compiled on first use, loaded once, and called as a part of XLA's programs.

XLA on CPU leaves much of the machine unused where decoding spends its time. It reads the weights of
a bfloat16 product at half the speed of memory, and at a tenth of it for one row. Its attention
reads the whole buffer of a cache. And a row's result may depend on the rows beside it. The C++
sources in `cpp/` do better. They are called through XLA's foreign function interface. Where there
is no C++ compiler, XLA computes everything.
"""

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
from jaxtyping import Array

from jspec.kernels.build import fingerprint, load_library

_LOCK = threading.Lock()  # so that the library is built and loaded once
# The functions of the library, and which operand each returns after changing it in place.
_FUNCTIONS: dict[str, int | None] = {
    "product": None,
    "int8_product": None,
    "int4_product": None,
    "attention": None,
    "rms_norm": None,
    "rotate_heads": None,
    "swiglu": None,
    "smallest_rank": None,
    "first_argmax": None,
    "write_rows": 0,
    "pack": None,
}
_PACKED = {f"{kind}_product": None for kind in (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
)}  # fmt: skip
Result: TypeAlias = jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]


class _Library(NamedTuple):
    """A library that was loaded.

    Attributes:
      name: its fingerprint.
      has_pairs: whether the processor multiplies pairs of bfloat16 numbers (AVX-512 BF16).
      has_tiles: whether it multiplies tiles of them (AMX).
      has_packed: whether packed kernels are multiplied in C++ (AVX-512).
    """

    name: str
    has_pairs: bool
    has_tiles: bool
    has_packed: bool


def is_available() -> bool:
    """Returns whether C++ computes on this device; builds the library first if need be.

    A build that fails is reported by one warning. `JSPEC_NATIVE=0` in the environment leaves
    everything to XLA.
    """
    return _load() is not None


def version() -> str | None:
    """Returns the fingerprint of the library in use; None where XLA computes everything."""
    library = _load()
    return library and library.name


def has_pairs() -> bool:
    """Returns whether bfloat16 products are fast in C++ for many rows, too (AVX-512 BF16)."""
    library = _load()
    return library is not None and library.has_pairs


def has_tiles() -> bool:
    """Returns whether more rows of a bfloat16 product make each of them cheaper (AMX)."""
    library = _load()
    return library is not None and library.has_tiles


def has_packed() -> bool:
    """Returns whether packed kernels are multiplied in C++ (AVX-512)."""
    library = _load()
    return library is not None and library.has_packed


def _load() -> _Library | None:
    with _LOCK:
        return _prepare()


@functools.cache
def _prepare() -> _Library | None:
    if jax.default_backend() != "cpu" or os.environ.get("JSPEC_NATIVE") == "0":
        return None
    try:
        name, library = fingerprint(), load_library()
    except (OSError, ValueError) as error:  # ValueError: no home folder, or quotes in $CXX
        message = "jspec: %s; XLA computes everything, and decoding takes longer"
        logging.getLogger("jspec").warning(message, error)
        return None
    library.jspec_has_packed.restype = ctypes.c_bool
    has_packed = library.jspec_has_packed()
    for function in _FUNCTIONS | (_PACKED if has_packed else {}):
        handler = jax.ffi.pycapsule(getattr(library, f"jspec_{function}"))
        jax.ffi.register_ffi_target(f"jspec_{function}", handler, platform="cpu")
    for has in (library.jspec_has_pairs, library.jspec_has_tiles):
        has.restype = ctypes.c_bool
    return _Library(name, library.jspec_has_pairs(), library.jspec_has_tiles(), has_packed)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def call(name: str, reference: Callable[..., Any], result: Result, *operands: Array) -> Any:
    """Returns what the reference returns, up to rounding, computed by a function in C++.

    The one exception is attention for a query that may see nothing: C++ returns zeros, the
    reference the mean of all values. Derivatives are the reference's.

    Args:
      name: of the C++ function, one of `_FUNCTIONS`.
      reference: the same function in JAX, for derivatives.
      result: shape and type of the result, or of each of several.
      *operands: the function's arguments.
    """
    return _call(name, result, *operands)


# Under jit, so that the call stays a function of its own: within a loop that also carries an empty
# array, XLA would lose the call's interface.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(name: str, result: Result, *operands: Array) -> Any:
    changed = _FUNCTIONS.get(name)
    aliases = None if changed is None else {changed: 0}
    function = jax.ffi.ffi_call(
        f"jspec_{name}", result, vmap_method="sequential", input_output_aliases=aliases
    )
    return function(*operands)


@call.defjvp
def _jvp(
    name: str,
    reference: Callable[..., Any],
    result: Result,
    operands: tuple[Array, ...],
    tangents: tuple[Any, ...],  # an integer operand's is no array of JAX, but NumPy's float0
) -> tuple[Any, Any]:
    """Differentiates the reference, which then computes the value as well."""
    return jax.jvp(reference, operands, tangents)
