"""One measured part of a roofline, and the table of all of them."""

from typing import Any, NamedTuple, Self

from jspec.common.text_table import format_table, number_cell
from jspec.evaluation.analysis.call_cost import Machine

_SLOWED = "a share above 100 %: the machine was slower while its limit was measured"


class Line(NamedTuple):
    """One measured part; what does not apply to it is None.

    Attributes:
      name: what it is.
      seconds: measured.
      num_bytes: read and written at least.
      operations: done at least.
      least_seconds: that these take.
      ratio: of the seconds to those of the model's call on one token, or of a round's to those of a
        plain step, measured by turns.
      expected_ratio: predicted from the parts.
      product_seconds: of its products.
      attention_seconds: of its attention.
      elementwise_seconds: of its norms, rotations, gates and choice.
    """

    name: str
    seconds: float
    num_bytes: float | None = None
    operations: float | None = None
    least_seconds: float | None = None
    ratio: float | None = None
    expected_ratio: float | None = None
    product_seconds: float | None = None
    attention_seconds: float | None = None
    elementwise_seconds: float | None = None

    def on(self, machine: Machine) -> Self:
        """Returns the line with the least seconds that a machine needs."""
        if self.num_bytes is None or self.operations is None:
            return self
        least = max(self.num_bytes / machine.bandwidth, self.operations / machine.flop_rate)
        return self._replace(least_seconds=least)

    @property
    def share(self) -> float | None:
        """The least time, as a part of the measured one."""
        return None if self.least_seconds is None else self.least_seconds / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return self._asdict() | {"share": self.share}


def format_lines(lines: list[Line], machine: Machine) -> str:
    """Returns a table of the lines, under the machine's rates."""
    columns = ["", "MB", "GFLOP", "least ms", "measured ms", "share", "products", "attention",
               "elementwise", "calls on 1", "predicted"]  # fmt: skip
    rows = [
        [
            line.name,
            number_cell(line.num_bytes, ".1f", 1e-6),
            number_cell(line.operations, ".2f", 1e-9),
            number_cell(line.least_seconds, ".2f", 1e3),
            number_cell(line.seconds, ".3f", 1e3),
            number_cell(line.share, ".0%"),
            number_cell(line.product_seconds, ".2f", 1e3),
            number_cell(line.attention_seconds, ".2f", 1e3),
            number_cell(line.elementwise_seconds, ".2f", 1e3),
            number_cell(line.ratio, ".2f"),
            number_cell(line.expected_ratio, ".2f"),
        ]
        for line in lines
    ]
    rates = (
        f"{machine.bandwidth / 1e9:.1f} GB/s and {machine.flop_rate / 1e9:.0f} GFLOP/s by the "
        "products of this program"
    )
    is_slowed = any(line.share is not None and line.share > 1 for line in lines)
    return "\n".join([rates, format_table(columns, rows), *[_SLOWED] * is_slowed])
