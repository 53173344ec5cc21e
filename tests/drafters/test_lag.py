"""What each drafter says it has yet to read: tokens that it was shown and did not consume."""

import jax.numpy as jnp
import pytest

from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.speculation.types import lag_of
from tests import layered, tiny, tiny_eagle
from tests.layered import SUBSET
from tests.speculation.drive import Engine

PROMPTS = [[7, 1, 3], list(range(15))]
WIDTH = 3


def start(name, folder, layers=None):
    """Returns a drafter, and an engine and its rows behind their prompts."""
    head = tiny_eagle.save_head(folder / "head", layered.CONFIG) if name == "eagle" else None
    spec = DrafterSpec(
        WIDTH, layered.CONFIG, layered.CONFIG.vocab_size, layered.CONFIG, jnp.float32,
        tiny.random_params(layered.CONFIG, seed=1, std=0.4),
        DrafterOptions(draft_layers=layers, draft_head=head),
    )  # fmt: skip
    built = make_drafter(name, spec)
    engine = Engine(
        layered.apply, layered.empty_cache, (layered.params(), built.params), built.drafter,
        capacity=128, max_rounds=1,
    )  # fmt: skip
    return built.drafter, engine, engine.start(PROMPTS, temperature=[0.0, 0.0], seeds=[1, 2])


def lags(drafter, state, kind=0):
    return lag_of(drafter, state.draft, jnp.full([2], kind, jnp.int32)).tolist()


@pytest.mark.parametrize(
    ("name", "layers", "read_anyway"),
    [
        ("model", None, 1),
        ("hierarchical", None, 1),
        ("layer_skip", SUBSET, 1),
        ("eagle", None, WIDTH + 1),
    ],
)
def test_a_drafter_lags_until_it_drafts(tmp_path, name, layers, read_anyway):
    """The prompt, less what the first call of a round reads anyway; nothing after a round."""
    drafter, engine, state = start(name, tmp_path, layers)
    assert lags(drafter, state) == [max(len(prompt) - read_anyway, 0) for prompt in PROMPTS]
    state, _ = engine.advance(state, 1)
    assert lags(drafter, state) == [0, 0]


def test_members_of_a_cascade_lag_each_for_itself(tmp_path):
    """A lookup has nothing to read; the model behind it has the prompt, until its turn comes."""
    drafter, _, state = start("prompt_lookup+model", tmp_path)
    last = len(drafter.kinds) - 1
    assert [kind.drafter for kind in drafter.kinds][-2:] == ["prompt_lookup", "model"]
    assert lags(drafter, state, last) == [len(prompt) - 1 for prompt in PROMPTS]
    assert lags(drafter, state, last - 1) == [0, 0]
    mixed = lag_of(drafter, state.draft, jnp.array([last, 0], jnp.int32)).tolist()
    assert mixed == [len(PROMPTS[0]) - 1, 0]
