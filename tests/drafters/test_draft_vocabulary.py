"""A draft model whose head is over the most frequent tokens only."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.drafters.model import draft_ids
from jspec.lab.auditing import controls
from jspec.lab.auditing.distribution import FALSE_ALARM, check_distribution
from jspec.lab.auditing.rows import build_drafter
from jspec.models import init_cache, make_apply
from jspec.weights.quantize import quantize
from tests import tiny_models
from tests.cases import slow_unless
from tests.drafters.test_model import observe, run_propose
from tests.lab.auditing.subjects import make_rows, make_subject

SIZE = 70
PROMPT = list(b"why is the sky blue")
REQUEST = jspec.Request(PROMPT)


def test_the_first_ids_and_the_ends_are_kept():
    """Without the ends no draft would end a text; an end beyond the shared ids does not exist."""
    assert draft_ids(3, 10, {1, 7, 5, 12}).tolist() == [0, 1, 2, 5, 7]
    assert draft_ids(10, 10, {9}).tolist() == list(range(10))


def test_counted_tokens_come_before_the_first_ids():
    """A token counted that draft and target do not share is left out."""
    assert draft_ids(4, 10, {9}, frequent=[7, 11, 1, 5]).tolist() == [0, 1, 5, 7, 9]
    assert draft_ids(2, 10, set(), frequent=[7, 1, 5]).tolist() == [1, 7]


def test_the_tokens_of_a_text_are_counted(tmp_path):
    """By count, then by id: of "bbcaadd" the letters a, b and d, which come twice, precede c."""
    path = tmp_path / "text.txt"
    path.write_text("bbcaadd")
    built = make_drafter("model", make_spec(draft_vocab_size=3, draft_vocab_text=str(path)))
    assert built.params["head_ids"].tolist() == [0, *b"abd", 120]


@pytest.mark.parametrize("content", [None, b"\xff"], ids=["missing", "not UTF-8"])
def test_a_text_that_cannot_be_read_is_an_error(content, tmp_path):
    """One line that names the file."""
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"text\.txt: (No such file|expected UTF-8)"):
        make_drafter("model", make_spec(draft_vocab_size=3, draft_vocab_text=str(path)))


def test_a_text_without_a_size_is_an_error():
    """Guards against a text that is silently ignored."""
    with pytest.raises(InputError, match="draft_vocab_size with draft_vocab_text"):
        DrafterOptions(draft_vocab_text="a.txt")


def make_spec(**options):
    """Returns what a drafter over the tiny draft model is built from; text ends late in the ids."""
    config = dataclasses.replace(tiny_models.CONFIG, eos_ids=(0, 120))
    params = tiny_models.draft().params
    limits = DrafterOptions(**options)
    tokenizer = tiny_models.target().tokenizer
    return DrafterSpec(3, config, 126, config, jnp.float32, params, limits, tokenizer=tokenizer)


def propose(drafter, *, temperature, **options):
    """Returns a proposal of eight rows."""
    built = make_drafter(drafter, make_spec(**options))
    last, tokens = np.arange(97, 105), [PROMPT[:4]] * 8
    state = built.drafter.init(8, 64)
    if drafter == "model":
        state = observe(built.drafter, state, tokens, [4] * 8)
    else:
        shown = jnp.asarray(tokens), jnp.zeros((8, 4, 1)), jnp.ones((8, 4), bool)
        state = built.drafter.observe(built.params, state, *shown)
    return run_propose(built.drafter, built.params, state, last, temperature)[0]


@pytest.mark.parametrize(("kind", "is_tied"), [(None, False), ("int4", True)])
def test_the_distribution_is_the_models_own_over_those_tokens(kind, is_tied):
    """Renormalised over the tokens kept, 0 elsewhere; padding of the vocabulary stays out, too."""
    spec = make_spec(draft_vocab_size=SIZE)
    params = dict(spec.draft_params)
    config = dataclasses.replace(spec.draft_config, tie_embeddings=is_tied)
    name = "embedding" if is_tied else "head"
    params[name] = quantize(params[name], (name,), kind, "float32") if kind else params[name]
    built = make_drafter("model", spec._replace(draft_config=config, draft_params=params))
    state = observe(built.drafter, built.drafter.init(1, 64), [PROMPT[:4]], [4])
    proposal, _ = run_propose(built.drafter, built.params, state, PROMPT[4:5], 1.0)
    actual = np.asarray(proposal.probs[0, 0])
    cache = init_cache(config, batch_size=1, capacity=64, dtype=jnp.float32)
    apply = jax.jit(make_apply(config))
    logits = apply(params, jnp.asarray([PROMPT[:5]]), cache)[0][0, -1]
    ids = [*range(SIZE), 120]
    np.testing.assert_allclose(actual[ids], jax.nn.softmax(logits[jnp.asarray(ids)]), atol=1e-5)
    assert np.delete(actual, ids).sum() == 0
    assert 0.02 < jax.nn.softmax(logits)[jnp.asarray(ids)].sum() < 0.98, "nothing to prove"


@pytest.mark.parametrize("temperature", [slow_unless(False, 0.0), 1.0])
def test_hierarchical_drafts_are_those_of_the_model(temperature):
    """Its own loop cuts the vocabulary as the other does."""
    actual, expected = (
        propose(drafter, temperature=temperature, draft_vocab_size=SIZE)
        for drafter in ("hierarchical", "model")
    )
    np.testing.assert_array_equal(actual.tokens, expected.tokens)
    np.testing.assert_allclose(actual.probs, expected.probs, atol=1e-5)
    assert set(np.unique(actual.tokens)) <= {*range(SIZE), 120}
    whole = propose("model", temperature=temperature)
    assert (np.asarray(whole.tokens) >= SIZE).any(), "the whole head would draft others"


def test_coupled_noise_is_keyed_by_the_targets_ids():
    """Guards against noise by the row of the head: answers are plain decoding's, seed by seed."""
    target, draft = tiny_models.target(), tiny_models.draft()
    settings = jspec.SamplingParams(max_new_tokens=40, temperature=1.0, repetition_penalty=1.2)
    options = {"acceptance": "coupled", "num_draft_tokens": 3}
    plain = jspec.Generator(target, drafter="none").generate(REQUEST, settings)
    cut = DrafterOptions(draft_vocab_size=SIZE)
    result = jspec.Generator(target, draft, drafter_options=cut, **options).generate(
        REQUEST, settings
    )
    assert result.token_ids == plain.token_ids
    assert result.stats.num_accepted > 5
    assert (np.asarray(result.token_ids) >= SIZE).any(), "tokens that cannot be drafted come too"


@pytest.mark.slow
def test_claiming_the_whole_distribution_is_rejected():
    """Negative control: drawn among few tokens, reported with the probabilities of all."""
    subject = make_subject("rejection", "model", drafter_options=DrafterOptions())
    right = make_subject("rejection", "model", drafter_options=DrafterOptions(draft_vocab_size=104))
    rows = make_rows(right, rows_per_run=2048)
    check, _ = check_distribution(rows, 2048)
    assert check.has_passed, check.detail
    num_ids = sorted(rows.context.alphabet)[2]  # two of the four tokens that may follow
    wrong = controls.claiming_all(build_drafter(subject).drafter, num_ids=num_ids)
    rows = make_rows(subject, rows_per_run=8192, drafter=wrong)
    check, _ = check_distribution(rows, 8192)
    assert not check.has_passed, check.detail
    assert check.data["p_value"] < FALSE_ALARM


@pytest.mark.parametrize("size", [127, 10_000])
def test_more_tokens_than_there_are_is_an_error(size):
    """One line with both numbers."""
    with pytest.raises(InputError, match=f"at most 126, .* got {size}"):
        make_drafter("model", make_spec(draft_vocab_size=size))


def test_a_drafter_without_a_draft_model_does_not_read_it():
    """Guards against an option that is silently ignored."""
    with pytest.raises(InputError, match="draft_vocab_size with a drafter that reads it"):
        jspec.Generator(
            tiny_models.target(),
            drafter="prompt_lookup",
            drafter_options=DrafterOptions(draft_vocab_size=SIZE),
        )
