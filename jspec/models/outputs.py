"""What a model does with its last layer's output: the norm, and the head that makes logits."""

from jaxtyping import Array, Float, Float32

from jspec.common.typing import Params
from jspec.models.config import LlamaConfig
from jspec.models.layers import Kernel, RMSNorm


def normed_outputs(
    config: LlamaConfig, params: Params, outputs: Float[Array, "b t d"]
) -> Float32[Array, "b t d"]:
    """Returns what a model's head reads.

    Args:
      config: the model's.
      params: the model's.
      outputs: of its last layer, [b t d].
    """
    norm = RMSNorm(config.norm_epsilon)
    return norm.apply({"params": params["final_norm"]}, outputs)  # type: ignore[return-value]


def head_kernel(config: LlamaConfig, params: Params) -> Kernel:
    """Returns a model's head, [v d]: its embedding where the two are tied."""
    return params["embedding" if config.tie_embeddings else "head"]
