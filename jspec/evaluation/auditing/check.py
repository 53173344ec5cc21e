"""The outcome of one check."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the audit.

    Attributes:
      name: what was checked.
      has_passed: whether it is as it should be.
      detail: what was found, in a few words.
      data: what was found, in numbers.
    """

    name: str
    has_passed: bool
    detail: str
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
