"""The settings of rotary embeddings that are scaled for longer contexts, and checks of numbers."""

import dataclasses
from collections.abc import Iterable

# Llama 3 (arXiv 2407.21783, section 3.2), position interpolation (2306.15595), NTK by length, YaRN
# (2309.00071) and LongRoPE (2402.13753). Dynamic and longrope change their frequencies with the
# length of the text, which would change keys that are cached already. Up to the original context
# they do not, so jspec limits the context to that.
ROPE_KINDS = ("llama3", "linear", "dynamic", "yarn", "longrope")
MAX_FLOAT = 3.4e38  # of float32, in which models compute
MAX_SIZE = 1 << 24  # products of three sizes still fit into 64 bits


def check_numbers(owner: object, names: Iterable[str]) -> None:
    """Checks that these fields are finite numbers above 0; raises ValueError."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int | float) or not 0 < value < MAX_FLOAT:
            raise ValueError(f"{name} must be a finite number above 0, got {value!r}")


def check_whole(owner: object, names: Iterable[str], least: int) -> None:
    """Checks that these fields are whole numbers of at least that; raises ValueError."""
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if value > MAX_SIZE:
            raise ValueError(f"{name} must be at most {MAX_SIZE}, got {value}")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary embeddings reach further than the context that a model was first trained on.

    Attributes:
      factor: what the lowest frequencies are divided by.
      low_freq_factor: llama3 scales wavelengths beyond `original_max_seq_len / low_freq_factor`
        fully.
      high_freq_factor: and leaves those below `original_max_seq_len / high_freq_factor` alone.
      original_max_seq_len: the context, in tokens, before the extension.
      kind: one of `ROPE_KINDS`.
      attention_factor: multiplies cosines and sines.
      beta_fast: yarn leaves frequencies alone that turn this often in the original context.
      beta_slow: and fully scales those that turn less often than this.
      short_factors: longrope's divisor of every frequency within the original context.
      long_factors: and beyond it; kept only to be written again.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    kind: str = "llama3"
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(
                f"expected a rope type among {', '.join(ROPE_KINDS)}, got {self.kind!r}"
            )
        check_numbers(self, ("factor", "low_freq_factor", "high_freq_factor", "attention_factor",
                             "original_max_seq_len", "beta_fast", "beta_slow"))  # fmt: skip
        if not self.low_freq_factor < self.high_freq_factor:
            got = f"{self.low_freq_factor} and {self.high_freq_factor}"
            raise ValueError(f"low_freq_factor must be below high_freq_factor, got {got}")
        if wrong := [x for x in (*self.short_factors, *self.long_factors) if not 0 < x < MAX_FLOAT]:
            raise ValueError(f"factors of longrope must be finite and above 0, got {wrong[0]!r}")
