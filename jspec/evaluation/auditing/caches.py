"""Checks of caches: after many rounds they equal those of a fresh prefill of the emitted text."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jspec.drafters import WITH_DRAFT_MODEL, member_names
from jspec.drafters.layer_skip import choose_layers
from jspec.evaluation.auditing.context import Context
from jspec.evaluation.auditing.rows import Rows, first_tokens
from jspec.evaluation.auditing.subject import Check, Subject
from jspec.models import KVCache, init_cache, make_apply
from jspec.weights.resolver import LoadedModel

# Of the largest key or value: a wrong slot is off by about 1.
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
_NUM_ROWS = 4


def check_caches(subject: Subject, rows: Rows, context: Context) -> Check:
    """Compares the committed slots of the target's cache, and of the drafters' own caches.

    The cache of a trained head is left out: a prefill of the text alone does not make it.
    """
    infos, state = next(rows.run(1))
    tokens = first_tokens(infos, rows.num_rounds)
    errors = {"target": _largest_error(subject.target, state.target_cache, tokens, context)}
    names = member_names(subject.drafter)
    members = state.draft if len(names) > 1 else (state.draft,)
    for name, own in zip(names, members, strict=True):
        model, layers = (subject.draft if name in WITH_DRAFT_MODEL else None), None
        if name == "layer_skip":
            model, asked_for = subject.target, subject.drafter_options.draft_layers
            layers = choose_layers(asked_for, model.config.num_layers)
        cache = getattr(own, "cache", None)
        if model is not None and isinstance(cache, KVCache):
            errors[name] = _largest_error(model, cache, tokens, context, layers)
    tolerance = _TOLERANCES[subject.dtype]
    return Check(
        "caches",
        all(error < tolerance for error in errors.values()),
        "largest difference from a fresh prefill: "
        + ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        + f" of the largest entry (expected below {tolerance:g})",
        errors,
    )


def _largest_error(
    model: LoadedModel,
    cache: KVCache,
    tokens: np.ndarray,
    context: Context,
    layers: Sequence[int] | None = None,
) -> float:
    """Returns the largest difference over a few rows, relative to the largest entry.

    Only slots whose tokens are in `tokens` [b t] are looked at. `layers` of the model have run;
    None means all.
    """
    texts = [[*context.prompt, context.first, *row] for row in tokens[:_NUM_ROWS]]
    blocks = np.array(texts, np.int32)
    dtype = model.params["embedding"].dtype
    config = dataclasses.replace(model.config, num_layers=len(cache.keys))
    empty = init_cache(config, batch_size=len(texts), capacity=blocks.shape[1], dtype=dtype)
    fresh = jax.jit(make_apply(model.config, layers))(model.params, blocks, empty)[2]
    length = np.minimum(np.asarray(cache.length)[: len(texts)], blocks.shape[1])
    worst = 0.0
    for ours, theirs in zip(cache.keys + cache.values, fresh.keys + fresh.values, strict=True):
        theirs = np.asarray(theirs, np.float32)[:, :, : blocks.shape[1]]
        ours = np.asarray(ours, np.float32)[: len(texts), :, : blocks.shape[1]]
        committed = (np.arange(blocks.shape[1]) < length[:, None])[:, None, :, None]
        difference = np.abs(np.where(committed, ours - theirs, 0)).max()
        worst = max(worst, float(difference / np.abs(theirs).max()))
    return worst
