"""The values of flags that several programs share."""

from jspec.common.errors import InputError
from jspec.weights.quantize import KINDS, PACKED_KINDS

QUANTIZATIONS = ("none", *KINDS, *PACKED_KINDS)
QUANTIZATION_FLAG = ("auto", *QUANTIZATIONS)  # auto: see `load_model`


def parse_num_draft_tokens(text: str) -> int | str:
    """Returns the number of draft tokens that a flag's text asks for, or "auto".

    Raises:
      InputError: the text is neither.
    """
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"expected num_draft_tokens to be a whole number or auto, got {text!r}"
        ) from None


def parse_quantization(text: str) -> str | None:
    """Returns `load_model`'s quantization for one of QUANTIZATION_FLAG."""
    return None if text == "auto" else text
