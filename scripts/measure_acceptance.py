"""Measures how often drafts of tables are kept, in theory and in fact.

`python scripts/measure_acceptance.py --draft_table=table.safetensors --drafters=unigram,bigram`

In theory: the target answers, and at every token of the answers the sum over the vocabulary of
min(target, draft) is taken (Leviathan et al., arXiv 2211.17192, Cor. 3.6). In fact: it answers once
more, one draft a round, and kept drafts are counted. Both follow the target's law, and their means
should agree within the intervals, which resample prompts.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from jspec import cli, provenance
from jspec.analysis.acceptance import expected_acceptance
from jspec.drafters import DrafterOptions, without_unread
from jspec.drafters.tables import bigram_logits, table_params, uniform_logits, unigram_logits
from jspec.errors import InputError, check_range
from jspec.generator import DEFAULT_TARGET, Generator
from jspec.json_lines import JsonLinesWriter
from jspec.models import init_cache, make_apply
from jspec.prompts import read_prompts
from jspec.request import Request, Settings
from jspec.typing import Params
from jspec.vocabulary import mask_padding, used_vocab_size
from jspec.weights.ngram_table import load_table
from jspec.weights.resolver import LoadedModel, load_model

_TARGET = flags.DEFINE_string("target", DEFAULT_TARGET, "The target.")
_DRAFT_TABLE = flags.DEFINE_string("draft_table", None, "Made by scripts/count_ngrams.py.")
_DRAFTERS = flags.DEFINE_list("drafters", ["unigram", "bigram", "random"], "Among these three.")
_PROMPTS_FILE = flags.DEFINE_string("prompts_file", "configs/prompts.jsonl", "JSONL.")
_NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 13, "Evenly spaced over the file.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Tokens of an answer.")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Of target and draft; above 0.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the weights.")
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write the results to this file.")
_PADDED_LENGTH = 128  # texts are padded to multiples of it: few programs
_NUM_SAMPLES = 2000

Law = Callable[[jax.Array], jax.Array]


def main() -> None:
    """Measures and prints; writes JSON."""
    check_range("num_prompts", _NUM_PROMPTS.value, 1, 10**6)
    if not _TEMPERATURE.value > 0:
        raise InputError(f"expected a temperature above 0, got {_TEMPERATURE.value}")
    output = JsonLinesWriter(_OUTPUT_JSON.value) if _OUTPUT_JSON.value else None
    texts = [one.text for one in read_prompts(_PROMPTS_FILE.value)]
    count = min(_NUM_PROMPTS.value, len(texts))
    texts = [texts[index * len(texts) // count] for index in range(count)]
    target = load_model(_TARGET.value, dtype=_DTYPE.value)
    plain = Generator(target, drafter="none")
    answers = [plain.generate(request) for request in make_requests(texts, first_seed=0)]
    pairs = [(answer.prompt_token_ids, answer.token_ids) for answer in answers]
    report = {}
    for name in _DRAFTERS.value:
        expected = expected_of(target, make_law(name, target), pairs)
        observed = observed_of(target, name, texts)
        report[name] = {"expected": mean_and_interval(*expected),
                        "observed": mean_and_interval(*observed)}  # fmt: skip
        line = (f"{key} {mean:.4f} [{low:.4f}, {high:.4f}]"
                for key, (mean, low, high) in report[name].items())  # fmt: skip
        print(f"{name}: {', '.join(line)}", flush=True)
    if output is not None:
        with output:
            values = {flag.name: flag.value for flag in _RECORDED}
            output.write(provenance.environment() | {"flags": values, "acceptance": report})


def make_requests(texts: Sequence[str], first_seed: int) -> list[Request]:
    """Returns the requests; each has a seed of its own."""
    settings = [
        Settings(
            max_new_tokens=_MAX_NEW_TOKENS.value,
            temperature=_TEMPERATURE.value,
            seed=first_seed + index,
        )
        for index in range(len(texts))
    ]
    return [Request(text, own) for text, own in zip(texts, settings, strict=True)]


def make_law(name: str, target: LoadedModel) -> Law:
    """Returns a function from tokens [n] to the table's law of what follows each, [n v].

    Raises:
      InputError: no such drafter.
    """
    laws = {"unigram": unigram_logits, "bigram": bigram_logits}
    size = target.config.vocab_size
    params: Params = None
    if name in laws:
        if _DRAFT_TABLE.value is None:
            raise InputError(f"expected --draft_table with {name}")
        table = load_table(
            _DRAFT_TABLE.value, tokenizer=target.tokenizer, vocab_size=used_vocab_size(target)
        )
        params = table_params(table, name)
        logits_of = laws[name]
    elif name == "random":
        logits_of = functools.partial(uniform_logits, vocab_size=used_vocab_size(target))
    else:
        raise InputError(f"expected drafters among unigram, bigram, random; got {name!r}")

    def law(tokens: jax.Array) -> jax.Array:
        # Behind the barrier a law that no token changes is not folded, slowly, at compile time.
        logits = jax.lax.optimization_barrier(logits_of(params, tokens)) / _TEMPERATURE.value
        probs = jax.nn.softmax(logits, axis=-1)
        return jnp.pad(probs, ((0, 0), (0, size - probs.shape[-1])))

    return law


def expected_of(
    target: LoadedModel, law: Law, pairs: Sequence[tuple[list[int], list[int]]]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sums of min(target, draft) over each answer's tokens, and how many they are."""
    apply = mask_padding(make_apply(target.config), target)
    dtype = target.params["embedding"].dtype

    @jax.jit
    def overlaps(params: Params, tokens: jax.Array) -> jax.Array:
        cache = init_cache(target.config, batch_size=1, capacity=tokens.shape[1], dtype=dtype)
        logits = apply(params, tokens, cache)[0][0]
        return expected_acceptance(jax.nn.softmax(logits / _TEMPERATURE.value), law(tokens[0]))

    sums, counts = [], []
    for prompt, answer in pairs:
        text = [*prompt, *answer]
        padded = np.zeros([1, -(-len(text) // _PADDED_LENGTH) * _PADDED_LENGTH], np.int32)
        padded[0, : len(text)] = text
        # The first token is the prefill's: drafts begin with the one after it.
        own = np.asarray(overlaps(target.params, padded))[len(prompt) : len(text) - 1]
        sums.append(own.sum())
        counts.append(len(own))
    return np.array(sums), np.array(counts)


def observed_of(
    target: LoadedModel, name: str, texts: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns kept and proposed drafts of each answer, one draft a round."""
    options = DrafterOptions(draft_table=_DRAFT_TABLE.value)
    generator = Generator(
        target,
        drafter=name,
        num_draft_tokens=1,
        drafter_options=without_unread(name, options),
    )
    stats = [generator.generate(one).stats for one in make_requests(texts, first_seed=10**6)]
    return np.array([s.num_accepted for s in stats]), np.array([s.num_proposed for s in stats])


def mean_and_interval(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float, float]:
    """Returns the ratio of the totals, and its 2.5th and 97.5th percentile over prompts."""
    rng = np.random.default_rng(0)
    picks = rng.integers(len(sums), size=[_NUM_SAMPLES, len(sums)])
    samples = sums[picks].sum(axis=1) / np.maximum(counts[picks].sum(axis=1), 1)
    low, high = np.percentile(samples, [2.5, 97.5])
    return float(sums.sum() / max(counts.sum(), 1)), float(low), float(high)


_RECORDED: tuple[Any, ...] = (_TARGET, _DRAFTERS, _NUM_PROMPTS, _MAX_NEW_TOKENS, _TEMPERATURE,
                              _DTYPE)  # fmt: skip


if __name__ == "__main__":
    cli.run_main(main)
