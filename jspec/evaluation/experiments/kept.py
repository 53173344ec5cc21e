"""How often drafts are kept, in theory and in fact, by several drafters of one target.

In theory the target answers by plain decoding, and alpha = E[sum min(target, draft)] is taken at
the tokens of its answers (see `jspec.evaluation.experiments.estimates`). In fact it answers with
drafts, from other seeds: a round looks at its drafts up to the first that is not kept.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jspec.drafters import DrafterOptions, needs_draft_model, without_unread
from jspec.evaluation.analysis.improvement import expected_tokens
from jspec.evaluation.analysis.intervals import mean_and_interval
from jspec.evaluation.experiments.estimates import Estimator
from jspec.generation.generator import Generator
from jspec.generation.request import Request, Result
from jspec.weights.resolver import LoadedModel

_OTHER_SEEDS = 10**6


class KeptDrafts:
    """Measures several drafters on the same requests."""

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | None,
        drafters: Sequence[str],
        options: DrafterOptions,
        *,
        num_draft_tokens: int,
        batch_size: int,
    ) -> None:
        """Prepares the models.

        Args:
          target: the model whose answers are wanted.
          draft: for the drafters that have a model; None if none has.
          drafters: names.
          options: of the drafters; each takes those that it reads.
          num_draft_tokens: a round.
          batch_size: requests answered at a time.

        Raises:
          InputError: a drafter that lacks something, or a number out of range.
        """
        self._num_draft_tokens = num_draft_tokens
        self._plain = Generator(target, drafter="none", batch_size=batch_size)
        self._estimator = Estimator(target)
        self._distributions, self._speculating = {}, {}
        for name in drafters:
            own, model = without_unread(name, options), draft if needs_draft_model(name) else None
            self._distributions[name] = self._estimator.make_distribution(name, own, model)
            self._speculating[name] = Generator(
                target, model, drafter=name, drafter_options=own, batch_size=batch_size,
                num_draft_tokens=num_draft_tokens,
            )  # fmt: skip

    def measure(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Returns what each drafter comes to; intervals resample requests.

        Args:
          requests: with settings of temperature and filters only.

        Returns:
          `num_answers`; `num_tokens`, all of theirs but the first ones, over which alpha is the
          mean where the drafter had something to say; and `drafters`, by name: `alpha`, `kept`, the
          share of the drafts that a round looked at, and `tokens_per_target_call`, all three with
          intervals (see `Interval`), and `tokens_of_alpha`, the tokens a call that alpha lets
          expect (`expected_tokens`).

        Raises:
          InputError: a request that cannot be answered.
        """
        answers = self._plain.generate(list(requests))
        sums = [self._sums(answer) for answer in answers]
        again = [_with_another_seed(request) for request in requests]
        found = {
            name: self._expected([one[name] for one in sums]) | _observed(generator.generate(again))
            for name, generator in self._speculating.items()
        }
        num_tokens = sum(max(len(answer.token_ids) - 1, 0) for answer in answers)
        return {"num_answers": len(answers), "num_tokens": num_tokens, "drafters": found}

    def _sums(self, answer: Result) -> dict[str, Any]:
        """Returns each drafter's sums over one answer."""
        ids = answer.prompt_token_ids, answer.token_ids
        return {
            name: self._estimator.estimate(distribution, answer.settings, *ids)
            for name, distribution in self._distributions.items()
        }

    def _expected(self, sums: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        columns = (np.array([one[key] for one in sums]) for key in ("sum_overlap", "num_places"))
        alpha = mean_and_interval(*columns)
        tokens = expected_tokens(min(alpha.value, 1.0), self._num_draft_tokens)
        return {"alpha": alpha._asdict(), "tokens_of_alpha": tokens}


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
