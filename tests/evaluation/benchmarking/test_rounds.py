"""Rounds beside plain steps: which ones are timed, and that every turn is the same one."""

import jax
import jax.numpy as jnp
import pytest

from jspec.drafters import DrafterOptions, make_drafter
from jspec.evaluation.benchmarking import rounds
from jspec.evaluation.benchmarking.rounds import (
    RoundOf,
    RoundParts,
    forced_states,
    state_loop,
    time_rounds,
)
from jspec.evaluation.benchmarking.turns import Turn, take_turns, typical_parts
from jspec.generation.engine import Engine
from jspec.generation.programs import make_spec
from jspec.models import make_apply
from jspec.speculation.acceptance import get_rule
from jspec.speculation.step import speculative_step
from jspec.speculation.types import ModelParams
from jspec.weights.vocabulary import mask_padding
from tests import tiny_models

OPTIONS = {"layer_skip": DrafterOptions(draft_layers=(0,))}
ALONE = {"whole": 0.1, "drafting": 0.03, "call": 0.05, "choice": 0.01}


@pytest.fixture(autouse=True)
def short_caches(monkeypatch):
    monkeypatch.setattr(rounds, "_CAPACITY", tiny_models.CONFIG.max_seq_len)


def sides(name, num_drafts=2):
    """Returns ApplyFn, drafter, parameters and engine of tiny models."""
    target = tiny_models.target()
    spec = make_spec(
        target, tiny_models.draft(), name, OPTIONS.get(name, DrafterOptions()), num_drafts
    )
    built = make_drafter(name, spec)
    apply = mask_padding(make_apply(target.config), target)
    engine = Engine(target, built.drafter, get_rule("rejection"), (0, num_drafts))
    return apply, built.drafter, ModelParams(target.params, built.params), engine


def steps_of(apply, drafter):
    def step(params, state):
        after, info = speculative_step(
            params, state, target=apply, drafter=drafter, rule=get_rule("rejection"), widths=(0, 2)
        )
        return info, after

    return step


@pytest.mark.parametrize("name", ["prompt_lookup", "prompt_lookup+model", "layer_skip"])
def test_each_member_drafts_by_itself(name):
    """Guards against a cascade of which only the first member is ever timed."""
    apply, drafter, params, engine = sides(name)
    found = []
    for one, state in forced_states(engine, params, apply, drafter):
        info, _ = jax.jit(steps_of(apply, drafter))(params, state)
        found.append((one, int(info.num_proposed[0]), drafter.kinds[int(info.kind[0])].drafter))
    members, begins = name.split("+"), name == "layer_skip"
    assert [one for one, *_ in found] == [
        RoundOf(members[0], 0, begins), *(RoundOf(member, 2, begins) for member in members)
    ]  # fmt: skip
    assert [number for _, number, _ in found] == [0, *[2] * len(members)]
    assert [who for *_, who in found[1:]] == members


def test_every_turn_is_the_same_round(monkeypatch):
    """A second measurement begins where the first one did."""
    apply, drafter, params, engine = sides("prompt_lookup+model")
    *_, (_, state) = forced_states(engine, params, apply, drafter)
    seen = []

    def do(params, state):
        found, after = steps_of(apply, drafter)(params, state)
        jax.debug.callback(
            lambda *leaves: seen.append([leaf.tolist() for leaf in leaves]),
            found.tokens, found.num_proposed, state.target_cache.length, state.last_token,
        )  # fmt: skip
        return found, after

    loop = state_loop(params, state, do)
    for _ in range(2):
        loop(jnp.int32(3))
    jax.effects_barrier()
    assert len(seen) == 6
    assert all(one == seen[0] for one in seen)
    assert seen[0][1:3] == [[2], state.target_cache.length.tolist()]


def test_a_rounds_cost_is_foretold_by_its_parts():
    """A part that the plain step has not takes no time there; the machine may slow down."""
    plain = RoundParts(whole=0.06, drafting=0.0, call=0.04, choice=0.005)
    both = RoundParts(**ALONE), plain
    turns = [
        Turn(*(RoundParts(*(slow * second for second in one)) for one in both))
        for slow in (1, 2, 5)
    ]
    for turn in turns:
        assert turn.ratio == pytest.approx(0.1 / 0.06)
        assert turn.expected_ratio == pytest.approx(1 + (0.09 - 0.045) / 0.06)
    assert typical_parts(turns) == pytest.approx([2 * second for second in ALONE.values()])


def test_drafting_is_what_a_proposal_adds_to_a_call(monkeypatch):
    """The plain step has no proposal, and takes no time for it."""
    seconds = {"whole": 3.0, "proposal_and_call": 2.5, "call": 2.0, "choice": 0.25}
    monkeypatch.setattr(
        "jspec.evaluation.benchmarking.turns.seconds_in_turn",
        lambda loops, repeats: [{key: seconds[key[1]] for key in loops}],
    )
    first = {name: None for name in seconds if name != "proposal_and_call"}
    (turn,) = take_turns(dict.fromkeys(seconds), first, rounds._to_parts, 1)
    assert turn == Turn(RoundParts(3.0, 0.5, 2.0, 0.25), RoundParts(3.0, 0.0, 2.0, 0.25))


def test_rounds_and_plain_steps_run(monkeypatch):
    """Guards against a loop whose state changes its shape on the way."""

    def seconds_in_turn(loops, repeats):
        for loop in loops.values():
            jax.block_until_ready(loop(jnp.int32(2)))
        return [dict.fromkeys(loops, 1.0)] * repeats

    monkeypatch.setattr("jspec.evaluation.benchmarking.turns.seconds_in_turn", seconds_in_turn)
    target, draft = tiny_models.target(), tiny_models.draft()
    timed = list(time_rounds(target, draft, "prompt_lookup+model", DrafterOptions(), 2, 3))
    assert [one.num_drafts for one, _ in timed] == [0, 2, 2]
    assert all(len(turns) == 3 for _, turns in timed)
