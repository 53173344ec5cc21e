"""Beam search through the Generator: as transformers' `generate`, and with drafts as without."""

import itertools
import json

import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions
from jspec.generation.request import Request, SamplingParams
from jspec.weights.hf import save_hf
from jspec.weights.published import SMOLLM2
from jspec.weights.resolver import load_model
from tests.cases import slow_unless
from tests.models.oracle import config_of, params_of, peaked_llama
from tests.tiny_models import make_generator, make_model, shared_generator, target, with_eos

torch = pytest.importorskip("torch")
import transformers  # noqa: E402

PROMPTS = [list(b"to be, or not to be, or"), [97], list(b"1 2 3 4 1 2 3 4 1 2")]
PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
STOPS = (False, True, "never")


def transformers_beams(model, prompt, settings, eos_ids, **options):
    """Returns (tokens, score) of all beams that transformers returns."""
    config = transformers.GenerationConfig(
        num_beams=settings.num_beams, num_return_sequences=settings.num_beams,
        length_penalty=settings.length_penalty, early_stopping=settings.early_stopping,
        max_new_tokens=settings.max_new_tokens, do_sample=False, eos_token_id=list(eos_ids) or None,
        pad_token_id=0, return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    texts = []
    for row in output.sequences[:, len(prompt) :].tolist():
        ends = [i for i, token in enumerate(row) if token in eos_ids]
        texts.append(row[: ends[0] + 1] if ends else row)
    # Only what has ended early is padded. Greedy decoding has no scores.
    return texts, output.sequences_scores.tolist() if settings.num_beams > 1 else None


def assert_same(result, texts, scores):
    assert [beam.token_ids for beam in result.beams] == texts
    np.testing.assert_allclose([beam.score for beam in result.beams], scores, rtol=1e-5, atol=2e-5)
    assert result.token_ids == texts[0]


@pytest.fixture(scope="module")
def oracle():
    """A tiny Llama of transformers with opinions, two ends that it likes, and a Generator of it."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for so small a model more threads only wait for each other
    model = peaked_llama(vocab_size=128)
    best = SamplingParams(max_new_tokens=8)
    greedy = [transformers_beams(model, prompt, best, ())[0][0] for prompt in PROMPTS]
    ends = greedy[0][5], greedy[2][3]
    copy = make_model(config_of(model), params=params_of(model), name="oracle")
    yield model, ends, make_generator("prompt_lookup", with_eos(copy, *ends))
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("num_beams", [2, slow_unless(False, 4), slow_unless(False, 5)])
def test_beams_are_those_of_transformers(oracle, num_beams):
    """All penalties and stops, beams that end inside; and another value compiles nothing."""
    model, ends, generator = oracle
    reasons, compiled = set(), []
    for number, (penalty, early) in enumerate(itertools.product(PENALTIES, STOPS)):
        prompt = PROMPTS[(number + number // 3) % 3]
        settings = SamplingParams(
            12, num_beams=num_beams, length_penalty=penalty, early_stopping=early
        )
        result = generator.generate(Request(prompt, settings))
        assert_same(result, *transformers_beams(model, prompt, settings, ends))
        reasons |= {beam.finish_reason for beam in result.beams}
        compiled.append(result.stats.compile_seconds)
    assert reasons == {"eos", "length"}
    assert sum(compiled[3:]) == 0


def test_processors_change_log_probabilities_as_in_transformers(oracle):
    """A penalty counts the beam's own drafts and not its neighbours'; ends are put off."""
    model, ends, generator = oracle
    settings = SamplingParams(16, num_beams=3, repetition_penalty=1.3, min_new_tokens=5)
    options = {"repetition_penalty": 1.3, "min_new_tokens": 5}
    for prompt in PROMPTS:
        result = generator.generate(Request(prompt, settings))
        assert_same(result, *transformers_beams(model, prompt, settings, ends, **options))


TREE = {"drafter_options": DrafterOptions(tree_depth=3), "num_draft_tokens": 8}


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        slow_unless(False, "self", {}),
        slow_unless(False, "self", TREE),
        slow_unless(False, "layer_skip", {"drafter_options": DrafterOptions(draft_layers=(0,))}),
        slow_unless(False, "model", TREE),
        slow_unless(False, "hierarchical", {}),
        slow_unless(False, "ngram", {}),
        slow_unless(False, "recycle", {"num_draft_tokens": 2}),
    ],
)
def test_drafts_change_neither_beams_nor_scores(drafter, options):
    """In float32; and rounds take several steps."""
    plain = shared_generator("none")
    generator = make_generator(drafter, **options)
    num_accepted = 0
    settings = SamplingParams(30, num_beams=3, early_stopping="never")
    for prompt in PROMPTS:
        expected = plain.generate(Request(prompt, settings))
        result = generator.generate(Request(prompt, settings))
        beams = expected.beams
        assert_same(result, [beam.token_ids for beam in beams], [beam.score for beam in beams])
        assert [b.text for b in result.beams] == [b.text for b in beams]
        stats = result.stats
        assert expected.stats.target_calls_per_token == 1
        assert stats.num_round_tokens == expected.stats.num_round_tokens
        assert stats.num_round_tokens == stats.num_rounds + stats.num_accepted
        num_accepted += stats.num_accepted
    assert num_accepted > 0


def test_a_beam_request_stands_among_others(oracle):
    """In one list; each is answered as it would be alone, and the record holds all beams."""
    generator = oracle[2]
    wide, narrow = (Request(PROMPTS[0], SamplingParams(10, num_beams=k)) for k in (2, 1))
    results = generator.generate([narrow, wide, narrow])
    alone = [generator.generate(one) for one in (narrow, wide)]
    assert [r.token_ids for r in results] == [alone[i].token_ids for i in (0, 1, 0)]
    record = json.loads(json.dumps(results[1].to_json()))
    assert [one["token_ids"] for one in record["beams"]] == [b.token_ids for b in alone[1].beams]
    assert record["settings"]["num_beams"] == 2
    assert results[0].to_json()["beams"] is None


def test_fewer_tokens_than_beams_give_fewer_beams():
    """Two allowed tokens and one step: two beams, none of them invented."""
    settings = SamplingParams(1, num_beams=4, allowed_token_ids=(5, 6))
    result = shared_generator("none").generate(Request(PROMPTS[0], settings))
    assert sorted(beam.token_ids for beam in result.beams) == [[5], [6]]


def test_a_model_of_nan_fails_in_one_line():
    params = dict(target().params, embedding=target().params["embedding"] * np.float32(np.nan))
    generator = make_generator("none", make_model(params=params))
    generator.engine = shared_generator("none").engine
    with pytest.raises(InputError, match="NaN, or forbade every token, at token 0 of the beams"):
        generator.generate(Request(PROMPTS[0], SamplingParams(4, num_beams=3)))


@pytest.mark.parametrize(
    ("drafter", "options", "num_beams", "message"),
    [
        ("none", {"batch_size": 2}, 2, "expected batch_size 1 with num_beams 2, got 2"),
        *(
            ("prompt_lookup", {"acceptance": rule}, 2, f"as beams are not drawn, got '{rule}'")
            for rule in ("lenient_argmax", "coupled")
        ),
    ],
)
def test_generators_that_cannot_search(drafter, options, num_beams, message):
    generator = make_generator(drafter, **options)
    with pytest.raises(InputError, match=message):
        generator.check(Request([1], SamplingParams(num_beams=num_beams)))


@pytest.mark.slow
def test_beams_have_two_drafts_at_most_where_rows_choose(monkeypatch, tmp_path):
    """By default the number adapts, which beams have no costs for; the beams are the same."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    request = Request(PROMPTS[0], SamplingParams(12, num_beams=3))
    usual = shared_generator("prompt_lookup").generate(request)
    chosen = make_generator("prompt_lookup", num_draft_tokens="auto").generate(request)
    assert [b.token_ids for b in chosen.beams] == [b.token_ids for b in usual.beams]
    assert max(a_round.num_proposed for a_round in chosen.stats.rounds) == 2
    assert not any(tmp_path.glob("costs.json"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_smollm2_has_the_beams_of_transformers_on_fifty_prompts(optimised, tmp_path):
    """The real model, with drafts, in float32; a beam differs only where scores nearly tie."""
    loaded = load_model(SMOLLM2, dtype="float32")
    save_hf(tmp_path / "model", loaded.config, loaded.params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    generator = make_generator("prompt_lookup", loaded)
    settings = SamplingParams(24, num_beams=4)
    for number in range(50):
        text = f"{_TOPICS[number % len(_TOPICS)]} {number + 2}"
        prompt = generator.encode_prompt(text)
        result = generator.generate(Request(prompt, settings))
        texts, scores = transformers_beams(model, prompt, settings, loaded.config.eos_ids)
        np.testing.assert_allclose([b.score for b in result.beams], scores, atol=2e-4)
        for beam, expected, score in zip(result.beams, texts, scores, strict=True):
            is_tied = sum(abs(score - rival) < 2e-4 for rival in scores) > 1
            assert beam.token_ids == expected or is_tied, (number, text)


_TOPICS = (
    "Count from", "Name some animals:", "Repeat the words one two three", "What is ten times",
    "Translate good morning into French, attempt", "Write a function that adds", "Why is the sky",
    "List the planets after number", "Say it again and again:", "Tell me a story about the year",
)  # fmt: skip
