"""Trains a T5 of 3.6 million parameters, and a small one that drafts for it.

    python -m scripts.train_toy_t5 --output=runs/toy

The task is a toy translation. A text is 6 to 12 different words of 40. Its translation has them in
the order of the alphabet, each as one of two words of another language, the first with probability
0.7: greedy translations can be learned exactly, and drawn ones have 0.9 bits a word. In the output
folder are `target`, `draft` and `prompts.jsonl`; see configs/paper_t5.py.
"""

import json
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from absl import flags

from jspec.cli import program as cli
from jspec.common.errors import InputError, say
from jspec.common.typing import Params
from jspec.models import DecoderConfig, EncoderConfig, init_cache, make_apply
from jspec.models.encoder_decoder import encode, make_source
from jspec.weights import Tokenizer
from jspec.weights.hf import save_hf
from jspec.weights.tensor_names import parameter_table

_OUTPUT = flags.DEFINE_string("output", None, "Folder for the models and the prompts.")
_STEPS = flags.DEFINE_integer("num_steps", 400, "Updates of each model.")

_WORDS, _LEAST, _MOST, _BATCH = 40, 6, 12, 32
_FIRST = 0.7  # the probability of a word's first translation
_PAD, _EOS, _UNK = 0, 1, 2
_SOURCE, _TARGET = 3, 3 + _WORDS  # the first ids of the two languages
_VOCAB = _TARGET + 2 * _WORDS
_NUM_PROMPTS = 24


def make_config(width: int, num_layers: int) -> DecoderConfig:
    """Returns the config of a T5 1.1 of this width, with heads of 32."""
    heads, hidden_dim = width // 32, 2 * width
    encoder = EncoderConfig(num_layers, heads, 32, hidden_dim, 64, start_id=_PAD)
    return DecoderConfig(
        vocab_size=_VOCAB, embed_dim=width, hidden_dim=hidden_dim, num_layers=num_layers,
        num_heads=heads, num_kv_heads=heads, head_dim=32, max_seq_len=64, norm_epsilon=1e-6,
        tie_embeddings=False, eos_ids=(_EOS,), family="t5", activation="gelu_tanh",
        attention_scale=1.0, encoder=encoder,
    )  # fmt: skip


def make_params(config: DecoderConfig, seed: int) -> Params:
    """Returns random parameters; T5 does not scale its scores, so queries and keys are smaller."""
    rng, tree = np.random.default_rng(seed), {}
    for rule in parameter_table(config):
        *path, name = rule.path
        values = rng.normal(size=rule.shape) * config.embed_dim**-0.5
        if name == "scale":
            values = np.ones(rule.shape)
        elif name == "qkv":
            values *= config.head_dim**-0.25
        elif name == "embedding":
            values = rng.normal(size=rule.shape)
        leaf = tree
        for part in path:
            leaf = leaf.setdefault(part, {})
        leaf[name] = jnp.asarray(values, jnp.float32)
    return tree


def draw_pairs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns sources and translations, 0 where padded, and the sources' lengths."""
    sources, targets = np.zeros([2, _BATCH, _MOST + 1], np.int32)
    lengths = rng.integers(_LEAST, _MOST + 1, _BATCH)
    for source, target, length in zip(sources, targets, lengths, strict=True):
        words = rng.permutation(_WORDS)[:length]
        source[: length + 1] = [*(_SOURCE + words), _EOS]
        second = rng.uniform(size=length) >= _FIRST
        target[: length + 1] = [*(_TARGET + 2 * np.sort(words) + second), _EOS]
    return sources, targets, (lengths + 1).astype(np.int32)


def make_update(
    config: DecoderConfig, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[Params, optax.OptState, jax.Array]]:
    """Returns the jitted (params, state, sources, targets, lengths) -> params, state, loss."""
    apply = make_apply(config)

    def loss(
        params: Params, sources: jax.Array, targets: jax.Array, length: jax.Array
    ) -> jax.Array:
        outputs = encode(config, params, sources, length)
        cache = init_cache(config, batch_size=_BATCH, capacity=_MOST + 1, dtype=jnp.float32)
        cache = cache.replace(source=make_source(config, params, outputs, length, jnp.float32))
        read = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]  # begins with the id of padding
        logits, _, _ = apply(params, read, cache)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(losses * (targets != _PAD)) / jnp.sum(targets != _PAD)

    @jax.jit
    def update(params: Params, state: optax.OptState, *batch: jax.Array) -> tuple:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, value

    return update


def train(config: DecoderConfig, num_steps: int, seed: int) -> Params:
    """Returns trained parameters; says on standard error how training goes."""
    rng, params = np.random.default_rng(seed), make_params(config, seed)
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, num_steps // 10, num_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    update, state = make_update(config, optimizer), optimizer.init(params)
    for step in range(1, num_steps + 1):
        params, state, value = update(params, state, *draw_pairs(rng))
        if step % 100 == 0 or step == num_steps:
            say(f"step {step}: {value:.3f} nats a token")
    return params


def make_tokenizer() -> Tokenizer:
    """Returns a tokenizer of whole words: w0, w1, ... and a0, b0, a1, b1, ..."""
    words = ["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(_WORDS))]
    words += [f"{letter}{i}" for i in range(_WORDS) for letter in "ab"]
    ids = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, "<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", _EOS)]
    )
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"})


def main() -> None:
    """Trains both, and writes them."""
    if _OUTPUT.value is None:
        raise InputError("expected --output, a folder for the models and the prompts")
    folder, tokenizer = pathlib.Path(_OUTPUT.value), make_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    with jax.numpy_dtype_promotion("standard"):
        for name, width, num_layers in (("target", 192, 4), ("draft", 64, 1)):
            config = make_config(width, num_layers)
            params = train(config, _STEPS.value, seed=num_layers)
            count = sum(leaf.size for leaf in jax.tree.leaves(params))
            say(f"{name}: {count / 1e6:.2f} million parameters")
            save_hf(folder / name, config, params, tokenizer=tokenizer)
    rng = np.random.default_rng(99)
    prompts = [
        rng.permutation(_WORDS)[: rng.integers(_LEAST, _MOST + 1)] for _ in range(_NUM_PROMPTS)
    ]
    lines = [json.dumps({"prompt": " ".join(f"w{i}" for i in words)}) for words in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    cli.run_main(main)
