"""The shape of a Llama-family model, and the presets."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling of rotary embeddings (arXiv 2407.21783, section 3.2).

    Attributes:
      factor: what the lowest frequencies are divided by.
      low_freq_factor: wavelengths beyond `original_max_seq_len / low_freq_factor` are fully scaled.
      high_freq_factor: wavelengths below `original_max_seq_len / high_freq_factor` are untouched.
      original_max_seq_len: the context, in tokens, before the extension.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        if not self.factor > 0 or not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(f"rope scaling factors must be above 0, low below high, got {self}")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Everything that decides the computation of a Llama-family model.

    Attributes:
      vocab_size: rows of the embedding, padding included.
      embed_dim: width of the residual stream.
      hidden_dim: width of the feed-forward layer.
      num_layers: number of blocks.
      num_heads: query heads.
      num_kv_heads: key and value heads; divides `num_heads`.
      head_dim: width of one head, even.
      max_seq_len: the longest context, in tokens, that the model was made for.
      rope_theta: base of the rotary frequencies.
      rope_scaling: Llama 3's frequency scaling, or None.
      norm_epsilon: added to the mean square in RMSNorm.
      tie_embeddings: whether the head is the embedding.
      attention_bias: whether the four attention products have a bias.
      mlp_bias: whether the three feed-forward products have a bias.
      bos_id: the id that begins a text, or None.
      eos_ids: the ids that end one.
      num_experts: experts of a sparse feed-forward layer; 0 where all layers are dense.
      num_experts_per_token: how many of them compute each token.
      expert_dim: width of one expert.
      normalize_expert_weights: whether the weights of a token's experts are divided by their sum.
      dense_layers: the layers that are dense nevertheless.
    """

    vocab_size: int
    embed_dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_dim: int = 0
    normalize_expert_weights: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "hidden_dim", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_seq_len"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("rope_theta", "norm_epsilon"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a number above 0, got {value!r}")
        if not all(isinstance(token_id, int) for token_id in (*self.eos_ids, self.bos_id or 0)):
            got = f"{self.bos_id!r} and {self.eos_ids!r}"
            raise ValueError(f"bos_id and eos_ids must be whole numbers, got {got}")
        if self.num_heads % self.num_kv_heads:
            got = f"{self.num_heads} and {self.num_kv_heads}"
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {got}")
        if self.num_experts and not 1 <= self.num_experts_per_token <= self.num_experts:
            got = f"{self.num_experts_per_token} of {self.num_experts}"
            raise ValueError(f"each token needs at least one of the experts, got {got}")
        if self.num_experts and self.expert_dim < 1:
            raise ValueError(f"expert_dim must be at least 1, got {self.expert_dim}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    @property
    def num_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def is_sparse(self, layer: int) -> bool:
        """Returns whether a layer has experts."""
        return self.num_experts > 0 and layer not in self.dense_layers


_LLAMA3 = {
    "vocab_size": 128_256,
    "max_seq_len": 131_072,
    "rope_theta": 500_000.0,
    "norm_epsilon": 1e-5,
    "bos_id": 128_000,
    "eos_ids": (128_001, 128_008, 128_009),
}

# The published dimensions: config.json of meta-llama/Llama-3.2-1B-Instruct, -3B-Instruct,
# Llama-3.1-8B-Instruct, -70B-Instruct and HuggingFaceTB/SmolLM2-135M-Instruct.
PRESETS: Mapping[str, DecoderConfig] = {
    "llama3.2-1b": DecoderConfig(
        embed_dim=2048, hidden_dim=8192, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64,
        rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True, **_LLAMA3,
    ),
    "llama3.2-3b": DecoderConfig(
        embed_dim=3072, hidden_dim=8192, num_layers=28, num_heads=24, num_kv_heads=8, head_dim=128,
        rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True, **_LLAMA3,
    ),
    "llama3.1-8b": DecoderConfig(
        embed_dim=4096, hidden_dim=14_336, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, rope_scaling=RopeScaling(factor=8.0), **_LLAMA3,
    ),
    "llama3.1-70b": DecoderConfig(
        embed_dim=8192, hidden_dim=28_672, num_layers=80, num_heads=64, num_kv_heads=8,
        head_dim=128, rope_scaling=RopeScaling(factor=8.0), **_LLAMA3,
    ),
    "smollm2-135m": DecoderConfig(
        vocab_size=49_152, embed_dim=576, hidden_dim=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, max_seq_len=8192, rope_theta=100_000.0, norm_epsilon=1e-5,
        tie_embeddings=True, bos_id=1, eos_ids=(2,),
    ),
}  # fmt: skip


def get_preset(name: str) -> DecoderConfig:
    """Returns the preset of that name; raises ValueError if there is none."""
    if name not in PRESETS:
        raise ValueError(f"expected a preset among {', '.join(PRESETS)}; got {name!r}")
    return PRESETS[name]
