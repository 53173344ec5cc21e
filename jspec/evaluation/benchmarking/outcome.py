"""What every mode of the benchmark gives."""

from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """What has been measured by now.

    Attributes:
      record: plain values, for the JSON line.
      text: the table for the terminal; of the last outcome only.
    """

    record: dict[str, Any]
    text: str = ""
