"""What acceptance rules promise, by their names."""

from jspec.speculation.acceptance import get_rule


def is_lossless_rule(name: str) -> bool:
    """Returns whether what a rule emits follows the target's distribution, at its temperatures.

    Args:
      name: see `jspec.speculation.acceptance.RULES`.

    Raises:
      InputError: no such rule.
    """
    return get_rule(name).is_lossless
