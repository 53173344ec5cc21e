"""Calls C++ where XLA on CPU is slow, or where a row's result would depend on its neighbours.

XLA on CPU reads the weights of a bfloat16 product at half the speed of memory, and at a tenth of it
for one row; its attention reads the whole buffer of a cache, which it writes row after row. The
sources here are compiled for the processor on first use and called through XLA's foreign function
interface. Where there is no C++ compiler, XLA computes everything.
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

_LOCK = threading.Lock()  # of the first call
# And which of its operands a function returns, changed in place.
_FUNCTIONS: dict[str, int | None] = {
    "product": None, "int8_product": None, "int4_product": None, "attention": None,
    "rms_norm": None, "rotate_heads": None, "swiglu": None, "smallest_rank": None,
    "first_argmax": None, "write_rows": 0,
}  # fmt: skip
Result: TypeAlias = jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]


class _Library(NamedTuple):
    """What was loaded.

    Attributes:
      name: its fingerprint.
      has_pairs: whether the processor multiplies bfloat16 numbers two by two.
      has_tiles: whether it multiplies them in tiles.
    """

    name: str
    has_pairs: bool
    has_tiles: bool


def is_available() -> bool:
    """Returns whether the library is there; builds it if it is not, and says why if it cannot.

    `JSPEC_NATIVE=0` in the environment leaves everything to XLA.
    """
    return _load() is not None


def version() -> str | None:
    """Returns the fingerprint of the library in use; None where XLA computes everything."""
    library = _load()
    return library and library.name


def has_pairs() -> bool:
    """Returns whether bfloat16 products of many rows are fast, too (AVX-512 BF16)."""
    library = _load()
    return library is not None and library.has_pairs


def has_tiles() -> bool:
    """Returns whether in bfloat16 a row costs the less the more rows there are (AMX)."""
    library = _load()
    return library is not None and library.has_tiles


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
    for function in _FUNCTIONS:
        handler = jax.ffi.pycapsule(getattr(library, f"jspec_{function}"))
        jax.ffi.register_ffi_target(f"jspec_{function}", handler, platform="cpu")
    for has in (library.jspec_has_pairs, library.jspec_has_tiles):
        has.restype = ctypes.c_bool
    return _Library(name, library.jspec_has_pairs(), library.jspec_has_tiles())


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def call(name: str, reference: Callable[..., Any], result: Result, *operands: Array) -> Any:
    """Returns what the reference returns for the operands, up to rounding; calls C++ for it.

    Only of a query that may see nothing does attention say something else: zeros, not the mean of
    all values. Where it is differentiated, the reference computes everything.

    Args:
      name: of the C++ function, one of `_FUNCTIONS`.
      reference: the same in JAX, for derivatives.
      result: shape and type of what is returned, or of each part of it.
      *operands: its arguments.
    """
    return _call(name, result, *operands)


# A function of its own, so that it is called: within a loop that also carries an empty array, XLA
# would lose the call's interface.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(name: str, result: Result, *operands: Array) -> Any:
    changed = _FUNCTIONS[name]
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
    tangents: tuple[Array, ...],
) -> tuple[Any, Any]:
    """Differentiates the reference, whose value comes with its derivative."""
    return jax.jvp(reference, operands, tangents)
