"""A small probabilistic grammar, texts of it, and a tiny target that was trained on them.

Texts are ASCII, a token a letter: within a word there is little to guess, between words the grammar
leaves a choice. That is what a drafter has to learn.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspec.drafters import DrafterOptions
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.models import init_params
from jspec.training.loop import make_evaluate
from jspec.training.packing import Batches, iterate_rows, pack, packed_hidden
from jspec.training.texts import Text
from tests.tiny_models import CONFIG, make_model

SEQ_LEN = 64
PROMPT_LEN = 8
_SEED = 0
_NUM_STEPS, _RATE = 240, 2e-2

# What a symbol becomes, with odds; what is no key here is written as it is.
_RULES = {
    "text": [("sentence text", 1)],
    "sentence": [("things _ does .", 3), ("things _ acts _ things .", 5)],
    "things": [("the _ thing", 5), ("a _ thing", 2), ("the _ kind _ thing", 2)],
    "thing": [("cat", 4), ("dog", 3), ("bird", 2), ("teacher", 2), ("window", 1)],
    "kind": [("small", 3), ("quick", 2), ("yellow", 1)],
    "does": [("sleeps", 3), ("sings", 2), ("waits", 1)],
    "acts": [("sees", 3), ("follows", 2), ("remembers", 1)],
}


def write_text(rng, length):
    letters, waiting = "", ["text"]
    while len(letters) < length:
        symbol = waiting.pop(0)
        if symbol in _RULES:
            methods, odds = zip(*_RULES[symbol], strict=True)
            method = rng.choice(len(methods), p=np.array(odds) / sum(odds))
            waiting[:0] = methods[method].split()
        else:
            letters += {"_": " ", ".": ". "}.get(symbol, symbol)
    return letters[:length]


def grammar_texts(number, seed, length=SEQ_LEN):
    rng = np.random.default_rng([_SEED, seed])
    ids = [tuple(write_text(rng, length).encode()) for _ in range(number)]
    return [Text(one[:PROMPT_LEN], one[PROMPT_LEN:]) for one in ids]


def grammar_batches(batch_size):
    batches = Batches(grammar_texts(128, 2), batch_size=batch_size, seq_len=SEQ_LEN, seed=_SEED)
    return batches, list(iterate_rows(pack(grammar_texts(32, 3), SEQ_LEN), batch_size))


def metrics_before(trainee, batch_size):
    evaluate = make_evaluate(trainee.loss)
    return evaluate(trainee.params, trainee.frozen, grammar_batches(batch_size)[1])


@functools.cache
def grammar_target():
    """Returns a tiny Llama trained on 256 texts of the grammar, from scratch."""
    optimizer = optax.adamw(optax.cosine_decay_schedule(_RATE, _NUM_STEPS), weight_decay=0.01)

    def loss(params, rows):
        logits = packed_hidden(CONFIG, params, rows, jnp.float32) @ params["head"].T
        labels = jnp.asarray(rows.tokens)[:, 1:]  # a text fills its row
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], labels).mean()

    @jax.jit
    def update(params, state, rows):
        value, grads = jax.value_and_grad(loss)(params, rows)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, value

    with jax.numpy_dtype_promotion("standard"):
        params = init_params(CONFIG, jax.random.key(_SEED))
        state = optimizer.init(params)
        batches = Batches(grammar_texts(256, 1), batch_size=16, seq_len=SEQ_LEN, seed=_SEED)
        for step in range(_NUM_STEPS):
            params, state, value = update(params, state, batches[step])
    assert value < 0.4, f"the target has not learned the grammar: {value} nats a letter"
    return make_model(params=params)


def share_kept(target, drafter, head, num_draft_tokens=3):
    """Returns the share of a head's drafts that are kept; the text is plain decoding's."""
    settings = SamplingParams(max_new_tokens=40)
    requests = [Request(list(text.prompt), settings) for text in grammar_texts(8, 3)]
    plain = Generator(target, drafter="none", batch_size=8).generate(requests)
    results = Generator(
        target, drafter=drafter, num_draft_tokens=num_draft_tokens, batch_size=8,
        drafter_options=DrafterOptions(draft_head=str(head)),
    ).generate(requests)  # fmt: skip
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    kept = sum(result.stats.num_accepted for result in results)
    return kept / sum(result.stats.num_proposed for result in results)
