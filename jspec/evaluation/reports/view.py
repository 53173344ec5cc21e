"""What all figures of a scene say alike."""

from typing import NamedTuple


class View(NamedTuple):
    """Where and against what a figure's numbers were measured.

    Attributes:
      suffix: of its files' names, "" or "-" and something unique.
      where: the setting, for the caption.
      base: what speed-ups compare with.
    """

    suffix: str
    where: str
    base: str = "plain decoding"

    @property
    def speedup_axis(self) -> str:
        """The label of an axis of speed-ups."""
        return f"speed-up (times {self.base.replace('`', '')})"
