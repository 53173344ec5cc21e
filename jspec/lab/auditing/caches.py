"""The check of the caches: that they hold what a fresh prefill of the emitted text would."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters import member_names, needs_draft_model
from jspec.drafters.layer_skip import choose_layers
from jspec.drafters.translated_model import TranslatedDrafter, TranslatedState
from jspec.generation.layout import Layout
from jspec.generation.rows import state_specs
from jspec.lab.auditing.rows import Rows, first_tokens
from jspec.lab.auditing.subject import Check
from jspec.models import KVCache, init_cache, make_apply
from jspec.speculation.types import ModelParams, StepInfo
from jspec.weights.resolver import LoadedModel

# Of the largest key or value: a wrong slot is off by about 1.
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
_NUM_ROWS = 4


def check_caches(rows: Rows) -> Check:
    """Compares the committed slots of the target's cache, and of the drafters' own caches.

    The cache of a trained head is left out: a prefill of the text alone does not make it.
    """
    subject = rows.subject
    infos, state = next(rows.run(1))
    texts = _texts(rows, infos)
    # A tree's path has to be moved in few rows only.
    texts = texts if subject.has_tree else texts[:_NUM_ROWS]
    errors = {"target": _largest_error(subject.target, state.target_cache, texts)}
    names = member_names(subject.drafter)
    members = state.draft if len(names) > 1 else (state.draft,)
    for name, member_state in zip(names, members, strict=True):
        model, layers = (subject.draft if needs_draft_model(name) else None), None
        if name == "layer_skip":
            model, asked_for = subject.target, subject.drafter_options.draft_layers
            layers = choose_layers(asked_for, model.config.num_layers)
        cache, read = getattr(member_state, "cache", None), texts
        if isinstance(member_state, TranslatedState):
            read = _readings(rows, member_state)[: len(texts)]
        if model is not None and isinstance(cache, KVCache):
            errors[name] = _largest_error(model, cache, read, layers)
    tolerance = _TOLERANCES[subject.dtype]
    listed = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    detail = f"largest difference from a fresh prefill: {listed} of the largest entry"
    detail += f" (expected below {tolerance:g})"
    return Check("caches", max(errors.values()) < tolerance, detail, errors)


def check_cache_control(title: str, wrong: Rows, num_rows: int) -> Check:
    """Checks that the check of the caches rejects rows whose target is called wrongly."""
    target, tolerance, error = wrong.subject.target, _TOLERANCES[wrong.subject.dtype], 0.0
    # Only a row that has kept another branch than the block's first shows it.
    for infos, state in wrong.run(num_rows):
        error = _largest_error(target, state.target_cache, _texts(wrong, infos))
        if error > tolerance:
            break
    detail = f"largest difference {error:.1e} of the largest entry (expected above {tolerance:g})"
    return Check(title, error > tolerance, detail, {"target": error})


def _texts(rows: Rows, infos: StepInfo) -> np.ndarray:
    """Returns prompts and first tokens of a run's rows, [b t]."""
    context, tokens = rows.context, first_tokens(infos, rows.num_rounds)
    return np.array([[*context.prompt, context.first, *row] for row in tokens], np.int32)


def _readings(rows: Rows, state: TranslatedState) -> np.ndarray:
    """Returns what a draft model of another vocabulary reads of the rows' texts, [b s]."""
    members = getattr(rows.drafter, "members", (rows.drafter,))
    (drafter,) = (member for member in members if isinstance(member, TranslatedDrafter))
    params = rows.draft_params if len(members) == 1 else rows.draft_params[members.index(drafter)]
    read = functools.partial(state.text.window, params.tables, drafter.reading)
    return np.asarray(read(jnp.zeros_like(state.text.history.length), state.cache.capacity))


def _largest_error(
    model: LoadedModel, cache: KVCache, texts: np.ndarray, layers: Sequence[int] | None = None
) -> float:
    """Returns the largest difference in the slots of texts [b t], relative to the largest entry.

    `layers` of the model have run; None means all.
    """
    batch_size, width = texts.shape
    # A cache may hold a text's last tokens only.
    firsts = np.asarray(cache.first)[:batch_size]
    texts = np.stack([np.roll(text, -first) for text, first in zip(texts, firsts, strict=True)])
    dtype = model.params["embedding"].dtype
    config, layout = model.own_config, Layout.of(model)
    kept = dataclasses.replace(config, num_layers=len(cache.keys))
    make = functools.partial(init_cache, kept, batch_size=batch_size, capacity=width, dtype=dtype)
    # Constants of an encoder-decoder, which no round changes, are those of the rows.
    source = jax.tree.map(lambda leaf: leaf[:batch_size], cache.source)
    first = jnp.zeros(batch_size, jnp.int32)  # logits of all tokens would be large, and unread
    apply = functools.partial(make_apply(config, layers), logits_at=first)
    read = layout.spread(
        lambda params, texts: apply(params.target, texts, make().replace(source=source))[2],
        lambda *_: state_specs(jax.eval_shape(make), ()),
    )
    fresh = jax.jit(read)(ModelParams(model.params, None), texts)
    length = np.asarray(cache.length)[:batch_size]
    is_committed = (np.arange(width) < length[:, None])[:, None, :, None]
    worst = 0.0
    for ours, theirs in zip(cache.keys + cache.values, fresh.keys + fresh.values, strict=True):
        theirs = np.asarray(theirs, np.float32)[:, :, :width]
        ours = np.asarray(ours, np.float32)[:batch_size, :, :width]
        difference = np.abs(np.where(is_committed, ours - theirs, 0)).max()
        worst = max(worst, float(difference / np.abs(theirs).max()))
    return worst
