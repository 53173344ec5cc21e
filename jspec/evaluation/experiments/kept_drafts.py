"""How often the drafts of several drafters of one target are accepted, expected and observed.

Expected: the target answers by plain decoding, and alpha = E[sum min(target, draft)] is taken at
the tokens of its answers (see `jspec.evaluation.experiments.estimates`). Observed: it answers with
drafts, from other seeds; a round looks at its drafts up to the first that is rejected.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec.drafters import DrafterOptions, needs_draft_model, without_unread
from jspec.evaluation.analysis.ratios import mean_and_interval
from jspec.evaluation.analysis.theory import expected_tokens
from jspec.evaluation.experiments.estimates import Estimator
from jspec.generation.generator import Generator
from jspec.generation.request import Request
from jspec.generation.result import Result
from jspec.weights.resolver import LoadedModel

_OTHER_SEEDS = 10**6


def measure_kept_drafts(
    requests: Sequence[Request],
    target: LoadedModel,
    draft: LoadedModel | None,
    drafters: Sequence[str],
    options: DrafterOptions,
    *,
    num_draft_tokens: int,
    batch_size: int,
) -> dict[str, Any]:
    """Returns expected and observed acceptance of each drafter; intervals resample requests.

    Args:
      requests: with settings of temperature and filters only.
      target: the model that answers.
      draft: for the drafters that have a model; None if none has.
      drafters: names.
      options: of the drafters; each takes those that it reads.
      num_draft_tokens: drafts a round.
      batch_size: requests answered at a time.

    Returns:
      `num_answers`; `num_tokens`, all but the first of each answer; and `drafters`, by name:
      `alpha`, over the tokens for which the drafter proposes something, `kept`, the accepted share
      of the drafts that a round looked at, and `tokens_per_target_call`, all three with intervals
      (see `Interval`), and `tokens_of_alpha`, the tokens a call that follow from alpha
      (`expected_tokens`).

    Raises:
      InputError: a drafter that lacks something, or a request that cannot be answered.
    """
    estimator, sources = Estimator(target), {}
    for name in drafters:
        own, model = without_unread(name, options), draft if needs_draft_model(name) else None
        speculating = Generator(
            target, model, drafter=name, drafter_options=own, batch_size=batch_size,
            num_draft_tokens=num_draft_tokens,
        )  # fmt: skip
        sources[name] = estimator.make_distribution(name, own, model), speculating
    answers = Generator(target, drafter="none", batch_size=batch_size).generate(list(requests))
    again = [_with_another_seed(request) for request in requests]
    found = {}
    for name, (distribution, speculating) in sources.items():
        sums = [
            estimator.estimate(distribution, one.settings, one.prompt_token_ids, one.token_ids)
            for one in answers
        ]
        columns = (np.array([one[key] for one in sums]) for key in ("sum_overlap", "num_places"))
        alpha = mean_and_interval(*columns)
        found[name] = {
            "alpha": alpha._asdict(),
            "tokens_of_alpha": expected_tokens(min(alpha.value, 1.0), num_draft_tokens),
            **_observed(speculating.generate(again)),
        }
    num_tokens = sum(max(len(answer.token_ids) - 1, 0) for answer in answers)
    return {"num_answers": len(answers), "num_tokens": num_tokens, "drafters": found}


def _with_another_seed(request: Request) -> Request:
    settings = dataclasses.replace(request.settings, seed=request.settings.seed + _OTHER_SEEDS)
    return dataclasses.replace(request, settings=settings)


def _observed(results: Sequence[Result]) -> dict[str, Any]:
    rounds = [result.stats.rounds for result in results]
    kept = np.array([sum(r.num_accepted for r in own) for own in rounds])
    refused = np.array([sum(r.num_accepted < r.num_proposed for r in own) for own in rounds])
    tokens = np.array([result.stats.num_round_tokens for result in results])
    calls = np.array([result.stats.num_target_calls for result in results])
    return {
        "kept": mean_and_interval(kept, kept + refused)._asdict(),
        "tokens_per_target_call": mean_and_interval(tokens, calls)._asdict(),
    }
