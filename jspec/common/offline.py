"""Whether jspec may use the network: `--offline`, or $JSPEC_OFFLINE=1, forbids it.

Nothing but models is ever fetched: see `weights.fetch` and `weights.resolver`.
"""

import os

from jspec.common.errors import InputError

_VARIABLE = "JSPEC_OFFLINE"


def forbid_network() -> None:
    """Forbids the network to this process and to those that it starts."""
    os.environ[_VARIABLE] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"  # which other libraries read, too


def is_offline() -> bool:
    """Returns whether the network is forbidden.

    Raises:
      InputError: the variable has another value than 0 or 1.
    """
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise InputError(f"expected {_VARIABLE} as 0 or 1, got {value!r}")
    return value == "1"
