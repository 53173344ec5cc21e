"""Heads on the last hidden state: their chains, what they remember, and parity."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jspec.drafters import CascadeDrafter, DrafterOptions, DrafterSpec, make_drafter
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.errors import InputError
from jspec.speculation.noise import Purpose, round_keys
from jspec.speculation.types import TargetView
from tests import tiny, tiny_eagle, tiny_medusa
from tests.speculation.drive import Engine, settings_of

WIDTH = 3
LENGTHS = np.array([40, 17, 3])
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]


@pytest.fixture(scope="module")
def heads(tiny_pair):
    return tiny_medusa.params_for(tiny_pair)


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).integers(0, 61, (len(LENGTHS), 48)).astype(np.int32)


@pytest.fixture(scope="module")
def observed(tiny_pair, heads, text):
    """Returns the state that has seen another number of tokens of each row, in blocks of 5."""
    drafter = tiny_medusa.drafter(WIDTH)
    text = jnp.asarray(text)
    outputs = jax.jit(
        lambda tokens: tiny_pair.apply(
            tiny_pair.target, tokens, tiny.empty_cache(*tokens.shape),
            hidden_layers=drafter.hidden_layers,
        )[1]
    )(text)  # fmt: skip
    state = drafter.init(len(LENGTHS), text.shape[1])
    for start in range(0, LENGTHS.max(), 5):
        valid = jnp.arange(5) < jnp.asarray(LENGTHS - start)[:, None]
        block = slice(start, start + 5)
        state = drafter.observe(heads, state, text[:, block], outputs[:, block], valid)
    return state


def propose(pair, heads, state, last, limit, temperature=0.0, **options):
    """Proposes with seed 0 for every row."""
    drafter = tiny_medusa.drafter(WIDTH, **options)

    @jax.jit
    def run(heads, state, last, limit):
        zeros = jnp.zeros_like(last)
        keys = round_keys(zeros.astype(jnp.uint32), zeros, Purpose.DRAFT, WIDTH)
        return drafter.propose(
            heads, state, last, limit=lambda kind: limit + kind, rng_keys=keys,
            settings=settings_of(len(LENGTHS), temperature),
            view=TargetView(pair.target, pair.apply, None),
        )[0]  # fmt: skip

    return run(heads, state, jnp.asarray(last), jnp.asarray(limit, jnp.int32))


def said_after(pair, heads, text):
    """Returns the logits of all heads for every row, [b h v], and the newest tokens."""
    logits = [
        tiny_medusa.logits_after(pair, heads, text[row, : length + 1].tolist())
        for row, length in enumerate(LENGTHS)
    ]
    return np.stack(logits)[:, :WIDTH], text[np.arange(len(LENGTHS)), LENGTHS]


def test_drafts_are_what_the_heads_say(tiny_pair, heads, text, observed):
    """Rows of different lengths, whose last tokens came in blocks that were partly padding."""
    logits, last = said_after(tiny_pair, heads, text)
    proposal = propose(tiny_pair, heads, observed, last, [WIDTH] * 3)
    np.testing.assert_array_equal(proposal.tokens, logits.argmax(axis=-1))
    np.testing.assert_array_equal(proposal.num_tokens, [WIDTH] * 3)


def test_the_law_is_each_heads_softmax(tiny_pair, heads, text, observed):
    """At a temperature; a token of head i is drawn from the law that is named for it."""
    logits, last = said_after(tiny_pair, heads, text)
    proposal = propose(tiny_pair, heads, observed, last, [WIDTH] * 3, temperature=0.7)
    expected = scipy.special.softmax(logits / 0.7, axis=-1)
    np.testing.assert_allclose(proposal.probs, expected, rtol=1e-3, atol=1e-6)


def test_rows_get_as_many_drafts_as_are_wanted(tiny_pair, heads, text, observed):
    """None among them."""
    last = text[np.arange(len(LENGTHS)), LENGTHS]
    proposal = propose(tiny_pair, heads, observed, last, [0, 2, 1])
    np.testing.assert_array_equal(proposal.num_tokens, [0, 2, 1])


def test_an_unsure_head_ends_the_chain(tiny_pair, heads, text, observed):
    """Where its law's largest probability is below the confidence, before it is drawn from."""
    logits, last = said_after(tiny_pair, heads, text)
    largest = scipy.special.softmax(logits, axis=-1).max(axis=-1)
    confidence = float(np.median(largest))
    options = {"temperature": 1.0, "min_confidence": confidence}
    proposal = propose(tiny_pair, heads, observed, last, [WIDTH] * 3, **options)
    expected = np.cumprod(largest >= confidence, axis=-1).sum(axis=-1)
    np.testing.assert_array_equal(proposal.num_tokens, expected)
    assert len(set(expected.tolist())) > 1


def engine_of(pair, drafter, params, rule="rejection", **options):
    """Returns the compiled rounds of a drafter."""
    return Engine(pair.apply, tiny.empty_cache, (pair.target, params), drafter, rule, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_after_many_rounds_it_remembers_the_newest_output(tiny_pair, heads, temperature):
    """However many drafts were kept, and of a row that is done: that of its last token."""
    drafter = tiny_medusa.drafter(WIDTH)
    engine = engine_of(tiny_pair, drafter, heads)
    lengths = np.array([60, 20, 41])
    result = engine.generate(PROMPTS, temperature=temperature, max_length=lengths)
    assert result.num_accepted.sum() > 0
    for row, prompt in enumerate(PROMPTS):
        tokens = jnp.asarray([*prompt, *result.tokens[row]][:-1], jnp.int32)[None]
        cache = tiny.empty_cache(*tokens.shape)
        layers = drafter.hidden_layers
        outputs = tiny_pair.apply(tiny_pair.target, tokens, cache, hidden_layers=layers)[1]
        np.testing.assert_allclose(result.state.draft[row], outputs[0, -1, 0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("rule", "is_member"), [("rejection", False), ("coupled", True)])
def test_greedy_output_is_plain_output(tiny_pair, heads, rule, is_member):
    """Alone, and behind a lookup and before a head of EAGLE, which observes other layers."""
    plain = engine_of(tiny_pair, None, None)
    drafter, params = tiny_medusa.drafter(WIDTH), heads
    if is_member:
        unsure = tiny_medusa.drafter(WIDTH, min_confidence=0.5)
        members = PromptLookupDrafter(2, min_match=2), unsure, tiny_eagle.drafter(WIDTH)
        drafter, params = CascadeDrafter(members), (None, heads, tiny_eagle.params())
    engine = engine_of(tiny_pair, drafter, params, rule)
    result = engine.generate(PROMPTS, max_length=60)
    assert result.tokens == plain.generate(PROMPTS, max_length=60).tokens
    names = [drafter.kinds[kind].drafter for kind in result.infos.kind[result.num_accepted > 0]]
    assert "medusa" in names


def spec_of(folder, num_draft_tokens=3, **changes):
    """Returns what the drafter of a folder is built from."""
    config = dataclasses.replace(tiny.CONFIG, **changes)
    options = DrafterOptions(draft_head=None if folder is None else str(folder))
    return DrafterSpec(num_draft_tokens, config, 61, None, jnp.float32, options=options)


def test_there_are_no_more_drafts_than_heads(tmp_path):
    """Four heads make chains of four."""
    tiny_medusa.save_head(tmp_path / "head", tiny.CONFIG)
    for wanted, got in ((2, 2), (7, 4)):
        built = make_drafter("medusa", spec_of(tmp_path / "head", wanted))
        assert built.drafter.num_draft_tokens == got
        assert built.drafter.kinds[0].most == got


def test_heads_are_asked_for(tmp_path):
    """And an empty folder, and a head of another kind, are named."""
    with pytest.raises(InputError, match="'medusa' expects draft_head"):
        make_drafter("medusa", spec_of(None))
    with pytest.raises(InputError, match=r"config\.json: missing; expected a folder with heads"):
        make_drafter("medusa", spec_of(tmp_path))
    tiny_eagle.save_head(tmp_path / "eagle", tiny.CONFIG)
    with pytest.raises(InputError, match=r"expected heads of Medusa; it has no medusa_num_heads"):
        make_drafter("medusa", spec_of(tmp_path / "eagle"))
