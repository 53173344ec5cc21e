"""Checks of `speculate` before anything runs: the two functions, the update, and the mesh.

Shapes, types and supports are read by tracing, which computes nothing.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array

from jspec.common.errors import InputError
from jspec.speculation.distributions import Distribution, draw

GUESSES_AXIS = "guesses"  # of a mesh

StepFn = Callable[[Any], Any]
UpdateFn = Callable[[Any, Any], Any]

# Of values that are not known while a function is traced; none is a subclass of another.
_NOT_TRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def is_pytree(value: Any) -> bool:
    """Returns whether a value is a pytree that JAX knows."""
    return not jax.tree_util.all_leaves([value])


def latest(state: Any, value: Any) -> Any:
    """Returns the value: the default `update`, for chains whose state is their last value."""
    del state
    return value


def check_key(rng_key: Any) -> None:
    """Raises an `InputError` unless this is one random key, of either kind."""
    kind = getattr(rng_key, "dtype", None)
    is_new = kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key)
    if (is_new and rng_key.ndim == 0) or (kind == jnp.uint32 and rng_key.ndim == 1):
        return
    got = repr(rng_key) if kind is None else f"{kind}{list(rng_key.shape)}"
    raise InputError(f"expected rng_key to be one key, such as jax.random.key(0), got {got}")


class _Step(NamedTuple):
    """What one function gives, as a message names it."""

    kind: type
    value: jax.ShapeDtypeStruct
    support: tuple[Any, ...]

    def __str__(self) -> str:
        support = "".join(f", {part}" for part in self.support if part)
        shape = ", ".join(map(str, self.value.shape))
        return f"{self.kind.__name__} of {self.value.dtype}[{shape}]{support}"


def check_functions(f: StepFn, g: StepFn, update: UpdateFn, state: Any) -> None:
    """Checks that f and g give distributions of like values, and that the state keeps its shape.

    Raises:
      InputError: they do not; the message says what came.
    """
    step_of_f, step_of_g = _read_step("f", f, state), _read_step("g", g, state)
    if step_of_f[1:] != step_of_g[1:]:
        raise InputError(
            "expected f and g to give distributions of one shape, type and support; f gives "
            f"{step_of_f}, g gives {step_of_g}"
        )
    with _tracing("update"):
        after = jax.eval_shape(update, state, step_of_g.value)
    (paths, kind), (others, kind_after) = map(jax.tree_util.tree_flatten_with_path, (state, after))
    if kind != kind_after:
        raise InputError(f"expected update to give a state of the form {kind}, got {kind_after}")
    whose = "the default update (the value is the next state)" if update is latest else "update"
    for (path, leaf), (_, leaf_after) in zip(paths, others, strict=True):
        if (leaf.shape, leaf.dtype) != (leaf_after.shape, leaf_after.dtype):
            raise InputError(
                f"expected {whose} to give {leaf.dtype}{list(leaf.shape)} for state"
                f"{jax.tree_util.keystr(path)}, got {leaf_after.dtype}{list(leaf_after.shape)}"
            )


@contextlib.contextmanager
def _tracing(name: str) -> Iterator[None]:
    """Says what a function must be if it asks for the value of what is traced."""
    try:
        yield
    except _NOT_TRACEABLE as error:  # the cause has the line
        raise InputError(
            f"expected {name} to be jax.numpy on traced arrays, such as jnp.where(x > 0, a, b) for "
            f"`a if x > 0 else b` and jnp.sin(x) for np.sin(x); got {type(error).__name__}"
        ) from error


def _read_step(name: str, function: StepFn, state: Any) -> _Step:
    seen: list[tuple[type, tuple[Any, ...]]] = []

    def run(state: Any, rng_key: Array) -> tuple[Array, Array]:
        distribution = function(state)
        if not isinstance(distribution, Distribution):
            kind = type(distribution).__name__
            if isinstance(distribution, Tracer):
                kind = f"an array, {distribution.dtype}{list(distribution.shape)}"
            raise InputError(
                f"expected {name} to give a distribution with sample and log_prob, got {kind}"
            )
        if not is_pytree(distribution):
            kind = type(distribution).__name__
            raise InputError(f"expected the {kind} of {name} to be a pytree: register the class")
        value = draw(distribution, rng_key)
        seen.append((type(distribution), _support_of(distribution)))
        return value, jnp.asarray(distribution.log_prob(value))

    with _tracing(name):
        value, log_prob = jax.eval_shape(run, state, jax.random.key(0))
    if log_prob.shape:
        raise InputError(
            f"expected log_prob of {name} to be one number for a whole value, got "
            f"{list(log_prob.shape)}"
        )
    kind, support = seen[-1]
    return _Step(kind, value, support)


def _support_of(distribution: Any) -> tuple[Any, ...]:
    """Returns what a distribution says of its values: a number of categories, a support."""
    count = getattr(distribution, "num_categories", None)
    support = getattr(distribution, "support", None)
    while inner := getattr(support, "base_constraint", None):  # numpyro's, of several numbers
        support = inner
    parts = vars(support).items() if hasattr(support, "__dict__") else ()
    ends = tuple(f"{key} {part}" for key, part in parts if isinstance(part, int | float))
    name = "" if support is None else type(support).__name__.lstrip("_")
    return (count and f"{count} categories", name, *ends)


def check_mesh(num_drafts: int) -> None:
    """Checks that the mesh around, if it has an axis for guesses, divides a round's states.

    Raises:
      InputError: it does not.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if GUESSES_AXIS in mesh.axis_names and (num_drafts + 1) % mesh.shape[GUESSES_AXIS]:
        raise InputError(
            f"expected num_drafts + 1 to be a multiple of the mesh's {mesh.shape[GUESSES_AXIS]} "
            f"devices for guesses, got {num_drafts} + 1"
        )
