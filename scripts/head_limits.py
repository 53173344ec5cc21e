"""What limits a head of EAGLE-3: how often the target's next token is among the head's best ones.

python scripts/make_answers.py --prompts_file=PROMPTS.jsonl --output_json=answers.jsonl
python scripts/head_limits.py --answers=answers.jsonl

The answers are the target's own greedy ones. Draft s of a chain follows drafts that were right: the
text's tokens, with the head's own outputs as features. For each draft it prints the share of places
whose token the head can propose at all, and is among its best 1, 2, 4 and 8. The last line has the
tokens of a target call that follow: for the best 1 those of a chain, for more those of a tree with
as many branches at every draft, which no head can surpass that ranks tokens like this one.

These are means over all places. Rounds of greedy decoding begin only where the round before has
ended, which is more often where drafts are wrong: a line below the table has their tokens a call.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Array, Float32

from jspec.cli import program as cli
from jspec.common.errors import InputError
from jspec.common.text_table import format_table
from jspec.common.typing import Params
from jspec.drafters.eagle_head import LoadedHead, load_eagle
from jspec.drafters.head_folder import find_head, shipped_head
from jspec.kernels.quantized import QuantizedKernel
from jspec.models.layers import linear
from jspec.training.eagle_unroll import unroll
from jspec.training.packing import Rows, iterate_rows, pack, shift_left
from jspec.training.target_states import target_states
from jspec.training.texts import read_texts
from jspec.weights.published import SMOLLM2
from jspec.weights.quantize import dequantize
from jspec.weights.resolver import LoadedModel, load_model

_TARGET = flags.DEFINE_string("target", SMOLLM2, "The model that answered.")
_DRAFT_HEAD = flags.DEFINE_string(
    "draft_head", None, "Folder with the head. Default: the one that comes with jspec."
)
_ANSWERS = flags.DEFINE_string(
    "answers", None, "File that scripts/make_answers.py wrote.", required=True
)
_NUM_DRAFT_TOKENS = flags.DEFINE_integer("num_draft_tokens", 5, "Drafts of a chain.", lower_bound=1)
_SEQ_LEN = flags.DEFINE_integer("seq_len", 1024, "Tokens of a text that are read.", lower_bound=8)
_BEST = 1, 2, 4, 8


def main() -> None:
    """Prints the table."""
    target = load_model(_TARGET.value)
    name = _DRAFT_HEAD.value or shipped_head("eagle", target.name)
    if name is None:
        raise InputError(f"expected --draft_head: jspec has no head for {target.name}")
    head = _in_floats(load_eagle(find_head(name), target.config, jnp.float32))
    texts = read_texts(
        _ANSWERS.value, target.tokenizer,
        vocab_size=target.config.vocab_size, seq_len=_SEQ_LEN.value,
    )  # fmt: skip
    count = jax.jit(
        lambda own, theirs, rows: _count(head._replace(params=own), target, theirs, rows)
    )
    number = _NUM_DRAFT_TOKENS.value
    total, decoded = np.zeros([number, 2 * len(_BEST) + 3]), np.zeros([number, 2], int)
    for rows in iterate_rows(pack(texts, _SEQ_LEN.value), 1):
        counts, kept = map(np.asarray, count(head.params, target.params, rows))
        total += counts
        begun = np.where(np.asarray(rows.is_scored(2)), rows.text, 0)
        decoded += sum(_decode(kept[begun == text]) for text in np.unique(begun[begun > 0]))
    print(_table(total))
    shown = [
        f"{tokens / max(calls, 1):.2f} with {most}"
        for most, (tokens, calls) in enumerate(decoded, 1)
    ]
    print(f"tokens a call of greedy decoding: {', '.join(shown)} drafts")


def _in_floats(head: LoadedHead) -> LoadedHead:
    params = jax.tree.map(
        lambda leaf: dequantize(leaf) if isinstance(leaf, QuantizedKernel) else leaf,
        head.params,
        is_leaf=lambda leaf: isinstance(leaf, QuantizedKernel),
    )
    return head._replace(params=params)


def _decode(kept: np.ndarray) -> np.ndarray:
    """Returns tokens and calls of an answer's rounds with 1 draft, with 2 and so on, [w 2].

    `kept` are the drafts that are right in a row at each place, [n]. The prefill gives the answer's
    first token, so that the first round begins at place 1.
    """
    found = []
    for most in range(1, _NUM_DRAFT_TOKENS.value + 1):
        place, calls = 1, 0
        while place < len(kept):
            place, calls = place + min(int(kept[place]), most) + 1, calls + 1
        found.append((max(len(kept) - 1, 0), calls))
    return np.array(found)


def _count(
    head: LoadedHead, target: LoadedModel, theirs: Params, rows: Rows
) -> tuple[Array, Array]:
    """Returns, of each draft, the places, those reachable, those among the best, and chains.

    And how many first choices in a row are right at each place, [r t].
    """
    ids = head.params["ids"]
    layers = (*head.config.feature_layers, target.config.num_layers)
    states = target_states(target.config, theirs, rows, ids, layers)
    number = _NUM_DRAFT_TOKENS.value
    outputs = unroll(head.config, head.params, rows, states, number)
    tokens = jnp.asarray(rows.tokens)
    begun, lines = rows.is_scored(2), []
    is_alive = jnp.broadcast_to(begun, (len(_BEST), *begun.shape))
    kept = jnp.zeros(begun.shape, jnp.int32)
    for step in range(number):
        token, is_scored = shift_left(tokens, 2 + step), rows.is_scored(2 + step)
        place = jnp.searchsorted(ids, token)
        is_known = is_scored & (ids[jnp.minimum(place, len(ids) - 1)] == token)
        rank = _rank(linear(outputs[step], head.params["head"]["head"]), place)
        hits = jnp.stack([is_known & (rank < best) for best in _BEST])
        is_alive &= hits
        kept += is_alive[0]
        flags_ = [is_scored, is_known, *hits, begun, *is_alive]
        lines.append(jnp.stack([jnp.sum(flag, dtype=jnp.int32) for flag in flags_]))
    return jnp.stack(lines), kept


def _rank(logits: Float32[Array, "r t u"], place: Array) -> Array:
    """Returns how many tokens are likelier than that at `place`, [r t]."""
    own = jnp.take_along_axis(logits, place[..., None], axis=-1)
    return jnp.sum(logits > own, axis=-1)


def _table(total: np.ndarray) -> str:
    num = len(_BEST)
    lines = []
    for step, (places, *counts) in enumerate(total[:, : num + 2]):
        shares = [f"{count / places:.3f}" for count in counts]
        lines.append([f"draft {step + 1}", f"{int(places):,}", *shares])
    chains = 1 + (total[:, num + 3 :] / total[:, num + 2 : num + 3]).sum(axis=0)
    lines.append(["tokens a call", "", "", *(f"{value:.2f}" for value in chains)])
    return format_table(["", "places", "known", *(f"best {k}" for k in _BEST)], lines)


if __name__ == "__main__":
    cli.run_main(main)
