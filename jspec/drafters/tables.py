"""Trivial approximation models: tables of counts, and no model at all.

Leviathan et al. (arXiv 2211.17192, §4.1) find that even a bigram table, whose cost is next to
nothing, makes decoding a little faster; to draw any token at random is the limit of no cost and no
skill. A table's distribution for the next token follows from the last one alone. Tables are
parameters, not constants of the compiled program; `scripts/make_answers.py` makes them.

A table is a safetensors file:

```
  unigrams  [v]    how often each token came
  ids       [v k]  what followed each token most often, the most frequent first
  counts    [v k]  how often; 0 where nothing more followed
```

The file's metadata says what it is: `format`, `kind` ("unigram", or "unigram+bigram" with the last
two tensors), `vocab_size`, `num_tokens`, how many tokens were counted, and `vocabulary`, a checksum
of what the ids mean.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jaxtyping import Array, Float32, Int

from jspec.common.errors import InputError
from jspec.common.new_files import new_file
from jspec.common.typing import Params, RowTokens
from jspec.drafters.chain import ChainDrafter
from jspec.drafters.spec import BuiltDrafter, DrafterSpec
from jspec.speculation.types import Kind, Proposal, RoundInputs
from jspec.weights import TokenizerLike, vocabulary_digest

_MERGE_AT = 1 << 22  # pairs that are held before they are merged into counts
_FORMAT = "jspec n-gram table"
_TENSORS = {"unigram": {"unigrams"}, "unigram+bigram": {"unigrams", "ids", "counts"}}


class NgramTable(NamedTuple):
    """Counts of unigrams and, unless they are None, of bigrams; see the module."""

    unigrams: Int[np.ndarray, "v"]
    ids: Int[np.ndarray, "v k"] | None = None
    counts: Int[np.ndarray, "v k"] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that were counted."""
        return int(self.unigrams.sum())


def count_ngrams(
    texts: Iterable[Sequence[int]], vocab_size: int, *, order: int = 2, num_continuations: int = 32
) -> NgramTable:
    """Counts the tokens of texts, and what follows what within a text.

    With `order` 1 unigrams only, else bigrams as well. Of the tokens that followed one, all below
    `vocab_size`, `num_continuations` are kept; of equals the smaller ids.

    Raises:
      InputError: no token at all, or an id beyond the vocabulary.
    """
    unigrams, counts, new = np.zeros(vocab_size, np.int64), np.zeros([2, 0], np.int64), []
    num_new = 0
    for text in texts:
        ids = np.asarray(text, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise InputError(
                f"expected token ids from 0 to {vocab_size - 1}, got {ids.min()} to {ids.max()}"
            )
        unigrams += np.bincount(ids, minlength=vocab_size)
        if order > 1:
            # One number a pair makes counting a sort of numbers.
            new.append(ids[:-1] * vocab_size + ids[1:])
            num_new += len(ids)
        if num_new >= _MERGE_AT:
            counts, new, num_new = _merge(counts, new), [], 0
    if not unigrams.any():
        raise InputError("expected at least one token to count, got none")
    if order == 1:
        return NgramTable(unigrams)
    return NgramTable(unigrams, *_most_frequent(_merge(counts, new), vocab_size, num_continuations))


def _merge(counts: np.ndarray, new: Sequence[np.ndarray]) -> np.ndarray:
    """Adds pairs to counts, which are rows of each pair, once, and how often it came."""
    ones = np.ones(sum(map(len, new)), np.int64)
    pairs, place = np.unique(np.concatenate([counts[0], *new]), return_inverse=True)
    total = np.zeros(len(pairs), np.int64)
    # `add.at`: plain indexing would count a repeated place once.
    np.add.at(total, place, np.concatenate([counts[1], ones]))
    return np.stack([pairs, total])


def _most_frequent(
    counts: np.ndarray, vocab_size: int, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what followed each token most often, and how often; of shape [v number]."""
    first, second = np.divmod(counts[0], vocab_size)
    # By first token, then the most frequent, then the smaller id.
    order = np.lexsort((second, -counts[1], first))
    first, second, times = first[order], second[order], counts[1][order]
    # Position among the pairs with the same first token.
    rank = np.arange(len(first)) - np.searchsorted(first, first)
    is_kept = rank < number
    ids = np.zeros([vocab_size, number], np.int32)
    table = np.zeros([vocab_size, number], np.int64)
    ids[first[is_kept], rank[is_kept]] = second[is_kept]
    table[first[is_kept], rank[is_kept]] = times[is_kept]
    return ids, table


def save_table(
    table: NgramTable, path: pathlib.Path, tokenizer: TokenizerLike | None = None
) -> None:
    """Writes a table; the file appears, or replaces an older file, when it is complete.

    The tokenizer says what the ids mean, to be checked where the table is used.

    Raises:
      InputError: it cannot be written.
    """
    tensors = {name: leaf for name, leaf in table._asdict().items() if leaf is not None}
    metadata = {
        "format": _FORMAT,
        "kind": next(kind for kind, names in _TENSORS.items() if names == tensors.keys()),
        "vocab_size": str(len(table.unigrams)),
        "num_tokens": str(table.num_tokens),
    }
    # Ids mean nothing without their tokenizer.
    digest = None if tokenizer is None else vocabulary_digest(tokenizer)
    if digest is not None:
        metadata["vocabulary"] = digest
    try:
        with new_file(path) as partial:
            partial.write_bytes(safetensors.numpy.save(tensors, metadata))
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def load_table(
    path: str, *, tokenizer: TokenizerLike | None = None, vocab_size: int | None = None
) -> NgramTable:
    """Reads a table, whose ids must be those of the tokenizer where both are known.

    `vocab_size` is the number of ids that must have been counted; None for any.

    Raises:
      InputError: no such file, a folder, a damaged file, one that is no table, or one of another
        vocabulary.
    """
    if os.path.isdir(path):
        raise InputError(f"{path}: expected a table of n-gram counts, a file; got a folder")
    if not os.path.isfile(path):
        raise InputError(f"{path}: no such file; expected a table of n-gram counts")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise InputError(f"{path}: expected a table of n-gram counts, got other tensors")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path}: truncated or damaged table of n-gram counts ({error})") from None
    problem = _find_problem(metadata, tensors) or _find_mismatch(metadata, vocab_size, tokenizer)
    if problem is not None:
        raise InputError(f"{path}: {problem}")
    return NgramTable(**tensors)


def _find_problem(metadata: dict[str, str], tensors: dict[str, Any]) -> str | None:
    kind = metadata.get("kind")
    if _TENSORS.get(str(kind)) != tensors.keys():
        return f"expected a table of n-gram counts, got tensors {', '.join(sorted(tensors))}"
    if any(tensor.dtype.kind != "i" for tensor in tensors.values()):
        return "expected whole numbers in a table of n-gram counts"
    size = str(tensors["unigrams"].shape)
    if size != f"({metadata.get('vocab_size')},)":
        return f"expected unigrams of {metadata.get('vocab_size')} tokens, got shape {size}"
    if any(tensor.size and tensor.min() < 0 for tensor in tensors.values()):
        return "expected counts and ids of at least 0"
    total = tensors["unigrams"].sum()
    if str(total) != metadata.get("num_tokens") or total == 0:
        return f"expected {metadata.get('num_tokens')} counted tokens, at least one"
    return _find_bigram_problem(**tensors) if kind == "unigram+bigram" else None


def _find_mismatch(
    metadata: dict[str, str], vocab_size: int | None, tokenizer: TokenizerLike | None
) -> str | None:
    """Returns why a table is not of a target's vocabulary, or None."""
    counted = metadata["vocab_size"]
    if vocab_size is not None and counted != str(vocab_size):
        size = f"the target's vocabulary of {vocab_size} tokens"
        return f"expected a table of {size}, got one of {counted}"
    digest = None if tokenizer is None else vocabulary_digest(tokenizer)
    # A table without a checksum is taken on trust.
    if digest is not None and metadata.get("vocabulary", digest) != digest:
        return "expected a table counted with the target's tokenizer, got one of another's tokens"
    return None


def _find_bigram_problem(unigrams: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> str | None:
    if ids.shape != counts.shape or ids.ndim != 2 or len(ids) != len(unigrams) or not ids.size:
        return f"expected ids and counts of one shape, got {ids.shape} and {counts.shape}"
    if ids.max() >= len(unigrams):
        return f"expected ids below {len(unigrams)}, got {ids.max()}"
    if (np.diff(counts, axis=1) > 0).any():
        return "expected the most frequent bigrams first"
    return None


TableLogitsFn = Callable[[Params, RowTokens], Float32[Array, "b u"]]
_KINDS = {"unigram": Kind("unigram", 0.05, 0.05), "bigram": Kind("bigram", 0.2, 0.2)}


@dataclasses.dataclass(frozen=True)
class TableDrafter(ChainDrafter):
    """Proposes a chain drawn from distributions of the last token alone. It has no state.

    Attributes:
      logits: (parameters, tokens [b]) -> logits of what follows each token, [b u]; the ids from u
        on are never proposed.
    """

    kind: Kind = dataclasses.field(kw_only=True)
    logits: TableLogitsFn = dataclasses.field(kw_only=True)
    can_roll_back = True

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
    # Of shape [b k]: a row keeps the most frequent continuations only.
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


def build_random(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter that draws any token, each equally likely."""
    logits = functools.partial(uniform_logits, vocab_size=spec.vocab_size)
    kind = Kind("random", 0.01, 0.01)
    return BuiltDrafter(TableDrafter(kind=kind, logits=logits, **spec.chain_fields))


def _build_from_counts(name: str, logits: TableLogitsFn, spec: DrafterSpec) -> BuiltDrafter:
    path, vocab_size = spec.options.draft_table, spec.vocab_size
    if path is None:
        raise InputError(
            f"the drafter {name!r} expects a table that scripts/make_answers.py has made "
            "(--draft_table), got none"
        )
    if spec.tokenizer is not None:  # a draft model may use fewer ids than the target
        vocab_size = min(spec.tokenizer.vocab_size, spec.target_config.vocab_size)
    table = load_table(path, tokenizer=spec.tokenizer, vocab_size=vocab_size)
    if name == "bigram" and table.ids is None:
        raise InputError(
            f"the drafter 'bigram' expects a table with bigrams; {path} has unigrams only"
        )
    drafter = TableDrafter(kind=_KINDS[name], logits=logits, **spec.chain_fields)
    return BuiltDrafter(drafter, table_params(table, name))


build_unigram = functools.partial(_build_from_counts, "unigram", unigram_logits)
build_bigram = functools.partial(_build_from_counts, "bigram", bigram_logits)
