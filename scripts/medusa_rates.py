"""Measures how often the tokens that Medusa's heads rank are kept, and writes it beside the heads.

python scripts/make_answers.py --prompts_file=PROMPTS.jsonl --output_json=answers.jsonl
python scripts/medusa_rates.py --draft_head=FOLDER --input=answers.jsonl

`--drafter=medusa --tree_depth=...` then drafts the tree that promises the most (arXiv 2401.10774,
section 2.3.3). Take answers of the target to prompts such as you expect, 20 at least.
"""

import functools
import pathlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from jspec.cli import program as cli
from jspec.common.errors import InputError
from jspec.common.json_lines import read_json_lines
from jspec.common.typing import Params
from jspec.drafters.medusa import NUM_RANKS, MedusaConfig, load_medusa, medusa_logits, save_rates
from jspec.models import DecoderConfig, init_cache, make_apply
from jspec.models.layers import normed_outputs
from jspec.weights.published import SMOLLM2
from jspec.weights.resolver import LoadedModel, load_model

_TARGET = flags.DEFINE_string("target", SMOLLM2, "The model that the heads were trained for.")
_HEAD = flags.DEFINE_string("draft_head", None, "Folder with the heads; the file is written there.")
_INPUT = flags.DEFINE_string("input", None, "Answers, as scripts/make_answers.py writes them.")
_WIDTH = 256  # texts are padded to multiples of it, so that few programs are compiled


def main() -> None:
    """Counts and writes."""
    if not _HEAD.value or not _INPUT.value:
        raise InputError("expected --draft_head and --input")
    target, folder = load_model(_TARGET.value), pathlib.Path(_HEAD.value)
    heads = load_medusa(folder, target.config)
    counts, totals = np.zeros([heads.config.num_heads, NUM_RANKS]), np.zeros(heads.config.num_heads)
    for tokens, begin in _answers(_INPUT.value, target.config.max_seq_len):
        ranked = ranked_tokens(target, heads.config, heads.params, tokens)
        add_counts(counts, totals, ranked, tokens, begin)
    if not totals.min():
        raise InputError(f"{_INPUT.value}: expected answers longer than there are heads, got none")
    rates = counts / totals[:, None]
    path = save_rates(folder, rates.tolist())
    for head, of_head in enumerate(rates):
        print(f"head {head}: " + " ".join(f"{rate:.3f}" for rate in of_head[:5]) + " ...")
    print(f"wrote {path}: {int(totals[0])} tokens")


def _answers(path: str, most: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields prompt and answer as ids, and the index at which the answer begins."""
    for where, record in read_json_lines(path, "the answers"):
        try:
            prompt, answer = record["prompt_token_ids"], record["token_ids"]
            tokens = np.asarray([*prompt, *answer], np.int32)
        except (KeyError, TypeError, ValueError):
            raise InputError(f"{where}: expected prompt_token_ids and token_ids") from None
        if prompt and len(tokens) <= most:
            yield tokens, len(prompt)


def ranked_tokens(
    target: LoadedModel, config: MedusaConfig, params: Params, tokens: np.ndarray
) -> np.ndarray:
    """Returns the best tokens of every head at every token of a text, [t h ranks]."""
    padded = np.zeros([1, -(-len(tokens) // _WIDTH) * _WIDTH], np.int32)
    padded[0, : len(tokens)] = tokens
    ranked = _ranked(target.config, config)(target.params, params, padded)
    return np.asarray(ranked)[: len(tokens)]


@functools.cache
def _ranked(target_config: DecoderConfig, config: MedusaConfig) -> Callable[..., jax.Array]:
    apply, last = make_apply(target_config), (target_config.num_layers,)

    @jax.jit
    def run(target_params: Params, params: Params, tokens: jax.Array) -> jax.Array:
        dtype = target_params["embedding"].dtype
        size = {"batch_size": 1, "capacity": tokens.shape[1], "dtype": dtype}
        _, hidden, _ = apply(
            target_params, tokens, init_cache(target_config, **size), hidden_layers=last
        )
        hidden = normed_outputs(target_config, target_params, hidden[:, :, 0])
        best = [
            jax.lax.top_k(medusa_logits(config, params[f"head_{i}"], hidden)[0], NUM_RANKS)[1]
            for i in range(config.num_heads)
        ]
        return jnp.stack(best, axis=1)

    return run


def add_counts(
    counts: np.ndarray, totals: np.ndarray, ranked: np.ndarray, tokens: np.ndarray, begin: int
) -> None:
    """Adds what a text says: head i at a token is asked for the token i + 2 places after it."""
    for head in range(len(totals)):
        at = np.arange(begin - 1, len(tokens) - head - 2)
        counts[head] += (ranked[at, head] == tokens[at + head + 2, None]).sum(axis=0)
        totals[head] += len(at)


if __name__ == "__main__":
    cli.run_main(main)
