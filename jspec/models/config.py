"""Everything that decides what a decoder computes: its config, the scaling of RoPE, and presets."""

import dataclasses
from collections.abc import Iterable, Mapping

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


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """What an encoder-decoder has besides its decoder; see `models.encoder_decoder`.

    Attributes:
      num_layers: blocks of the encoder, as wide as the decoder's.
      num_heads: heads of its attention.
      head_dim: width of one of them.
      hidden_dim: width of its feed-forward layers.
      max_len: the longest source that it reads, in tokens or, of sound, in outputs of 20 ms.
      start_id: the token with which the decoder's text begins.
      num_mels: bands of the spectrogram that it reads; 0 where it reads a text.
      num_buckets: of relative positions in attention, where it reads a text.
      max_distance: relative positions from this on share a bucket.
      is_gated: whether feed-forward layers have a gate.
      never_ids: tokens that no transcript has.
      never_first_ids: tokens with which none begins.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    hidden_dim: int
    max_len: int
    start_id: int = 0
    num_mels: int = 0
    num_buckets: int = 32
    max_distance: int = 128
    is_gated: bool = True
    never_ids: tuple[int, ...] = ()
    never_first_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = "num_layers", "num_heads", "head_dim", "hidden_dim", "max_len", "max_distance"
        check_whole(self, sizes, least=1)
        check_whole(self, ("start_id", "num_mels"), least=0)
        check_whole(self, ("num_buckets",), least=4)  # half of a half are exact
        if self.max_distance <= self.num_buckets // 2:
            more = f"max_distance above {self.num_buckets // 2}, half of the buckets"
            raise ValueError(f"expected {more}, got {self.max_distance}")
        if not isinstance(self.is_gated, bool):
            raise ValueError(f"is_gated must be true or false, got {self.is_gated!r}")
        if wrong := [i for i in (*self.never_ids, *self.never_first_ids) if type(i) is not int]:
            raise ValueError(f"suppressed tokens must be whole numbers, got {wrong[0]!r}")

    @property
    def is_audio(self) -> bool:
        """Whether it hears. If so, norms have means, products biases, and positions embeddings."""
        return self.num_mels > 0


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Everything that decides the computation of a decoder. The defaults are those of a Llama.

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
      head_size: outputs of a head of its own; None if it has one for each id.
      qkv_bias: whether queries, keys and values have a bias.
      out_bias: whether the attention's output has a bias.
      mlp_bias: whether the three feed-forward products have a bias.
      bos_id: the id that begins a text, or None.
      eos_ids: the ids that end a text.
      family: what the checkpoint calls its `model_type`; see `models.families`.
      activation: of the feed-forward layer, "silu" or "gelu_tanh"; of an encoder-decoder "relu",
        "gelu" or "gelu_tanh".
      norms: where a layer has norms: "pre", before attention and feed-forward; "post", after them;
        or "both".
      qk_norm: "head" norms each query and key head apart, "full" all heads together; None neither.
      window: in windowed layers a token sees this many tokens, itself included; None for no window.
      windowed_layers: the layers that have the window.
      local_rope_theta: base of the rotary frequencies in windowed layers, without scaling; None
        for the same as in the others.
      unrotated_layers: the layers without rotary embeddings.
      embedding_scale: multiplies the embeddings.
      residual_scale: multiplies what each half of a layer adds to the residual stream.
      attention_scale: multiplies the scores of attention; None for head_dim^-1/2.
      attention_softcap: c of c · tanh(scores / c); None for none.
      logits_scale: multiplies the logits.
      logits_softcap: c of c · tanh(logits / c); None for none.
      num_experts: experts of a sparse feed-forward layer; 0 where all layers are dense.
      num_experts_per_token: how many of them compute each token.
      expert_dim: width of one expert.
      normalize_expert_weights: whether the weights of a token's experts are divided by their sum.
      dense_layers: the layers that are dense nevertheless.
      num_mtp_layers: layers after the last one that predict the token after the next; 0 or 1.
      encoder: what an encoder-decoder has besides; None for a decoder alone.
      num_shards: devices that share each layer. Heads and hidden units are then those of one device
        (`sharding.shard_config`); all else is the whole model's.
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
    head_size: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    family: str = "llama"
    activation: str = "silu"
    norms: str = "pre"
    qk_norm: str | None = None
    window: int | None = None
    windowed_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    unrotated_layers: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_dim: int = 0
    normalize_expert_weights: bool = True
    dense_layers: tuple[int, ...] = ()
    num_mtp_layers: int = 0
    encoder: EncoderConfig | None = None
    num_shards: int = dataclasses.field(default=1, repr=False)

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "embed_dim", "hidden_dim", "num_layers", "num_heads",
                 "num_kv_heads", "head_dim", "max_seq_len")  # fmt: skip
        check_whole(self, sizes if self.window is None else (*sizes, "window"), least=1)
        check_whole(self, ("num_experts", "num_experts_per_token", "expert_dim"), least=0)
        given = [name for name in _OPTIONAL_NUMBERS if getattr(self, name) is not None]
        check_numbers(self, ("rope_theta", "norm_epsilon", *given))
        if not isinstance(self.normalize_expert_weights, bool):
            got = repr(self.normalize_expert_weights)
            raise ValueError(f"normalize_expert_weights must be true or false, got {got}")
        ids = self.eos_ids if self.bos_id is None else (*self.eos_ids, self.bos_id)
        if not all(isinstance(token_id, int) for token_id in ids):
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
        if self.rope_scaling is not None and self.rope_scaling.kind == "longrope":
            half = self.head_dim // 2
            for factors in (self.rope_scaling.short_factors, self.rope_scaling.long_factors):
                if len(factors) != half:
                    raise ValueError(f"expected {half} factors of longrope, got {len(factors)}")

    def __repr__(self) -> str:
        """Returns what differs from a Llama's defaults."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        changed = [f"{name}={value!r}" for name, value in named.items() if value != usual[name]]
        return f"DecoderConfig({', '.join(changed)})"

    @property
    def num_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def as_llama(self) -> "DecoderConfig":
        """Returns a Llama's config of the same shape, as layers of trained heads have it."""
        fields = dataclasses.fields(self)
        start = next(i for i, field in enumerate(fields) if field.name == "family")
        defaults = {field.name: field.default for field in fields[start:]}
        return dataclasses.replace(self, **defaults, qkv_bias=self.out_bias)

    def is_sparse(self, layer: int) -> bool:
        """Returns whether a layer has experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    def window_of(self, layer: int) -> int | None:
        """Returns how many tokens a token sees in a layer; None for all before it."""
        return self.window if layer in self.windowed_layers else None

    def rope_of(self, layer: int) -> str:
        """Returns which rotary angles a layer has: "none", "local" or "global"."""
        if layer in self.unrotated_layers:
            return "none"
        is_local = self.local_rope_theta is not None and layer in self.windowed_layers
        return "local" if is_local else "global"


_OPTIONAL_NUMBERS = (
    "embedding_scale", "residual_scale", "logits_scale", "local_rope_theta",
    "attention_scale", "attention_softcap", "logits_softcap",
)  # fmt: skip
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
