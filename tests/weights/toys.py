"""Tiny models in every format and a tokenizer, for the tests of the weights; without pytest."""

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jspec.models.config import DecoderConfig, RopeScaling
from jspec.weights.quantize import is_quantizable, quantize
from jspec.weights.tensor_names import parameter_table

# Every field is off its default in at least one of them.
CONFIGS = {
    "grouped": DecoderConfig(
        vocab_size=37, embed_dim=24, hidden_dim=40, num_layers=3, num_heads=6, num_kv_heads=2,
        head_dim=10, max_seq_len=99, rope_theta=12_345.0, norm_epsilon=3e-6, qkv_bias=True,
        out_bias=True, mlp_bias=True, bos_id=3, eos_ids=(4, 5),
        rope_scaling=RopeScaling(5.0, 1.5, 3.5, 64),
    ),
    "multi-query": DecoderConfig(
        vocab_size=33, embed_dim=16, hidden_dim=24, num_layers=1, num_heads=4, num_kv_heads=1,
        head_dim=6, max_seq_len=64, tie_embeddings=True, mlp_bias=True,
    ),
    "multi-head": DecoderConfig(
        vocab_size=29, embed_dim=12, hidden_dim=20, num_layers=2, num_heads=3, num_kv_heads=3,
        head_dim=4, max_seq_len=32, qkv_bias=True, out_bias=True,
    ),
}  # fmt: skip

# Rows that divide into blocks of 32 values.
GGUF_CONFIG = DecoderConfig(
    vocab_size=40, embed_dim=64, hidden_dim=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, max_seq_len=77, rope_theta=5e5, norm_epsilon=2e-5, bos_id=1, eos_ids=(2, 3),
)  # fmt: skip

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def random_tensors(config, seed=0):
    rng = np.random.default_rng(seed)
    parts = [part for rule in parameter_table(config) for part in rule.parts]
    return {part.name: rng.normal(size=part.shape).astype(np.float32) for part in parts}


def unpack(config, params):
    leaves = flatten_dict(params)
    unpacked = [entry.unpack(np.asarray(leaves[entry.path])) for entry in parameter_table(config)]
    return {name: tensor for tensors in unpacked for name, tensor in tensors.items()}


def quantize_params(params, config, kind):
    leaves, dtype = flatten_dict(params), params["embedding"].dtype
    for entry in parameter_table(config):
        if is_quantizable(entry):
            leaves[entry.path] = quantize(leaves[entry.path], entry.path, kind, dtype)
    return unflatten_dict(leaves)


def gguf_name(name):
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[rest]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def interleave(rows, head_dim):
    """Returns rows in llama.cpp's order: 0, H/2, 1, H/2 + 1, … within each head."""
    order = [i for pair in zip(range(head_dim // 2), range(head_dim // 2, head_dim), strict=True)
             for i in pair]  # fmt: skip
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    return heads[:, order].reshape(rows.shape)


def byte_level_vocabulary():
    """Returns the 256 characters that stand for bytes in GPT-2's kind of vocabulary."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_gguf(path, config, tensors, kinds=(), metadata=(), tokens=None, extra=(), **options):
    """Writes a GGUF Llama.

    Args:
      path: the file.
      config: its shape.
      tensors: Hugging Face tensors.
      kinds: storage type by part of a tensor's GGUF name; float32 otherwise.
      metadata: keys that replace or (None) remove the usual ones.
      tokens: `tokenizer.ggml.` keys.
      extra: further tensors under their own names.
      **options: of the library's writer.
    """
    usual = {
        "llama.block_count": config.num_layers, "llama.context_length": config.max_seq_len,
        "llama.embedding_length": config.embed_dim,
        "llama.feed_forward_length": config.hidden_dim,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.norm_epsilon,
        "llama.rope.freq_base": config.rope_theta, "llama.rope.dimension_count": config.head_dim,
        "tokenizer.ggml.bos_token_id": config.bos_id,
        "tokenizer.ggml.eos_token_id": config.eos_ids[0],
        "tokenizer.ggml.eot_token_id": config.eos_ids[1],
    }  # fmt: skip
    settings = usual | dict(metadata) | {f"tokenizer.{k}": v for k, v in (tokens or {}).items()}
    stored = {}
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            tensor = interleave(tensor, config.head_dim)
        name = gguf_name(name)
        kind = next((kind for part, kind in dict(kinds).items() if part in name), None)
        stored[name] = tensor if tensor.ndim == 1 else stored_as(tensor, kind)
    architecture = settings.pop("general.architecture", "llama")
    write_gguf_file(path, architecture, settings, stored | dict(extra), **options)


def stored_as(tensor, kind):
    """Returns what a file of that storage type, None for float32, holds of a matrix."""
    import gguf

    if kind is None:
        return tensor
    if kind.name == "F16":
        return tensor.astype(np.float16)
    return gguf.quants.quantize(tensor, kind), kind


def write_gguf_file(path, architecture, fields, tensors, **options):
    """Writes fields, but for those that are None, and tensors: arrays, or blocks and their type."""
    import gguf  # which most tests do without

    writer = gguf.GGUFWriter(path, architecture, **options)
    adders = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in fields.items():
        if value is not None:
            getattr(writer, f"add_{adders[type(value)]}")(key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_backend(extra=(), special=("<s>", "</s>"), bos=None):
    """Returns byte-level BPE without merges: one token a byte, the special ones first."""
    names = [*special, *byte_level_vocabulary(), *extra]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in special])
    if bos:
        ids = [(bos, backend.token_to_id(bos))]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=ids
        )
    return backend
