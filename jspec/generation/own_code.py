"""Checks of the user's own drafters and rules, by `jax.eval_shape`: nothing is computed.

So a mistake is told in one line when a Generator is made, and not by JAX in the first round.
"""

import dataclasses
import hashlib
import pathlib
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jspec.common.errors import InputError, check_type, describe_error
from jspec.common.typing import Params
from jspec.drafters import BuiltDrafter, DrafterEntry
from jspec.drafters.cascade import CascadeDrafter
from jspec.generation.layout import Layout
from jspec.generation.rows import capacity_for, empty_state
from jspec.models import make_apply
from jspec.sampling.settings import Switches
from jspec.speculation.acceptance import BUILT_IN
from jspec.speculation.types import (
    AcceptanceRule,
    Drafter,
    ModelParams,
    Proposal,
    RoundInputs,
    SpecState,
    TargetView,
    Verdict,
)
from jspec.weights.resolver import LoadedModel

_LIBRARIES = ("purelib", "platlib", "stdlib")
_ROWS = 2  # with 1, a leaf without a row's axis would look right


def check_own_code(
    entries: Sequence[DrafterEntry],
    built: BuiltDrafter,
    name: str,
    rule: AcceptanceRule,
    target: LoadedModel,
) -> None:
    """Checks what is not jspec's of a drafter, or the members of a cascade, and of a rule.

    Raises:
      InputError: one that fails, or returns other than `Drafter` or `AcceptanceRule` says.
    """
    is_cascade = isinstance(built.drafter, CascadeDrafter)
    all_params = built.params if is_cascade else (built.params,)
    for entry, drafter, params in zip(entries, _members(built.drafter), all_params, strict=True):
        if not _is_own(drafter):
            continue
        title = f"the drafter {entry.name!r}"
        check_type(title, drafter, Drafter)
        started, observed, proposal, after = _shapes(title, _round, drafter, params, rule, target)
        if any(leaf.shape[:1] != (_ROWS,) for leaf in jax.tree.leaves(started)):
            _check(f"{title} to have a state whose every leaf begins with the rows", started, "")
        like = f"a state like init's, {_text(started)}"
        _check(f"{title} to return from observe {like}", observed, _text(started))
        _check(f"{title} to return from propose {like}", after, _text(started))
        check_type(f"what {title} proposes", proposal, Proposal)
        block, vocab_size = [_ROWS, drafter.num_draft_tokens], target.config.vocab_size
        for name, dtype, shape in (
            ("tokens", "int32", block),
            ("num_tokens", "int32", [_ROWS]),
            ("probs", "float32", [*block, vocab_size]),
            ("kind", "int32", [_ROWS]),
            ("parents", "int32", block),
        ):
            if (value := getattr(proposal, name)) is not None:  # as the last three may be
                _check(f"{title} to propose {name} {dtype} {shape}", value, f"{dtype} {shape}")
        depth = drafter.tree_depth
        if (proposal.parents is not None) != (depth > 0) or proposal.max_depth != depth:
            value = "no parents" if proposal.parents is None else "parents"
            raise InputError(
                f"expected {title} to propose parents, and its tree_depth as max_depth, if that is "
                "at least 1 (--tree_depth), and otherwise a chain; got "
                f"{value} and max_depth {proposal.max_depth} with tree_depth {depth}"
            )

    if built.drafter is not None and name not in BUILT_IN:
        _check_rule(name, rule, built, target)


def digest_of_own_code(*parts: object) -> str | None:
    """Returns a digest of the files in which drafters, rules or functions of the user's own are.

    None where all are jspec's. Changed code has another digest, though its name is the same.
    """
    members = [member for part in parts for member in _members(part)]
    modules = {_module(member) for member in members if _is_own(member)}
    names = [getattr(sys.modules.get(name), "__file__", None) for name in sorted(modules)]
    texts = [pathlib.Path(name).read_bytes() for name in names if name is not None]
    return hashlib.sha256(b"".join(texts)).hexdigest() if texts else None


def _members(part: Any) -> tuple[Any, ...]:
    return part.members if isinstance(part, CascadeDrafter) else (part,)


def _is_own(part: Any) -> bool:
    return part is not None and not _module(part).startswith("jspec.")


def _module(part: Any) -> str:
    return getattr(part, "__module__", type(part).__module__)


def _check_rule(name: str, rule: AcceptanceRule, built: BuiltDrafter, target: LoadedModel) -> None:
    title = f"the acceptance rule {name!r}"
    assert built.drafter is not None
    verdict = _shapes(title, _verdict, built.drafter, built.params, rule, target)
    for field in ("num_accepted", "next_token"):
        value = getattr(verdict, field, verdict)  # all of what is no Verdict
        _check(f"{title} to accept with {field} int32 [{_ROWS}]", value, f"int32 [{_ROWS}]")


def _round(drafter: Drafter, params: Params, rule: AcceptanceRule, target: LoadedModel) -> Any:
    """Returns a drafter's state, that after a text, its proposal, and the state after that."""
    width, apply = drafter.num_draft_tokens, make_apply(target.config)
    capacity = capacity_for(1, width + 1)
    state = empty_state(target, drafter, (), _ROWS, capacity, Switches())
    tokens, layers = jnp.zeros([_ROWS, width + 1], jnp.int32), drafter.hidden_layers
    logits, hidden, _ = apply(target.params, tokens, state.target_cache, hidden_layers=layers)
    observed = drafter.observe(params, state.draft, tokens, hidden, tokens == 0)
    flags = tokens == 0, tokens == 0
    observed = drafter.observe_logits(observed, tokens, logits, *flags)
    inputs = RoundInputs(
        state.last_token,
        limit=lambda kind: jnp.full_like(kind, width),
        rng_keys=rule.noise.draft_keys(state.seed, state.last_token, width),
        settings=state.settings,
        view=TargetView(target.params, apply, state.target_cache),
    )
    proposed: Any = drafter.propose(params, observed, inputs)
    if not (isinstance(proposed, tuple) and len(proposed) == 2):
        got = type(proposed).__name__
        raise TypeError(f"expected propose to return a Proposal and the state, got {got}")
    return state.draft, observed, *proposed


def _verdict(
    drafter: Drafter, params: Params, rule: AcceptanceRule, target: LoadedModel
) -> Verdict:
    proposal: Proposal = _round(drafter, params, rule, target)[2]
    size = target.config.vocab_size
    state: SpecState = empty_state(target, None, (), _ROWS, 1, Switches())
    logits = jnp.zeros([_ROWS, proposal.width + 1, size], jnp.float32)
    probs, is_random = rule.distribution(logits, state.settings), state.settings.is_random
    noise = rule.noise.acceptance(state.seed, state.last_token, proposal.width, size, is_random)
    return rule.accept(probs, proposal, noise)


def _shapes(
    title: str,
    run: Any,
    drafter: Drafter,
    params: Params,
    rule: AcceptanceRule,
    target: LoadedModel,
) -> Any:
    """Returns the shapes of what the user's code returns, whatever it raises."""
    layout = Layout.of(target, params)

    def run_own(shares: ModelParams) -> Any:  # on a mesh, of what one device has
        shard = dataclasses.replace(
            target, config=target.own_config, params=shares.target, mesh=None
        )
        return run(drafter, shares.draft, rule, shard)

    try:
        return jax.eval_shape(layout.spread(run_own), ModelParams(target.params, params))
    except Exception as error:
        raise InputError(f"{title}{_place(error)}: {describe_error(error)}") from None


def _place(error: Exception) -> str:
    """Returns where in the user's own file an error came up, ", FILE:LINE"."""
    libraries = (str(pathlib.Path(__file__).parents[1]), *map(sysconfig.get_path, _LIBRARIES))
    frames = traceback.extract_tb(error.__traceback__)
    users_frames = [frame for frame in frames if not frame.filename.startswith(libraries)]
    return f", {users_frames[-1].filename}:{users_frames[-1].lineno}" if users_frames else ""


def _text(tree: Any) -> str:
    return str(jax.tree.map(lambda leaf: f"{leaf.dtype} {list(leaf.shape)}", tree)).strip("'")


def _check(expected: str, value: Any, text: str) -> None:
    if _text(value) != text:
        raise InputError(f"for {_ROWS} rows, expected {expected}; got {_text(value)}"[:500])
