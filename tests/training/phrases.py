"""A tiny target that was trained on a synthetic grammar, and what it says.

The grammar strings together phrases of four tokens. After each phrase comes one of two others, the
first of them four times out of five. What stands two or more tokens ahead can therefore be learned
from one hidden state, but never for certain. Now and then a token is smudged: another one stands in
its place, and the phrase goes on behind it. So the target has to look further back than one token,
which is what look-ahead embeddings need of it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspec.generation.generator import Generator
from jspec.generation.request import Request, Settings
from jspec.models import LlamaConfig, init_cache, init_params, make_apply
from jspec.training.texts import Batches, Text, iterate_rows, pack, split
from tests.tiny_models import make_model

CONFIG = LlamaConfig(
    vocab_size=64, embed_dim=32, hidden_dim=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_seq_len=200, eos_ids=(0,),
)  # fmt: skip
SEQ_LEN, BATCH = 64, 4
_PHRASE, _NUM_PHRASES, _FIRST_ID, _LIKELY = 4, 14, 4, 0.8
_SMUDGES, _SMUDGED = (60, 64), 0.15
_STEPS, _LENGTH = 400, 40
_LOSS = 1.1  # nats a token; a good deal of it is where smudges fall, and which


def sample_texts(num_texts, length, seed):
    """Returns texts of the grammar, [num_texts length]."""
    rng = np.random.default_rng(seed)
    likely = np.random.default_rng(9).permutation(_NUM_PHRASES)
    after = np.stack([likely, np.roll(likely, 3)])
    texts = np.zeros([num_texts, length + 2 * _PHRASE], np.int32)
    phrase = rng.integers(0, _NUM_PHRASES, num_texts)
    for begin in range(0, length + _PHRASE, _PHRASE):
        ids = _FIRST_ID + phrase[:, None] * _PHRASE + np.arange(_PHRASE)
        texts[:, begin : begin + _PHRASE] = ids
        phrase = after[(rng.random(num_texts) > _LIKELY).astype(int), phrase]
    starts = rng.integers(0, _PHRASE, num_texts)[:, None]
    texts = np.take_along_axis(texts, starts + np.arange(length), axis=1)
    smudges = rng.integers(*_SMUDGES, texts.shape)
    return np.where(rng.random(texts.shape) < _SMUDGED, smudges, texts).astype(np.int32)


@functools.cache
def target():
    """Returns the trained target, after checking that it has learned the grammar."""
    apply, optimizer = make_apply(CONFIG), optax.adam(1e-2)

    def loss(params, texts):
        cache = init_cache(CONFIG, batch_size=16, capacity=_LENGTH, dtype=jnp.float32)
        logits = apply(params, texts, cache)[0][:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:]).mean()

    @jax.jit
    def update(params, state, texts):
        value, grads = jax.value_and_grad(loss)(params, texts)
        changes, state = optimizer.update(grads, state)
        return optax.apply_updates(params, changes), state, value

    params = init_params(CONFIG, jax.random.key(0))
    state = optimizer.init(params)
    for step in range(_STEPS):
        params, state, value = update(params, state, sample_texts(16, _LENGTH, step))
    assert float(value) < _LOSS, f"the target has not learned the grammar: {value}"
    return make_model(CONFIG, params=params)


@functools.cache
def answers():
    """Returns what the target says, at temperature 1, to 80 beginnings of the grammar."""
    generator = Generator(target(), drafter="none", batch_size=16)
    settings = Settings(max_new_tokens=50, temperature=1.0)
    requests = [Request(text.tolist(), settings) for text in sample_texts(80, 6, 10**6)]
    return [
        Text(tuple(r.prompt_token_ids), tuple(r.token_ids)) for r in generator.generate(requests)
    ]


def batches_and_held_out():
    """Returns batches of 64 of the texts, and rows of the other 16."""
    training, held_out = split(answers(), 16)
    batches = Batches(training, batch_size=BATCH, seq_len=SEQ_LEN, seed=0)
    return batches, list(iterate_rows(pack(held_out, SEQ_LEN), BATCH))
