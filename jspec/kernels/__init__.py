"""One function per operation that is worth more than XLA alone; the rest of jspec calls only these.

| operation | function | beside the XLA reference |
|---|---|---|
| product with a float or a quantised kernel | `product` | C++ on CPU |
| attention over a cache | `attend` | C++ on CPU, cuDNN on GPU |
| root-mean-square norm | `rms_norm` | C++ on CPU |
| rotary position embeddings | `rotate_heads` | C++ on CPU |
| SwiGLU gate | `swiglu` | C++ on CPU |
| cache write | `write_rows` | C++ on CPU |
| threshold of a top-k or top-p filter | `smallest_rank` | C++ on CPU |
| argmax | `first_argmax` | C++ on CPU |

Each lives in a file of its own, next to its reference. Nothing outside this package asks which
device or processor it runs on: what follows from that is answered here by purpose, too
(`prefill_widths`, `prefers_unrolled_loops`, `timed_products`, `describe_device`).
"""

from jspec.kernels.argmax import first_argmax
from jspec.kernels.attention import attend
from jspec.kernels.cache_write import TAIL, write_rows
from jspec.kernels.device import describe_device, prefers_unrolled_loops, timed_products
from jspec.kernels.gate import swiglu
from jspec.kernels.norm import rms_norm
from jspec.kernels.product import NARROW_CHUNK, Kernel, prefill_widths, product
from jspec.kernels.quantized import QuantizedKernel, quantized_rows
from jspec.kernels.rotation import apply_rope, rotate_heads
from jspec.kernels.threshold import smallest_rank

__all__ = [
    "NARROW_CHUNK",
    "TAIL",
    "Kernel",
    "QuantizedKernel",
    "apply_rope",
    "attend",
    "describe_device",
    "first_argmax",
    "prefers_unrolled_loops",
    "prefill_widths",
    "product",
    "quantized_rows",
    "rms_norm",
    "rotate_heads",
    "smallest_rank",
    "swiglu",
    "timed_products",
    "write_rows",
]
