"""Tiny random T5s and Whispers, as transformers makes and computes them, and as jspec reads them.

Every field that decides the computation is off its default, and the weights have opinions.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import transformers

from jspec.models import init_cache
from jspec.models.encoder_decoder import encode, make_source

VOCAB = 61
_STD = 0.3
_T5 = {
    "vocab_size": VOCAB, "d_model": 24, "d_kv": 10, "d_ff": 40, "num_layers": 3,
    "num_decoder_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 21, "layer_norm_epsilon": 3e-3,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 3,
    "eos_token_id": 2, "attn_implementation": "eager",
}  # fmt: skip
_WHISPER = {
    "vocab_size": VOCAB, "num_mel_bins": 8, "d_model": 24, "encoder_layers": 3,
    "encoder_attention_heads": 3, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 40, "encoder_ffn_dim": 36, "max_source_positions": 25,
    "max_target_positions": 40, "decoder_start_token_id": 28, "eos_token_id": 27,
    "pad_token_id": 27, "bos_token_id": 27, "suppress_tokens": [5], "begin_suppress_tokens": [6],
    "attn_implementation": "eager",
}  # fmt: skip
# By name: the class, the fields, and the tensors that transformers ties to others.
MODELS = {
    "t5 1.1": ("T5", _T5, ()),
    "t5": ("T5", _T5 | {"tie_word_embeddings": True, "feed_forward_proj": "relu"}, ("lm_head",)),
    "whisper": ("Whisper", _WHISPER, ("proj_out",)),
}
_COPIES = ("encoder.embed_tokens", "decoder.embed_tokens")


def make_checkpoint(name, folder, seed=0):
    torch = pytest.importorskip("torch")
    kind, fields, tied = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval().float()
    if kind == "T5" and not fields["tie_word_embeddings"]:  # which transformers 5 always ties
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB, fields["d_model"]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            noise = _STD * torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + noise if "norm.weight" in key else noise)
    left_out = {f"{key}.weight" for key in (*tied, *(_COPIES if kind == "T5" else ()))}
    tensors = {k: v.numpy().copy() for k, v in model.state_dict().items() if k not in left_out}
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(make_raw(name)))
    return model


def make_raw(name):
    """Returns a model's config.json."""
    kind, fields, _ = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**fields)
    raw = json.loads(config.to_json_string(use_diff=False))
    raw |= {"architectures": [f"{kind}ForConditionalGeneration"]}
    return raw | {key: fields[key] for key in ("tie_word_embeddings",) if key in fields}


def make_sources(name, seed=0):
    rng = np.random.default_rng(seed)
    if name == "whisper":
        return rng.normal(size=(2, 50, 8)).astype(np.float32), np.array([25, 25])
    return rng.integers(4, VOCAB, (2, 40)), np.array([40, 17])


def oracle_logits(model, name, source, length, tokens):
    import torch

    ids = torch.tensor(tokens)
    with torch.no_grad():
        if name == "whisper":
            spectrogram = torch.tensor(source).transpose(1, 2)
            return model(input_features=spectrogram, decoder_input_ids=ids).logits.numpy()
        mask = torch.tensor(np.arange(source.shape[1]) < length[:, None])
        return model(
            input_ids=torch.tensor(source), attention_mask=mask, decoder_input_ids=ids
        ).logits.numpy()


def read_sources(config, params, source, length, capacity=64):
    length = jnp.asarray(length, jnp.int32)
    outputs = encode(config, params, jnp.asarray(source), length)
    cache = init_cache(config, batch_size=len(source), capacity=capacity, dtype=jnp.float32)
    return cache.replace(source=make_source(config, params, outputs, length, jnp.float32))
