"""Compares the rules for trees at equal numbers of drafts, on distributions that are made up.

`python scripts/tree_rules.py --output_json=tree-rules.json`

Target and draft are tables of logits [token, next token] with opinions; the draft is the target
disturbed, so that the two are a given total variation apart on average. Every row is one round of
one tree after a token of its own: what the drafters draw, and what the rules keep, by the functions
that generate text. The figure is the mean number of tokens a round emits, the best of all shapes of
that many drafts (branches x depth); its standard error is about 0.01. Most of the time compiles.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Array, Float32

from jspec.cli import program as cli
from jspec.common.errors import check_count
from jspec.drafters.spec import LIKELIEST, WITH, WITHOUT, Shape
from jspec.drafters.trees import Fed, draw_tree, grow_tree
from jspec.generation.provenance import Recorder
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance import get_rule
from jspec.speculation.acceptance.tree import tree_of
from jspec.speculation.types import RoundInputs

_NUM_ROWS = flags.DEFINE_integer("num_rows", 20_000, "Rounds of every shape.")
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write the figures to this file.")

_VOCAB = 32
_SHARPNESS = 2.5  # standard deviation of the target's logits
_NUMBERS = 1, 2, 4, 8, 16  # of drafts
_DISTURBANCES = 2.2, 0.7  # standard deviations: about 0.5 and 0.2 apart in total variation
_METHODS = (
    ("rejection", WITH), ("block", WITH), ("k_seq", WITH), ("rejection", WITHOUT),
    ("block", WITHOUT), ("coupled", WITHOUT), ("rejection", LIKELIEST),
)  # fmt: skip


def make_tables(disturbance: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the target's and the draft's logits, and how far they are apart."""
    target, noise = np.random.default_rng(0).normal(size=(2, _VOCAB, _VOCAB))
    target, draft = _SHARPNESS * target, _SHARPNESS * target + disturbance * noise
    probs = [np.asarray(jax.nn.softmax(table, axis=-1)) for table in (target, draft)]
    return target, draft, float(0.5 * np.abs(probs[0] - probs[1]).sum(axis=-1).mean())


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def emitted(
    name: str, shape: Shape, num_rows: int, seed: int,
    target: Float32[Array, "v v"], draft: Float32[Array, "v v"],
) -> Float32[Array, ""]:  # fmt: skip
    """Returns the mean number of tokens of a round."""
    rule, last = get_rule(name), jnp.arange(num_rows, dtype=jnp.int32) % _VOCAB
    seeds = jnp.arange(num_rows, dtype=jnp.uint32) + seed
    position, wanted = jnp.full_like(last, 9), jnp.full_like(last, shape.num_draft_tokens)
    ones = jnp.ones([num_rows])
    inputs: Any = RoundInputs(
        last,
        limit=lambda kind: wanted,
        rng_keys=rule.noise.draft_keys(seeds, position, shape.num_draft_tokens),
        settings=SamplingSettings(ones, jnp.zeros_like(last), ones, 0 * ones),
        view=None,  # pyright: ignore[reportArgumentType]
        has_shared_noise=rule.noise.is_shared,
    )

    def feed(memory: None, level: Fed) -> tuple[Float32[Array, "b k v"], None]:
        return draft[level.tokens], memory

    if shape.draws == LIKELIEST:
        grown = grow_tree(feed, None, draft[last], shape, wanted=wanted)
    else:
        grown = draw_tree(feed, None, draft[last], shape, inputs, wanted=wanted, vocab_size=_VOCAB)
    proposal = grown.proposal
    tree = tree_of(proposal)
    block = jnp.concatenate([last[:, None], jnp.maximum(proposal.tokens, 0)], axis=1)
    noise = rule.tree.noise(seeds, position, tree, _VOCAB, jnp.array(True))
    probs = jax.nn.softmax(target, axis=-1)[block]
    return 1 + jnp.mean(rule.tree.accept(probs, proposal, tree, noise).num_accepted)


def shapes_of(number: int, draws: str) -> list[Shape]:
    """Returns the shapes of that many drafts: whole branches, or those of a tree that grows."""
    if draws == LIKELIEST:
        depths = [depth for depth in (1, 3, 6) if depth <= number]
        return [Shape(number, depth, branches) for depth in depths for branches in (2, 4)]
    branches = [k for k in (1, 2, 4, 8) if number % k == 0]
    return [Shape(number, number // k, k, draws) for k in branches]


def main() -> None:
    """Prints a table for each distance, and writes them down."""
    check_count("num_rows", _NUM_ROWS.value, 1, 10**7)
    recorder = Recorder(_OUTPUT_JSON.value, {"num_rows": _NUM_ROWS.value})
    lines: list[dict[str, Any]] = []
    for disturbance in _DISTURBANCES:
        target, draft, distance = make_tables(disturbance)
        print(f"total variation {distance:.2f}", flush=True)
        for name, draws in _METHODS:
            cells = []
            for number in _NUMBERS:
                found = {
                    f"{shape.branches}x{shape.depth}": float(
                        emitted(name, shape, _NUM_ROWS.value, 1, target, draft)
                    )
                    for shape in shapes_of(number, draws)
                }
                best = max(found, key=found.__getitem__)
                cells.append(f"{found[best]:.2f} ({best})")
                lines.append({"distance": distance, "rule": name, "draws": draws, "number": number,
                              "by_shape": found})  # fmt: skip
            print(f"| `{name}` | {draws} | {' | '.join(cells)} |", flush=True)
    recorder.save({"vocab_size": _VOCAB, "sharpness": _SHARPNESS, "figures": lines})


if __name__ == "__main__":
    cli.run_main(main)
