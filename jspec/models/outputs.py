"""The end of the decoder: the last norm, and the head that makes logits, for drafters' heads."""

from jaxtyping import Array, Float, Float32

from jspec.common.typing import Params
from jspec.kernels import Kernel
from jspec.models.config import LlamaConfig
from jspec.models.layers import RMSNorm


def normed_outputs(
    config: LlamaConfig, params: Params, outputs: Float[Array, "b t d"]
) -> Float32[Array, "b t d"]:
    """Returns the normed outputs, which a model's head reads.

    Args:
      config: the model's.
      params: the model's.
      outputs: the last layer's, [b t d].
    """
    norm = RMSNorm(config.norm_epsilon)
    return norm.apply({"params": params["final_norm"]}, outputs)  # type: ignore[return-value]


def head_kernel(config: LlamaConfig, params: Params) -> Kernel:
    """Returns a model's head, [v d]; where the two are tied, that is its embedding."""
    return params["embedding" if config.tie_embeddings else "head"]
