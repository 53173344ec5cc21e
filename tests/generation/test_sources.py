"""Encoder-decoders through the Generator: the same texts with drafts, beams and neighbours."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters.memory import History
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.models.encoder_decoder import encode, make_source
from jspec.sampling.noise import INDEPENDENT
from jspec.speculation.types import RoundInputs, SourceView
from jspec.weights.hf import load_hf
from jspec.weights.resolver import LoadedModel, check_decoder, have_same_encoder
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.cases import slow_unless
from tests.models.encoder_decoder_checkpoints import VOCAB, make_checkpoint
from tests.speculation.drive import settings_of
from tests.tiny_models import make_model

GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=1.0, seed=5)
SOURCES = [
    np.random.default_rng(i).integers(4, VOCAB, n).tolist() for i, n in enumerate((5, 40, 17))
]


def as_model(folder, name="t5"):
    config, params = load_hf(folder, "float32")
    tokenizer = ByteTokenizer(VOCAB, eos_ids=config.eos_ids)
    return LoadedModel(config, params, tokenizer, name, is_random=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    return make_checkpoint("t5 1.1", folder), as_model(folder)


def disturbed(model):
    """Returns a draft: the same encoder and embedding, a decoder that agrees often."""
    rng = np.random.default_rng(1)

    def disturb(path, leaf):
        is_shared = path[0].key in ("encoder", "embedding")
        noise = 0.02 * rng.normal(size=leaf.shape)
        return leaf if is_shared else leaf + jnp.asarray(noise, jnp.float32)

    params = jax.tree_util.tree_map_with_path(disturb, model.params)
    return dataclasses.replace(model, params=params, name="draft")


def answers(generator, settings):
    return generator.generate([Request(source, settings) for source in SOURCES])


@pytest.fixture(scope="module")
def plain(pair):
    generator = Generator(pair[1], drafter="none")
    return generator, *(
        [result.token_ids for result in answers(generator, settings)]
        for settings in (GREEDY, SAMPLED)
    )


def test_greedy_texts_are_those_of_transformers(pair, plain):
    """Each source alone: where the decoder begins, what it sees, where it ends."""
    torch = pytest.importorskip("torch")
    for source, token_ids in zip(SOURCES, plain[1], strict=True):
        output = pair[0].generate(
            input_ids=torch.tensor([source]), max_new_tokens=24, do_sample=False,
            decoder_start_token_id=3, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        assert output[0, 1:].tolist() == token_ids


@pytest.mark.parametrize(
    ("drafter", "number", "options"),
    [
        ("model", 3, {"draft": "draft"}),
        slow_unless(False, "prompt_lookup", 4, {}),
        slow_unless(False, "model", 1, {"draft": "draft"}),
        slow_unless(False, "layer_skip", 2, {"draft_layers": 1}),
        slow_unless(False, "layer_skip", 3, {"draft_layers": (1,)}),
        slow_unless(False, "hierarchical", 3, {"draft": "draft"}),
        slow_unless(False, "prompt_lookup+model", 3, {"draft": "draft"}),
        slow_unless(False, "suffix", 5, {}),
        slow_unless(False, "suffix", 3, {"tree_depth": 3}),
        slow_unless(False, "model", 3, {"draft": "draft", "tree_depth": 3}),
    ],
    ids=str,
)
def test_drafts_and_neighbours_change_nothing(pair, plain, drafter, number, options):
    """Three sources of other lengths in one batch, greedy and drawn with shared noise."""
    options = {"drafter": drafter, "num_draft_tokens": number, "acceptance": "coupled"} | options
    draft = disturbed(pair[1]) if options.pop("draft", None) else None
    generator = Generator(pair[1], draft, batch_size=3, **options)
    for settings, expected in ((GREEDY, plain[1]), (SAMPLED, plain[2])):
        results = answers(generator, settings)
        assert [result.token_ids for result in results] == expected
        assert sum(result.stats.num_accepted for result in results) > 0 or drafter != "model"
        assert sum(result.stats.num_proposed for result in results) > 0
    assert plain[2] != plain[1]


@pytest.mark.slow
def test_the_target_accepts_its_own_drafts(pair, plain):
    """A draft model that lacked the source, or read another, would be refused."""
    generator = Generator(pair[1], pair[1], drafter="model", num_draft_tokens=3)
    for result, token_ids in zip(answers(generator, GREEDY), plain[1], strict=True):
        assert result.token_ids == token_ids
        assert result.stats.acceptance_rate == 1.0


def test_an_encoded_text_is_the_source_of_the_text(plain):
    """With its end, which a benchmark's sources lacked."""
    generator, text = plain[0], "12 + 34"
    ids = generator.encode_prompt(text)
    assert ids[-1:] == [2]
    rows = [generator.make_row(Request(prompt, GREEDY)) for prompt in (text, ids)]
    assert rows[0].source.tolist() == rows[1].source.tolist() == ids


@pytest.mark.slow
def test_beams_are_those_of_transformers(pair, plain):
    """Beams share the constants of their row."""
    torch = pytest.importorskip("torch")
    settings = SamplingParams(max_new_tokens=12, num_beams=3)
    for source in SOURCES[:2]:
        result = plain[0].generate(Request(source, settings))
        output = pair[0].generate(
            input_ids=torch.tensor([source]), max_new_tokens=12, do_sample=False, num_beams=3,
            decoder_start_token_id=3, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        assert output[0, 1 : 1 + len(result.token_ids)].tolist() == result.token_ids


def test_a_lookup_drafts_from_the_source():
    """What followed in the source is proposed, for as long as the answer copies it."""
    source = jnp.array([[11, 12, 13, 14, 15, 2, 0, 0]])
    view = SourceView(source, jnp.array([6]), jnp.zeros([1, 8, 4]), None)
    drafter = PromptLookupDrafter(num_draft_tokens=3)
    begin = jnp.array([[3]]), jnp.zeros([1, 1, 4]), jnp.ones([1, 1], bool)

    @jax.jit
    def draft():
        state = drafter.read_source(None, drafter.init(1, 32), view)
        started = drafter.observe(None, state, *begin)
        return started.length, propose(drafter, started, 12)

    length, proposed = draft()
    assert length.tolist() == [7]  # padding is no text
    assert proposed.tokens[0, : proposed.num_tokens[0]].tolist() == [13, 14, 15]
    sound = view._replace(inputs=jnp.zeros([1, 8, 4]))
    assert drafter.read_source(None, History.init(1, 32), sound).length.tolist() == [0]


def propose(drafter, state, last_token):
    inputs = RoundInputs(
        jnp.array([last_token]), lambda kind: jnp.full_like(kind, drafter.num_draft_tokens),
        INDEPENDENT.draft_keys(jnp.zeros([1], jnp.uint32), jnp.array([7]), 3),
        settings_of(1, 0.0), None,
    )  # fmt: skip
    return drafter.propose(None, state, inputs)[0]


def test_a_draft_with_another_encoder_runs_its_own(pair):
    """Its constants are those that it would have as a target; a shared encoder gives the same."""
    target, draft = pair[1], disturbed(pair[1])
    encoder = jax.tree.map(lambda leaf: leaf * 1.1, draft.params["encoder"])
    altered = dataclasses.replace(draft, params=draft.params | {"encoder": encoder})
    source, length = jnp.array([SOURCES[2]]), jnp.array([len(SOURCES[2])])
    for model in (draft, altered):
        generator = Generator(target, model, drafter="model", num_draft_tokens=3)
        engine, row = generator.engine, generator.make_row(Request(SOURCES[2], GREEDY))
        state = engine.begin(row, 512, generator.switches([GREEDY]))
        constants = engine.read_source(generator.params, state, row).draft.cache.source
        outputs = encode(model.config, model.params, source, length)
        expected = make_source(model.config, model.params, outputs, length, jnp.float32)
        count = len(SOURCES[2])
        for mine, theirs in zip(constants.keys, expected.keys, strict=True):
            np.testing.assert_allclose(mine[:, :, :count], theirs[:, :, :count], atol=1e-4)


def test_encoders_are_compared_weight_by_weight(pair):
    """One encoder serves both models only if no weight differs."""
    target, draft = pair[1], disturbed(pair[1])
    assert have_same_encoder(target, draft)
    encoder = draft.params["encoder"] | {"relative": draft.params["encoder"]["relative"] + 1e-6}
    altered = dataclasses.replace(draft, params=draft.params | {"encoder": encoder})
    assert not have_same_encoder(target, altered)
    tables = draft.params | {"embedding": draft.params["embedding"] + 1e-6}
    assert not have_same_encoder(target, dataclasses.replace(draft, params=tables))
    assert not have_same_encoder(make_model(), make_model())


def test_what_cannot_be_read_is_refused(pair, plain):
    """A source that is too long or empty, ids that are none, a source for a decoder alone."""
    target, generator = pair[1], plain[0]
    for request, message in (
        (Request([4] * 513), "a source of 1 to 512 tokens, which the encoder reads, got 513"),
        (Request([]), "a source of 1 to 512 tokens"),
        (Request([61]), "source token ids from 0 to 60"),
        (Request([3], source="text"), "the source as a list of token ids"),
        (Request([3], source=[1.5]), "a source's token id"),
    ):
        with pytest.raises(InputError, match=message):
            generator.check(request)
    decoder = make_model()
    with pytest.raises(InputError, match="no source, as tiny has no encoder"):
        Generator(decoder, drafter="none").check(Request([3], source=[1]))
    with pytest.raises(InputError, match="expected a draft like the target, an encoder-decoder"):
        Generator(target, decoder, drafter="model")
    with pytest.raises(InputError, match="a decoder alone in a server, got t5, an encoder-decoder"):
        check_decoder(target, "in a server")
