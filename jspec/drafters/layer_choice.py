"""Which of the target's layers draft: the option, its text on the command line, and its default."""

import dataclasses
import itertools
import re
from collections.abc import Sequence

from jspec.common.errors import InputError, whole_number
from jspec.drafters.spec import ConfidenceOptions, option


def parse_layers(text: str) -> tuple[int, ...]:
    """Returns the layers of a list of numbers and ranges; those of one number are the first.

    Raises:
      InputError: something else, a range that falls, or no layer at all.
    """
    parts = [re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part) for part in text.split(",")]
    ranges = [(int(part[1]), int(part[2] or part[1])) for part in parts if part is not None]
    if len(ranges) < len(parts):
        raise InputError(
            "expected draft_layers as a number or a list like 0-5,28,29, with no number above "
            f"9999; got {text!r}"
        )
    falling = [f"{first}-{last}" for first, last in ranges if first > last]
    if falling:
        raise InputError(
            f"expected ranges of draft_layers from the lower to the higher, got {falling[0]!r}"
        )
    # A lone number is a count; in a list the same number is a layer.
    if text.isdigit():
        if int(text) == 0:
            raise InputError(f"expected draft_layers to be at least one layer, got {text!r}")
        return tuple(range(int(text)))
    return tuple(layer for first, last in ranges for layer in range(first, last + 1))


@dataclasses.dataclass(frozen=True)
class LayerSkipOptions(ConfidenceOptions):
    """Of `layer_skip`."""

    draft_layers: tuple[int, ...] | None = option(
        None,
        "The target's layers with which layer_skip drafts: a number takes the first of them, a "
        "list such as 0-5,28,29 takes those. Default: the first nine tenths.",
        parse=parse_layers,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_layers is None:
            return
        if not isinstance(self.draft_layers, tuple | list | range):
            raise InputError(
                f"expected draft_layers as a tuple of numbers, got {self.draft_layers!r}"
            )
        for layer in self.draft_layers:
            whole_number("draft_layers", layer)


def choose_layers(layers: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Returns the layers that draft: those asked for, else the first nine tenths, rounded down.

    Args:
      layers: None for the default.
      num_layers: of the target.

    Raises:
      InputError: layers that the target does not have, or not in their order.
    """
    if layers is None:
        # Measured with SmolLM2-135M, which was not trained for it, on answers of 32 tokens: the
        # first 27 of 30 layers keep 31 % of the drafts, 20 keep 10 %, 15 keep 5 %, and 20 with the
        # last two 0.5 %. Fewer layers cost less, but no other
        # choice kept as many drafts for its cost.
        return tuple(range(max(num_layers * 9 // 10, 1)))
    layers = tuple(layers)
    if any(not 0 <= layer < num_layers for layer in layers):
        listed = ",".join(map(str, layers))
        if layers == tuple(range(len(layers))):
            listed = f"the first {len(layers)}"
        raise InputError(
            f"expected draft_layers among the target's {num_layers}, from 0 to {num_layers - 1}; "
            f"got {listed}"
        )
    if not layers or any(low >= high for low, high in itertools.pairwise(layers)):
        listed = ",".join(map(str, layers)) or "none"
        raise InputError(f"expected draft_layers in rising order, at least one; got {listed}")
    return layers
