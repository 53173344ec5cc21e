"""Trees of certain drafts, of one drafter and of several together, through whole rounds."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.drafters.cascade import CascadeDrafter, MergedCascadeDrafter
from jspec.drafters.registry import check_options
from tests import tiny
from tests.drafters.test_dynamic_tree import paths_of
from tests.speculation import drive
from tests.speculation.drive import Engine

SIZE, DEPTH = 7, 3
VOCAB = tiny.CONFIG.vocab_size
REPEATING = [[4, 9, 23, 4, 9, 23, 4, 9, 23, 4, 9], [5, 9, 8, 3, 9, 7, 2, 9, 7, 4, 9]]


def build(name, pair, number=SIZE, **options):
    """Returns the drafter of that name with its parameters."""
    options = DrafterOptions(**{"tree_depth": DEPTH, "tree_branches": 2} | options)
    spec = DrafterSpec(number, tiny.CONFIG, VOCAB, tiny.CONFIG, jnp.float32, pair.draft, options)
    return make_drafter(name, spec)


def propose(drafter, params, state, last, limit=SIZE):
    """Returns the proposal, and the new state."""
    return drive.propose(None, drafter, params, state, last, limit)


@pytest.fixture(scope="module")
def cascade(tiny_pair):
    """Returns lookup and model as one tree, its parameters, and the state after two prompts."""
    drafter, params = build("prompt_lookup+model", tiny_pair)
    model_params = tiny_pair.target, params
    engine = Engine(tiny_pair.apply, tiny.empty_cache, model_params, drafter, max_rounds=2)
    return drafter, params, engine.start(REPEATING).draft


def test_members_share_the_tree_by_their_scores(cascade):
    """The second row's match is short: its nodes are the best of both members'."""
    drafter, params, state = cascade
    proposal, _ = propose(drafter, params, state, [23, 9])
    scores = {}
    for member, own_params, member_state in zip(drafter.members, params, state, strict=True):
        alone, _ = propose(member, own_params, member_state, [23, 9])
        for path, score in zip(paths_of(alone, 1), alone.scores[1].tolist(), strict=False):
            scores[tuple(path)] = max(scores.get(tuple(path), -np.inf), score)
    best = sorted(scores, key=lambda path: -scores[path])[:SIZE]
    assert len(scores) > SIZE
    assert {tuple(path) for path in paths_of(proposal, 1)} == set(best)
    # What is kept of both decides whether the model, which costs more, is asked again.
    assert drafter.kinds[int(proposal.kind[1])].drafter == "model"


def test_where_one_is_sure_the_next_is_not_asked(cascade):
    """The first row repeats itself: the model neither runs nor reads there."""
    drafter, params, state = cascade
    proposal, new = propose(drafter, params, state, [23, 9])
    assert paths_of(proposal, 0)[:3] == [[4], [4, 9], [4, 9, 23]]
    assert drafter.kinds[int(proposal.kind[0])].drafter == "prompt_lookup"
    assert new[1].cache.length[0] == 0
    assert new[1].cache.length[1] > 0


def test_a_member_that_is_unsure_is_known_as_silent(cascade, tiny_pair):
    """Guards against a model that runs for nothing beside a lookup, and is asked for ever."""
    drafter, params = build("prompt_lookup+model", tiny_pair, draft_confidence=0.999)
    proposal, _ = propose(drafter, params, cascade[2], [23, 9])
    names = [drafter.kinds[int(kind)].drafter for kind in proposal.kind]
    assert names == ["prompt_lookup", "prompt_lookup"]
    assert (proposal.num_tokens > 0).all()
    # In the first row, where the lookup is sure, it was not asked.
    assert proposal.silent[:, -1].tolist() == [False, True]
    assert not propose(*cascade, [23, 9])[0].silent[:, -1].any()


def test_limits_hold_for_all_members_together(cascade):
    """Guards against members that each keep to the limit, and together do not."""
    drafter, params, state = cascade
    whole, _ = propose(drafter, params, state, [23, 9])
    for limit in (0, 2, 5):
        proposal, _ = propose(drafter, params, state, [23, 9], limit)
        assert proposal.num_tokens.tolist() == [min(limit, int(n)) for n in whole.num_tokens]


def test_what_is_drawn_is_not_merged(tiny_pair):
    """A drawn tree, or a chain that is drawn, has the row alone."""
    assert type(build("prompt_lookup+model", tiny_pair)[0]) is MergedCascadeDrafter
    for name, options in (
        ("prompt_lookup+model", {"tree_draws": "with", "tree_branches": 3}),
        ("prompt_lookup+random", {}),
        ("prompt_lookup+suffix", {"tree_depth": 0, "tree_branches": 3}),
    ):
        assert type(build(name, tiny_pair, **options)[0]) is CascadeDrafter
    drawn, _ = build("prompt_lookup+model", tiny_pair, tree_draws="with", tree_branches=3)
    assert [getattr(member, "tree_depth", 0) for member in drawn.members] == [0, DEPTH]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("suffix+recycle", {"tree_draws": "with"}, r"expected tree_draws with a drafter that"),
        ("ngram", {}, r"expected tree_depth with a drafter that reads it \(model, prompt_lookup"),
        ("hierarchical", {}, r"expected tree_depth with a drafter that reads it"),
    ],
)
def test_who_cannot_draft_such_a_tree_says_so(name, options, message):
    """In one line."""
    with pytest.raises(InputError, match=message):
        check_options([name], DrafterOptions(tree_depth=DEPTH, **options))


@pytest.mark.parametrize("name", ["prompt_lookup", "suffix", "recycle"])
def test_fewer_drafts_than_levels(name, tiny_pair):
    """As for trees that grow."""
    with pytest.raises(InputError, match=r"at least tree_depth, 3; got 2"):
        build(name, tiny_pair, number=2)


def test_guesses_inside_a_draft_model_stay_a_chain(tiny_pair):
    """The cascade's tree is the outer lookup's alone."""
    drafter, _ = build("prompt_lookup+hierarchical", tiny_pair)
    assert type(drafter) is CascadeDrafter
    assert drafter.members[1].inner.tree_depth == 0
