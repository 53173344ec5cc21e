"""Trivial approximation models: tables of counts, and no model at all.

Leviathan et al. (arXiv 2211.17192, §4.1) find that even a bigram table, whose cost is next to
nothing, makes decoding a little faster, and that a model that draws any token at random is the
limit of no cost and no skill. A table's distribution for the next token follows from the last one
alone; it goes through the row's processors, temperature and filters like any other.
`scripts/make_answers.py` makes tables. They are parameters, not constants of the compiled program.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.common.errors import InputError
from jspec.common.typing import Params, RowTokens
from jspec.drafters.chain import ChainDrafter
from jspec.drafters.memory import Stateless
from jspec.drafters.ngram_table import NgramTable, load_table
from jspec.drafters.spec import BuiltDrafter, ConfidenceOptions, DrafterEntry, DrafterSpec, option
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import Kind, RoundInputs

TableLogitsFn = Callable[[Params, RowTokens], Float32[Array, "b u"]]
_KINDS = {"unigram": Kind("unigram", 0.05, 0.05), "bigram": Kind("bigram", 0.2, 0.2)}


@dataclasses.dataclass(frozen=True)
class TableOptions(ConfidenceOptions):
    """Of `unigram` and `bigram`."""

    draft_table: str | None = option(
        None, "For unigram and bigram: file of token counts, made by scripts/make_answers.py."
    )


@dataclasses.dataclass(frozen=True)
class TableDrafter(Stateless, ChainDrafter):
    """Proposes a chain drawn from distributions of the last token alone. It has no state.

    Attributes:
      logits: (parameters, tokens [b]) -> logits of what follows each, [b u]; the ids from u on are
        never proposed.
    """

    kind: Kind = dataclasses.field(kw_only=True)
    logits: TableLogitsFn = dataclasses.field(kw_only=True)

    def propose(
        self, params: Params, state: tuple[()], inputs: RoundInputs
    ) -> tuple[Proposal, tuple[()]]:
        """Draws one token after another."""

        def look_up(memory: tuple[()], token: RowTokens) -> tuple[Float32[Array, "b u"], tuple[()]]:
            return self.logits(params, token), memory

        return self.draw_chain(look_up, look_up, state, inputs)[0], state


def unigram_logits(params: Params, token: RowTokens) -> Float32[Array, "b u"]:
    """Returns the logarithm of how often each token comes, `probs` [u], whatever came before."""
    # The same distribution for every row, as a unigram ignores the context.
    return jnp.broadcast_to(jnp.log(params["probs"]), (*token.shape, *params["probs"].shape))


def bigram_logits(params: Params, token: RowTokens) -> Float32[Array, "b u"]:
    """Returns log counts of what followed each token; the unigrams' after one never seen.

    The parameters are `probs` [u] of the unigrams, and `ids` [u k] and `counts` [u k] of what
    followed each token most often, then counts of 0.
    """
    # [b k] each: a row keeps the most frequent continuations only.
    ids, counts = params["ids"][token], params["counts"][token]
    rows = jnp.arange(token.shape[0])[:, None]
    followed = jnp.zeros((*token.shape, *params["probs"].shape), jnp.float32)
    # `add`: unused entries repeat an id with a count of 0, which `set` would let win.
    followed = followed.at[rows, ids].add(counts)
    is_seen = counts[:, 0] > 0
    # log 0 is -inf: a token never counted is never proposed.
    return jnp.log(jnp.where(is_seen[:, None], followed, params["probs"]))


def uniform_logits(params: Params, token: RowTokens, *, vocab_size: int) -> Float32[Array, "b u"]:
    """Returns the same for every token of a vocabulary."""
    return jnp.zeros((*token.shape, vocab_size), jnp.float32)


def table_params(table: NgramTable, name: str) -> dict[str, Any]:
    """Returns the parameters of the drafter "unigram" or "bigram"."""
    # In float64, before it is rounded once.
    params = {"probs": jnp.asarray(table.unigrams / table.unigrams.sum(), jnp.float32)}
    if name == "bigram":
        params["ids"] = jnp.asarray(table.ids)
        params["counts"] = jnp.asarray(table.counts, jnp.float32)
    return params


def _build_from_counts(spec: DrafterSpec, name: str, logits: TableLogitsFn) -> BuiltDrafter:
    table = _read_table(spec, name)
    if name == "bigram" and table.ids is None:
        raise InputError(
            f"the drafter 'bigram' expects a table with bigrams; {spec.options.draft_table} has "
            "unigrams only"
        )
    drafter = TableDrafter(kind=_KINDS[name], logits=logits, **spec.chain_fields)
    return BuiltDrafter(drafter, table_params(table, name))


def _build_random(spec: DrafterSpec) -> BuiltDrafter:
    logits = functools.partial(uniform_logits, vocab_size=spec.vocab_size)
    kind = Kind("random", 0.01, 0.01)
    return BuiltDrafter(TableDrafter(kind=kind, logits=logits, **spec.chain_fields))


def _read_table(spec: DrafterSpec, name: str) -> NgramTable:
    path = spec.options.draft_table
    if path is None:
        raise InputError(
            f"the drafter {name!r} expects a table that scripts/make_answers.py has made "
            "(--draft_table), got none"
        )
    vocab_size = spec.vocab_size
    if spec.tokenizer is not None:  # a draft model may use fewer ids than the target
        vocab_size = min(spec.tokenizer.vocab_size, spec.target_config.vocab_size)
    return load_table(path, tokenizer=spec.tokenizer, vocab_size=vocab_size)


UNIGRAM = DrafterEntry(
    name="unigram",
    build=lambda spec: _build_from_counts(spec, "unigram", unigram_logits),
    proposes="what a table of token counts draws",
    source="2211.17192",
    options=TableOptions,
    needs="draft_table",
    prior_cost=1.04,
)
BIGRAM = DrafterEntry(
    name="bigram",
    build=lambda spec: _build_from_counts(spec, "bigram", bigram_logits),
    proposes="what a table of counts draws after the newest token",
    source="2211.17192",
    options=TableOptions,
    needs="draft_table",
    prior_cost=1.12,
)
RANDOM = DrafterEntry(
    name="random",
    build=_build_random,
    proposes="any token, each equally likely",
    source="2211.17192",
    options=ConfidenceOptions,
    prior_cost=1.04,
)
