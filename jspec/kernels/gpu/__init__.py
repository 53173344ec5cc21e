"""A decoder block of few tokens in six kernels for a GPU, written in Pallas.

    norm, q, k, v | rotation, cache write, attention | adding up | output | gate, up | down

XLA starts about twenty. Where few tokens are computed, each kernel takes as long as it reads its
weights, a few microseconds, and starting it takes as long again.
"""

from jspec.kernels.gpu.block_attention import attend_block
from jspec.kernels.gpu.few_rows import few_rows_product, takes_kernel

__all__ = ["attend_block", "few_rows_product", "takes_kernel"]
