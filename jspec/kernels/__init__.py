"""What XLA on CPU does too slowly, in C++ that is compiled on first use."""

from jspec.kernels.library import call, has_pairs, has_tiles, is_available, version

__all__ = ["call", "has_pairs", "has_tiles", "is_available", "version"]
