"""A pair of models about which the kind "predict" is asked."""

import dataclasses
import math

from jspec.common.cli import QUANTIZATIONS
from jspec.common.errors import InputError, check_among, check_range

DTYPES = ("bfloat16", "float32")
_MOST_DRAFTS = 4096
_SIDES = ("target", "draft")


@dataclasses.dataclass(frozen=True)
class PairSpec:
    """A pair of models about which the kind "predict" is asked; see `byte_model.predict_table`.

    Attributes:
      target: a preset, or a Hugging Face folder.
      draft: likewise.
      target_quantization: "none", "int8" or "int4".
      draft_quantization: likewise.
      target_bytes_per_weight: instead of what dtype and quantization say.
      draft_bytes_per_weight: likewise.
      dtype: of the floats.
      bandwidth: bytes of weights read in a second; None measures it here.
      flop_rate: floating-point operations in a second; likewise.
      context: tokens in the caches.
      batch_size: rows that run together.
      alphas: acceptances to look at.
      numbers: of drafts.
    """

    target: str = "llama3.2-3b"
    draft: str = "llama3.2-1b"
    target_quantization: str = "none"
    draft_quantization: str = "none"
    target_bytes_per_weight: float | None = None
    draft_bytes_per_weight: float | None = None
    dtype: str = "bfloat16"
    bandwidth: float | None = None
    flop_rate: float | None = None
    context: int = 1024
    batch_size: int = 1
    alphas: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    numbers: tuple[int, ...] = (1, 2, 3, 4, 5, 7)

    def check(self, name: str) -> None:
        """Checks the values; whether there are such models is seen when they are asked about.

        Args:
          name: of the pair, for messages.

        Raises:
          InputError: a value out of range; it says which field's.
        """
        for side in _SIDES:
            kind = getattr(self, f"{side}_quantization")
            check_among(f"{name}.{side}_quantization", kind, QUANTIZATIONS)
            if kind != "none" and getattr(self, f"{side}_bytes_per_weight") is not None:
                raise InputError(
                    f"expected {name}.{side}_bytes_per_weight or {side}_quantization, got both"
                )
        check_among(f"{name}.dtype", self.dtype, DTYPES)
        rates = [f"{side}_bytes_per_weight" for side in _SIDES] + ["bandwidth", "flop_rate"]
        for field in rates:
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"expected {name}.{field} above 0, and finite, got {value}")
        check_range(f"{name}.context", self.context, 0, 10**9)
        check_range(f"{name}.batch_size", self.batch_size, 1, 10**6)
        for field, most in (("alphas", 1), ("numbers", _MOST_DRAFTS)):
            values = getattr(self, field)
            if not values:
                raise InputError(f"expected {name}.{field} to have some, got none")
            for value in values:
                check_range(f"{name}.{field}", value, 0, most)
