"""Whether a model's weights fit, asked before any of them is read."""

import numpy as np

from jspec.common.memory import check_memory
from jspec.models.config import LlamaConfig
from jspec.weights.quantize import num_bytes
from jspec.weights.rules import make_rules


def check_room(config: LlamaConfig, dtype: np.dtype, quantization: str | None) -> None:
    """Checks that the default device has room for the weights.

    Args:
      config: the model.
      dtype: of its floats.
      quantization: of its kernels; see `quantize.KINDS`.

    Raises:
      InputError: it has not.
    """
    size = sum(num_bytes(rule, quantization, dtype.itemsize) for rule in make_rules(config))
    check_memory({"weights": size}, "int8 or int4 weights, or a smaller model, take less")
