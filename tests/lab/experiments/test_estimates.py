"""Teacher-forced acceptance, against distributions written down once more, and against the real
rounds.

The texts go over several chunks of 64 tokens, and prompt and answer end within a chunk.
"""

import dataclasses
import functools
import json

import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions
from jspec.drafters.tables import count_ngrams, load_table, save_table
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.lab.analysis.ratios import mean_and_interval
from jspec.lab.experiments.estimates import Estimator, ForwardPass
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.cases import slow_unless
from tests.lab.analysis import references
from tests.tiny_models import CONFIG, draft, make_generator, make_model, target

VOCAB = CONFIG.vocab_size
USED = 120  # ids that the padded target's tokenizer knows
LENIENCES = (1.0, 0.5, 0.1)
NUM_BINS = 6
LAYERS = (0,)


@functools.cache
def texts():
    """Returns a prompt and an answer that repeats itself, but not slavishly."""
    rng = np.random.default_rng(0)
    phrases = [rng.integers(1, USED, 9).tolist() for _ in range(5)]
    text = []
    while len(text) < 170:
        text += phrases[rng.integers(5)][: rng.integers(3, 10)] + rng.integers(1, 9, 2).tolist()
    return text[:75], text[75:170]


def whole_text():
    prompt, answer = texts()
    return prompt + answer


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Returns the drafters' options, with a table in which some tokens are missing."""
    path = tmp_path_factory.mktemp("table") / "table.safetensors"
    counted = [[token for token in whole_text() if token != 3], list(range(100))]
    save_table(count_ngrams(counted, VOCAB), path)
    return DrafterOptions(draft_table=str(path), draft_layers=LAYERS)


def table_distributions(options, name, text, temperature):
    table = load_table(options.draft_table)
    distributions = np.tile(table.unigrams.astype(float), [len(text), 1])
    if name == "bigram":
        for row, token in enumerate(text):
            if table.counts[token].any():
                distributions[row] = 0
                np.add.at(distributions[row], table.ids[token], table.counts[token])
    with np.errstate(divide="ignore"):
        return references.softmax(np.log(distributions), temperature)


def expected_distributions(name, options, text, temperature):
    """Returns the draft's distribution after every token, [n v]."""
    if "+" in name:
        first, second = (
            expected_distributions(member, options, text, temperature) for member in name.split("+")
        )
        return np.where(first.sum(axis=1, keepdims=True) > 0, first, second)
    ends = range(1, len(text) + 1)
    if name in ("unigram", "bigram"):
        return table_distributions(options, name, text, temperature)
    if name == "random":
        return references.softmax(np.zeros([len(text), VOCAB]), temperature)
    if name in ("model", "hierarchical"):
        logits = np.array(references.full_logits(draft(), text))
        if options.draft_vocab_size:
            logits[:, options.draft_vocab_size :] = -np.inf
        return references.softmax(logits, temperature)
    if name == "layer_skip":
        logits = references.full_logits(target(), text, options.draft_layers)
        return references.softmax(logits, temperature)
    if name == "prompt_lookup":
        return references.one_hot([references.look_up(text, end) for end in ends], VOCAB)
    if options.ngram_probs == "deterministic":
        return references.one_hot([references.most_frequent(text, end) for end in ends], VOCAB)
    return references.count_distributions(text, ends, VOCAB, temperature)


def run(name, options, settings, model=None, **kwargs):
    """Returns the record of the text."""
    estimator = Estimator(model or target(), leniences=LENIENCES, num_bins=NUM_BINS)
    draft_model = draft() if {"model", "hierarchical"} & set(name.split("+")) else None
    distribution = estimator.make_distribution(name, options, kwargs.get("draft", draft_model))
    return estimator.estimate(distribution, settings, *texts())


NAMES = ["unigram", "bigram", "random", "model", "model few", "hierarchical", "layer_skip",
         "prompt_lookup", "ngram", "ngram sampled", "prompt_lookup+unigram",
         "ngram+model"]  # fmt: skip
# At temperature 0 all that is read is one-hot: one of each way to read it.
CELLS = [(name, 0.6) for name in NAMES]
CELLS += [(name, 0.0) for name in ("unigram", "model", "prompt_lookup", "ngram+model")]
SILENT = {"prompt_lookup", "ngram", "ngram sampled"}


@pytest.mark.parametrize(("name", "temperature"), CELLS)
def test_the_record_is_that_of_the_distributions(name, temperature, options):
    """Sums, bins and lenience of every drafter, in float64 from one pass over the whole text.

    Guards against a distribution one token early or late, a prompt's place counted, a chunk's cache
    lost, a temperature on one side only, a silent drafter's places counted.
    """
    if name == "ngram sampled":
        options = dataclasses.replace(options, ngram_probs="sampled")
    if name == "model few":
        options = dataclasses.replace(options, draft_vocab_size=90)
    options = dataclasses.replace(options, lookup_min_match=1)  # in a cascade too
    name = name.split()[0]
    prompt, answer = texts()
    text, first = prompt + answer, len(prompt)
    logits = references.full_logits(target(), text)
    places = slice(first, len(text) - 1)
    p = references.softmax(logits, temperature)[places]
    probs = references.softmax(logits)[places]
    q = expected_distributions(name, options, text, temperature)[places]
    here = q.sum(axis=1) > 0
    record = run(name, options, SamplingParams(temperature=temperature))
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["num_tokens"] == len(answer) - 1
    assert record["num_places"] == here.sum()
    overlap = np.minimum(p, q).sum(axis=1)[here]
    assert record["sum_overlap"] == pytest.approx(overlap.sum(), rel=1e-3, abs=1e-4)
    entropy = -(probs * np.log(np.maximum(probs, 1e-300))).sum(axis=1)[here]
    check_bins(record["entropy"], entropy, overlap)
    check_lenience(record["lenience"], p[here], probs[here], q[here], temperature)
    is_sampled = name not in SILENT or options.ngram_probs == "sampled"
    assert record["distribution"] == ("sampled" if is_sampled else "deterministic")


def check_bins(bins, entropy, overlap):
    """Holds the bins to numpy's histogram."""
    edges = np.linspace(0, np.log(VOCAB), NUM_BINS + 1)
    np.testing.assert_allclose(bins["edges"], edges)
    np.testing.assert_array_equal(bins["counts"], np.histogram(entropy, edges)[0])
    sums = np.histogram(entropy, edges, weights=overlap)[0]
    np.testing.assert_allclose(bins["sums"], sums, rtol=1e-3, atol=1e-4)


def check_lenience(shares, p, probs, q, temperature):
    """Holds acceptance and total variation to the rules' definitions (A.5)."""
    assert [share["lenience"] for share in shares] == list(LENIENCES)
    for share in shares:
        if temperature > 0:
            kept = np.minimum(q, p / share["lenience"])
            residual = np.maximum(p - q, 0)
            total = residual.sum(axis=1, keepdims=True)
            residual = np.where(total > 1e-12, residual / np.maximum(total, 1e-12), p)
        else:
            best = probs.max(axis=1, keepdims=True)
            kept, residual = q * (probs >= share["lenience"] * best), p
        emitted = kept + (1 - kept.sum(axis=1, keepdims=True)) * residual
        variation = np.abs(emitted - p).sum() / 2
        assert share["sum_acceptance"] == pytest.approx(kept.sum(), rel=1e-3, abs=1e-4)
        assert share["sum_total_variation"] == pytest.approx(variation, rel=1e-3, abs=2e-4)


def test_a_draft_that_is_the_target_keeps_everything():
    """At every place, and lenience changes nothing."""
    record = run("model", DrafterOptions(), SamplingParams(temperature=0.6), draft=target())
    assert record["num_places"] == record["num_tokens"] == 94
    assert record["sum_overlap"] == pytest.approx(94, abs=1e-3)
    for one in record["lenience"]:
        assert one["sum_acceptance"] == pytest.approx(94, abs=1e-3)
        assert one["sum_total_variation"] < 1e-3


def likeliest(probs, number):
    """Returns distributions cut to this many tokens."""
    probs = np.where(probs >= np.sort(probs)[:, -number, None], probs, 0)
    return probs / probs.sum(axis=1, keepdims=True)


def test_filters_hold_on_both_sides(options):
    """Those of the settings; a draft's own are the draft's alone."""
    text = whole_text()
    places = slice(len(texts()[0]), len(text) - 1)
    p, q = (references.full_logits(model(), text)[places] for model in (target, draft))
    target_probs, draft_probs = references.softmax(p), references.softmax(q)
    for settings, sides in (
        ({"top_k": 2}, (likeliest(target_probs, 2), likeliest(draft_probs, 2))),
        ({"draft_temperature": 0.3}, (target_probs, references.softmax(q, 0.3))),
        ({"draft_top_k": 2}, (target_probs, likeliest(draft_probs, 2))),
    ):
        record = run("model", options, SamplingParams(temperature=1, **settings))
        assert record["sum_overlap"] == pytest.approx(np.minimum(*sides).sum(), rel=1e-3), settings


def test_padding_of_the_vocabulary_is_never_drafted(options):
    """A target whose tokenizer knows 120 of 128 ids: random drafts are uniform over those."""
    model = make_model(tokenizer=ByteTokenizer(USED, eos_ids=CONFIG.eos_ids))
    record = run("random", options, SamplingParams(temperature=1), model)
    text = whole_text()
    p = references.softmax(references.full_logits(model, text), size=USED)
    places = slice(len(texts()[0]), len(text) - 1)
    expected = np.minimum(p, 1 / USED)[places, :USED].sum()
    assert record["sum_overlap"] == pytest.approx(expected, rel=1e-3)
    assert record["entropy"]["edges"][-1] == pytest.approx(np.log(USED))


def test_a_drafter_that_is_unsure_says_nothing(options):
    """Only where its distribution's best token is likely enough does it propose."""
    sure = dataclasses.replace(options, draft_confidence=0.5)
    record = run("model", sure, SamplingParams(temperature=1))
    text = whole_text()
    q = references.softmax(references.full_logits(draft(), text))
    here = q[len(texts()[0]) : len(text) - 1].max(axis=1) >= 0.5
    assert 0 < record["num_places"] == here.sum() < 94


def test_one_pass_of_the_target_serves_all_drafters(monkeypatch, options):
    """Guards against a pass a drafter, and against the logits of another text."""
    passes, run_pass = [], ForwardPass.logits
    monkeypatch.setattr(ForwardPass, "logits", lambda *args: passes.append(1) or run_pass(*args))
    estimator, (prompt, answer) = Estimator(target()), texts()
    unigram, lookup = (
        estimator.make_distribution(n, options) for n in ("unigram", "prompt_lookup")
    )
    estimate, settings = estimator.estimate, SamplingParams(temperature=1)
    first = [estimate(distribution, settings, prompt, answer) for distribution in (unigram, lookup)]
    assert len(passes) == 3  # chunks of 64 in 169 tokens
    estimate(unigram, settings, prompt, answer[:50])
    assert estimate(unigram, settings, prompt, answer) == first[0]
    assert len(passes) == 3 + 2 + 3


@pytest.mark.parametrize("answer", [[], [5]])
def test_a_short_answer_has_no_places(answer, options):
    """The first token is the prefill's, and no draft comes before it."""
    estimator = Estimator(target(), leniences=LENIENCES, num_bins=2)
    distribution = estimator.make_distribution("unigram", options)
    record = estimator.estimate(distribution, SamplingParams(temperature=1), [1, 2], answer)
    assert record["num_tokens"] == record["num_places"] == record["sum_overlap"] == 0
    assert record["entropy"]["counts"] == [0, 0]
    assert [one["sum_acceptance"] for one in record["lenience"]] == [0, 0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.make_distribution("none"), "expected a drafter that drafts"),
        (lambda e: e.make_distribution("model"), "expects a draft model"),
        (lambda e: e.make_distribution("unigram", draft=draft()), "expects a drafter among model"),
        (lambda e: e.make_distribution("unigram"), "expects a table"),
        (lambda e: e.make_distribution("telepathy"), "expected a drafter among"),
    ],
)
def test_what_cannot_be_estimated_is_refused(call, message):
    """One clear line."""
    with pytest.raises(InputError, match=message):
        call(Estimator(target()))


@pytest.mark.parametrize(
    "name",
    [
        slow_unless(name in ("prompt_lookup", "ngram+model"), name)
        for name in ("model", "layer_skip", "prompt_lookup", "ngram", "ngram+model")
    ],
)
def test_a_walk_over_the_positions_gives_the_real_rounds(name):
    """At temperature 0, round for round, with one draft a round.

    An accepted draft is followed by a token that was not drafted. Guards against drafts that the
    real drafter would not make there, whatever the text.
    """
    options = DrafterOptions(draft_layers=(0,) if name == "layer_skip" else None)
    drafted = draft() if "model" in name.split("+") else None
    fixed = {"num_draft_tokens": 1, "drafter_options": options}
    generator = Generator(target(), drafted, drafter=name, **fixed)
    estimator = Estimator(target())
    distribution = estimator.make_distribution(name, options, drafted)
    num_kept = 0
    for seed in range(4):
        prompt = np.random.default_rng(seed).integers(1, CONFIG.vocab_size, 20).tolist()
        answer = generator.generate(Request(prompt, SamplingParams(100)))
        figures = estimator.figures(distribution, SamplingParams(), prompt, answer.token_ids)
        walk, position = [], 0
        while position < len(figures.overlap):
            kept = int(figures.overlap[position])
            walk.append((int(figures.is_proposed[position]), kept))
            position += 1 + kept
        counts = [(a_round.num_proposed, a_round.num_accepted) for a_round in answer.stats.rounds]
        assert counts[:-1] == walk[: len(counts) - 1]  # the last one may have no space for a draft
        num_kept += sum(kept for _, kept in walk)
    assert num_kept > 20


NUM_ANSWERS, NUM_NEW = 192, 40


def answers_of(drafter, first_seed, **options):
    """Returns answers at temperature 1 to their own prompts."""
    generator = make_generator(drafter, batch_size=32, max_seq_len=80, **options)
    rng = np.random.default_rng(1)
    prompts = rng.integers(1, CONFIG.vocab_size, (NUM_ANSWERS, 6)).tolist()
    return generator.generate(
        [
            Request(prompt, SamplingParams(NUM_NEW, temperature=1, seed=first_seed + index))
            for index, prompt in enumerate(prompts)
        ]
    )


def estimate_mean(records):
    sums, counts = (np.array([r[key] for r in records]) for key in ("sum_overlap", "num_places"))
    return mean_and_interval(sums, counts)


@pytest.mark.slow
def test_the_estimate_is_what_real_rounds_keep():
    """192 plain answers, 192 by rounds of one draft: one share, within 5 standard deviations.

    (Odds of a false alarm below one in a million.) Guards against an estimate of something else;
    the same of a drafter of another temperature is refused.
    """
    estimator = Estimator(target())
    distribution = estimator.make_distribution("model", draft=draft())
    plain = answers_of("none", 10**6)
    observed = [answer.stats for answer in answers_of("model", 0, num_draft_tokens=1)]
    kept = mean_and_interval(
        np.array([s.num_accepted for s in observed]), np.array([s.num_proposed for s in observed])
    )

    def deviations(**changes):
        records = [
            estimator.estimate(
                distribution,
                dataclasses.replace(answer.settings, **changes),
                answer.prompt_token_ids,
                answer.token_ids,
            )
            for answer in plain
        ]
        expected = estimate_mean(records)
        widths = [(interval.high - interval.low) / (2 * 1.96) for interval in (kept, expected)]
        return abs(kept.median - expected.median) / np.hypot(*widths)

    assert deviations() < 5
    assert deviations(draft_temperature=0.3) > 10
