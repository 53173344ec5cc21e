"""The runtime type checker that pytest hangs on jspec's functions."""

from collections.abc import Callable
from typing import Any, Self

import beartype


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
