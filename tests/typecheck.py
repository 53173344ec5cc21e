"""The runtime type checker that pytest hangs on jspec's functions."""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, Self

import beartype
import jaxtyping

_jaxtyped = jaxtyping.jaxtyped
_checks_of_code = {}  # of local functions: by their code, see `decorate_once`


def decorate_once(*, typechecker: Callable) -> Callable:
    """Returns jaxtyping's decorator, which decorates a local function's code a single time.

    A function within another is a new one at each call of the other: to decorate each anew, which
    compiles two stubs and two checks, took a sixth of the time of tracing.
    """
    decorate = _jaxtyped(typechecker=typechecker)

    def decorator(fn: Any) -> Any:
        if "<locals>" not in fn.__qualname__ or not hasattr(fn, "__code__"):
            return decorate(fn)
        if fn.__code__ not in _checks_of_code:
            _checks_of_code[fn.__code__] = _checks_of(fn, decorate)
        check, calls = _checks_of_code[fn.__code__]

        @functools.wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            calls.fn = fn
            return check(*args, **kwargs)

        return checked

    return decorator


def _checks_of(fn: Callable, decorate: Callable) -> tuple[Callable, threading.local]:
    """Returns a decorated call of a function of that code, and where it looks for the function.

    Between the two lies only the check of the arguments, which calls no function of jspec's.
    """
    calls = threading.local()

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return calls.fn(*args, **kwargs)

    call.__signature__ = inspect.signature(fn)
    return decorate(call), calls


def check_function(fn: Callable) -> Callable:
    """Returns the function with its arguments and result checked by beartype.

    Constructors of dataclasses go unchecked: jax.tree.map rebuilds pytrees with stacked arrays or
    shapes for leaves, which a field's annotation rightly does not describe. `Self` means nothing to
    beartype outside of a class that it decorates itself.
    """
    if fn.__name__ == "__init__":
        return fn
    fn.__annotations__ = {
        name: Any if hint is Self else hint for name, hint in fn.__annotations__.items()
    }
    return beartype.beartype(fn)
