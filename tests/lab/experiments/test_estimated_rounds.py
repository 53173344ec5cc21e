"""Teacher-forced acceptance against real rounds of one draft."""

import dataclasses

import numpy as np
import pytest

from jspec.drafters import DrafterOptions
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.lab.analysis.ratios import mean_and_interval
from jspec.lab.experiments.estimates import Estimator
from tests.cases import slow_unless
from tests.tiny_models import CONFIG, draft, make_generator, target


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
        return abs(kept.value - expected.value) / np.hypot(*widths)

    assert deviations() < 5
    assert deviations(draft_temperature=0.3) > 10
