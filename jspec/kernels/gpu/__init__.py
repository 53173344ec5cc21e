"""Kernels for a GPU in Pallas, of which eight compute a decoder block of few tokens.

    norm | q, k, v | rotation, cache write, attention | adding up | output | norm | gate, up | down

XLA starts about twenty. Where few tokens are computed, each kernel takes as long as it reads its
weights, a few microseconds, and starting it takes as long again.
"""

from jspec.kernels.gpu.block_attention import attend_block
from jspec.kernels.gpu.few_rows import ACTIVATIONS, few_rows_product
from jspec.kernels.gpu.launch import TILE
from jspec.kernels.gpu.normed_rows import normed_rows
from jspec.kernels.gpu.packed_weights import DECODED

__all__ = ["ACTIVATIONS", "DECODED", "TILE", "attend_block", "few_rows_product", "normed_rows"]
