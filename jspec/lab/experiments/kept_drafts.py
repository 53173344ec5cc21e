"""How often the drafts of several drafters of one target are accepted, expected and observed.

Expected: the target answers by plain decoding, and alpha = E[sum min(target, draft)] is taken at
the tokens of its answers (see `jspec.lab.experiments.estimates`). Observed: it answers with
one draft a round, from other seeds.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec.drafters import DrafterOptions, without_unread
from jspec.generation.generator import Generator
from jspec.generation.request import Request
from jspec.lab.analysis.ratios import mean_and_interval
from jspec.lab.analysis.theory import expected_tokens
from jspec.lab.experiments.estimates import Estimator
from jspec.weights.resolver import LoadedModel

_OTHER_SEEDS = 10**6


def measure_kept_drafts(
    requests: Sequence[Request],
    target: LoadedModel,
    drafters: Sequence[str],
    options: DrafterOptions,
) -> dict[str, Any]:
    """Returns expected and observed acceptance of each drafter; intervals resample requests.

    The settings of requests are temperature and filters only. The drafters have no draft model, and
    each takes the options that it reads.

    Returns:
      `num_answers`; `num_tokens`, all but the first of each answer; and `drafters`, by name:
      `alpha`, over the tokens for which the drafter proposes something, `kept`, the accepted share
      of the drafts, and `tokens_per_target_call`, all three with intervals (see `Interval`), and
      `tokens_of_alpha`, the tokens per call that follow from alpha (`expected_tokens`).

    Raises:
      InputError: a drafter that lacks something, or a request that cannot be answered.
    """
    estimator = Estimator(target)
    answers = Generator(target, drafter="none").generate(list(requests))
    again = [
        dataclasses.replace(
            one, settings=dataclasses.replace(one.settings, seed=one.settings.seed + _OTHER_SEEDS)
        )
        for one in requests
    ]
    found = {}
    for name in drafters:
        own = without_unread(name, options)
        generator = Generator(target, drafter=name, drafter_options=own, num_draft_tokens=1)
        distribution = estimator.make_distribution(name, own)
        sums = [
            estimator.estimate(distribution, one.settings, one.prompt_token_ids, one.token_ids)
            for one in answers
        ]
        columns = (np.array([one[key] for one in sums]) for key in ("sum_overlap", "num_places"))
        alpha = mean_and_interval(*columns)
        stats = [result.stats for result in generator.generate(again)]
        kept, proposed, tokens, calls = (
            np.array([getattr(one, key) for one in stats])
            for key in ("num_accepted", "num_proposed", "num_round_tokens", "num_target_calls")
        )
        found[name] = {
            "alpha": alpha._asdict(),
            "tokens_of_alpha": expected_tokens(min(alpha.value, 1.0), 1),
            "kept": mean_and_interval(kept, proposed)._asdict(),
            "tokens_per_target_call": mean_and_interval(tokens, calls)._asdict(),
        }
    num_tokens = sum(max(len(answer.token_ids) - 1, 0) for answer in answers)
    return {"num_answers": len(answers), "num_tokens": num_tokens, "drafters": found}
