"""What each drafter says it has yet to read: tokens that it was shown and did not consume."""

import functools
import pathlib
import tempfile

import jax.numpy as jnp
import pytest

from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.drafters.model import ModelDrafter
from jspec.speculation.control import Control
from tests import layered, tiny, tiny_eagle
from tests.cases import slow_unless
from tests.layered import SUBSET
from tests.speculation.drive import Engine

PROMPTS = [[7, 1, 3], list(range(15))]
WIDTH = 3


@functools.cache
def start(name, layers=None, is_self=False):
    """Returns a drafter, and an engine and its rows after their prompts."""
    draft = layered.params() if is_self else tiny.random_params(layered.CONFIG, seed=1, std=0.4)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "head")
        head = tiny_eagle.save_head(path, layered.CONFIG) if name == "eagle" else None
        spec = DrafterSpec(
            WIDTH, layered.CONFIG, layered.CONFIG.vocab_size, layered.CONFIG, jnp.float32,
            draft, DrafterOptions(draft_layers=layers, draft_head=head),
        )  # fmt: skip
        built = make_drafter(name, spec)
    engine = Engine(
        layered.apply, layered.empty_cache, (layered.params(), built.params), built.drafter,
        capacity=128, max_rounds=1,
    )  # fmt: skip
    return built.drafter, engine, engine.start(PROMPTS, temperature=[0.0, 0.0], seeds=[1, 2])


def lags(drafter, state, kind=0):
    return drafter.lag(state.draft, jnp.full([2], kind, jnp.int32)).tolist()


@pytest.mark.parametrize(
    ("name", "layers", "expected"),
    [
        ("model", None, [8, 16]),  # 2 and 14 tokens, in calls of 8
        slow_unless(False, "hierarchical", None, [8, 16]),
        slow_unless(False, "layer_skip", SUBSET, [8, 16]),
        ("eagle", None, [0, 11]),  # the first call of a round reads 4
    ],
)
def test_a_drafter_lags_until_it_drafts(name, layers, expected):
    """The prompt, less what the first call of a round reads anyway; nothing after a round."""
    drafter, engine, state = start(name, layers)
    assert lags(drafter, state) == expected
    state, _ = engine.advance(state, 1)
    assert lags(drafter, state) == [0, 0]


def test_a_row_has_fed_no_more_than_its_own_drafts():
    """What a neighbour wanted beyond them does not count, nor what a silent row was fed."""
    drafter, _, state = start("model")
    fed, num_tokens = jnp.array([[5, 6, 7], [5, 6, 7]], jnp.int32), jnp.array([1, 3], jnp.int32)
    wanted = jnp.array([True, False])
    after = drafter.remember(state.draft, state.draft.cache, fed, num_tokens, wanted)
    assert after.fed.tolist() == [[5, -1, -1], [-1, -1, -1]]


def test_members_of_a_cascade_lag_each_for_itself():
    """A lookup has nothing to read; the model behind it has the prompt, until its turn comes."""
    drafter, _, state = start("prompt_lookup+model")
    last = len(drafter.kinds) - 1
    assert [kind.drafter for kind in drafter.kinds][-2:] == ["prompt_lookup", "model"]
    assert lags(drafter, state, last) == [8, 16]
    assert lags(drafter, state, last - 1) == [0, 0]
    mixed = drafter.lag(state.draft, jnp.array([last, 0], jnp.int32)).tolist()
    assert mixed == [8, 0]


@pytest.mark.parametrize(("missing", "places"), [
    (0, 0), (1, 8), (8, 8), (9, 16), (16, 16), (17, 64), (64, 64), (80, 80), (81, 128), (200, 200),
])  # fmt: skip
def test_a_model_catches_up_in_calls(missing, places):
    """Wide calls while more than 16 tokens are missing, then narrow ones: what they cost counts."""
    drafter = ModelDrafter(WIDTH, 61, 61, apply=layered.apply, init_cache=layered.empty_cache)
    state = drafter.init(1, 256)
    history = state.history.replace(length=jnp.full([1], missing + 1, jnp.int32))
    assert drafter.lag(state.replace(history=history), jnp.zeros([1], jnp.int32)) == places


@pytest.mark.parametrize("name", ["model", slow_unless(False, "hierarchical")])
def test_a_neighbour_that_wants_more_changes_nothing(name):
    """What a row has yet to read decides what it drafts: it must not depend on the batch.

    The target drafts for itself: one draft of the first row is kept, and 1 or 3 of the second's.
    """
    cached, missed = [], []
    for other in (1, WIDTH):
        drafter, engine, state = start(name, is_self=True)
        control = Control.init(2, kinds=drafter.kinds, numbers=(0, 1, WIDTH))
        for numbers in ([1, other], [0, 0], [0, 0]):
            forced = jnp.asarray(numbers, jnp.int32)[:, None]
            state = state.replace(control=control.replace(forced=forced))
            state, infos = engine.advance(state, 1)
            assert infos.num_accepted[0].tolist() == numbers
        cached.append(state.draft.cache.length[0].item())
        missed.append(lags(drafter, state)[0])
    assert cached[0] == cached[1]
    assert missed[0] == missed[1]
