"""Calls C++ where XLA on CPU is slow: products, attention and cache writes of few tokens.

XLA on CPU reads the weights of a bfloat16 product at half the speed of memory, and at a tenth of it
for one row; its attention reads the whole buffer of a cache, which it writes row after row. The
sources here are compiled for the processor on first use and called through XLA's foreign function
interface. Where there is no C++ compiler, XLA computes everything.
"""

import functools
import logging
import os
import threading
from collections.abc import Callable

import jax
from jaxtyping import Array

from jspec.native.build import fingerprint, load_library

_LOCK = threading.Lock()  # of the first call
# And which of its operands a function returns, changed in place.
_FUNCTIONS: dict[str, int | None] = {"few_rows": None, "attention": None, "write_rows": 0}


def is_available() -> bool:
    """Returns whether the library is there; builds it if it is not, and says why if it cannot.

    `JSPEC_NATIVE=0` in the environment leaves everything to XLA.
    """
    return version() is not None


def version() -> str | None:
    """Returns the fingerprint of the library in use; None where XLA computes everything."""
    with _LOCK:
        return _prepare()


@functools.cache
def _prepare() -> str | None:
    if jax.default_backend() != "cpu" or os.environ.get("JSPEC_NATIVE") == "0":
        return None
    try:
        name, library = fingerprint(), load_library()
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody's home folder is known
        message = "jspec: %s; XLA computes everything, and decoding takes longer"
        logging.getLogger("jspec").warning(message, error)
        return None
    for function in _FUNCTIONS:
        handler = jax.ffi.pycapsule(getattr(library, f"jspec_{function}"))
        jax.ffi.register_ffi_target(f"jspec_{function}", handler, platform="cpu")
    return name


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def call(
    name: str, reference: Callable[..., Array], result: jax.ShapeDtypeStruct, *operands: Array
) -> Array:
    """Returns what the reference returns for the operands, up to rounding; calls C++ for it.

    Only of a query that may see nothing does attention say something else: zeros, not the mean of
    all values.

    Args:
      name: of the C++ function: few_rows, attention or write_rows.
      reference: the same in JAX, for derivatives.
      result: shape and type of what is returned.
      *operands: its arguments.
    """
    return _call(name, result, *operands)


# A function of its own, so that it is called: within a loop that also carries an empty array, XLA
# would lose the call's interface.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(name: str, result: jax.ShapeDtypeStruct, *operands: Array) -> Array:
    changed = _FUNCTIONS[name]
    aliases = None if changed is None else {changed: 0}
    function = jax.ffi.ffi_call(
        f"jspec_{name}", result, vmap_method="sequential", input_output_aliases=aliases
    )
    return function(*operands)


@call.defjvp
def _jvp(
    name: str,
    reference: Callable[..., Array],
    result: jax.ShapeDtypeStruct,
    operands: tuple[Array, ...],
    tangents: tuple[Array, ...],
) -> tuple[Array, Array]:
    return call(name, reference, result, *operands), jax.jvp(reference, operands, tangents)[1]
