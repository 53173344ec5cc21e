"""One function per operation that is worth more than XLA alone; the rest of jspec calls only these.

Each is written in JAX, which is the reference. On CPU the C++ of `cpp/`
computes it instead where there is a compiler; on GPU attention has cuDNN besides, and what computes
a decoder block of few tokens is chosen by a trial (`contest`). Nothing outside this package asks
which device or processor it runs on: what follows from that is answered here by purpose, too
(`chunk_widths`, `is_as_fast_as_one`, `prefers_unrolled_loops`, `timed_products`,
`describe_device`).
"""

from jspec.kernels.attention import (
    TAIL,
    attend,
    attend_capped,
    reads_rows_in_place,
    write_rows,
)
from jspec.kernels.backend import (
    allow_one_graph,
    awaits_graph_trial,
    compiling_for,
    one_graph_options,
    row_major,
    run_options,
    trying_options,
)
from jspec.kernels.candidates import (
    Fallback,
    await_choices,
    choose_weights,
    chosen_kernels,
    compute_block,
    explained_failures,
)
from jspec.kernels.device import (
    check_device,
    describe_device,
    devices_per_memory,
    environment,
    is_as_fast_as_one,
    prefers_unrolled_loops,
    timed_products,
)
from jspec.kernels.layer import apply_rope, geglu, rms_norm, rotate_heads, swiglu
from jspec.kernels.loops import run_if, while_any
from jspec.kernels.packed import JoinedKernel, PackedKernel, has_fast_packed_products
from jspec.kernels.paged import PAGE, attend_gathered, attend_pages, write_pages
from jspec.kernels.product import (
    CHUNK,
    CompactKernel,
    Kernel,
    chunk_widths,
    grouped_product,
    product,
    table_rows,
    take_rows,
)
from jspec.kernels.quantized import QuantizedKernel
from jspec.kernels.split import (
    MODEL_AXIS,
    SplitKernel,
    SplitLogits,
    first_largest,
    own_part,
    own_part_of,
    whole,
    with_own_part,
)
from jspec.kernels.verdicts import Verdict, decide, sources_digest
from jspec.kernels.vocabulary import first_argmax, smallest_rank, zeros_if

__all__ = [
    "CHUNK",
    "MODEL_AXIS",
    "PAGE",
    "TAIL",
    "CompactKernel",
    "Fallback",
    "JoinedKernel",
    "Kernel",
    "PackedKernel",
    "QuantizedKernel",
    "SplitKernel",
    "SplitLogits",
    "Verdict",
    "allow_one_graph",
    "apply_rope",
    "attend",
    "attend_capped",
    "attend_gathered",
    "attend_pages",
    "await_choices",
    "awaits_graph_trial",
    "check_device",
    "choose_weights",
    "chosen_kernels",
    "chunk_widths",
    "compiling_for",
    "compute_block",
    "decide",
    "describe_device",
    "devices_per_memory",
    "environment",
    "explained_failures",
    "first_argmax",
    "first_largest",
    "geglu",
    "grouped_product",
    "has_fast_packed_products",
    "is_as_fast_as_one",
    "one_graph_options",
    "own_part",
    "own_part_of",
    "prefers_unrolled_loops",
    "product",
    "reads_rows_in_place",
    "rms_norm",
    "rotate_heads",
    "row_major",
    "run_if",
    "run_options",
    "smallest_rank",
    "sources_digest",
    "swiglu",
    "table_rows",
    "take_rows",
    "timed_products",
    "trying_options",
    "while_any",
    "whole",
    "with_own_part",
    "write_pages",
    "write_rows",
    "zeros_if",
]
