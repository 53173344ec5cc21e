"""Measures how often drafts are kept, in theory and in fact.

`python scripts/measure_acceptance.py --draft_table=table.safetensors --drafters=unigram,bigram`

In theory: the target answers, and at every token of the answers the sum over the vocabulary of
min(target, draft) is taken (Leviathan et al., arXiv 2211.17192, Cor. 3.6). In fact: it answers once
more, one draft a round, and kept drafts are counted. Both follow the target's law. The means of
drafters whose kept drafts do not come in runs (tables, models) should agree within the intervals,
which resample prompts; those of drafters that copy (prompt_lookup, ngram) keep fewer in rounds, see
jspec.analysis.estimates.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from jspec import cli, provenance
from jspec.analysis.estimates import Estimator
from jspec.analysis.intervals import Interval, mean_and_interval
from jspec.drafters import DrafterOptions, without_unread
from jspec.errors import check_range
from jspec.generator import DEFAULT_TARGET, Generator
from jspec.json_lines import JsonLinesWriter
from jspec.prompts import read_prompts
from jspec.request import Request, Result, Settings
from jspec.weights.resolver import LoadedModel, load_model

_TARGET = flags.DEFINE_string("target", DEFAULT_TARGET, "The target.")
_DRAFT_TABLE = flags.DEFINE_string("draft_table", None, "Made by scripts/count_ngrams.py.")
_DRAFTERS = flags.DEFINE_list("drafters", ["unigram", "bigram", "random"], "Without a model.")
_PROMPTS_FILE = flags.DEFINE_string("prompts_file", "configs/prompts.jsonl", "JSONL.")
_NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 13, "Evenly spaced over the file.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Tokens of an answer.")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Of target and draft.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the weights.")
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write the results to this file.")


def main() -> None:
    """Measures and prints; writes JSON."""
    check_range("num_prompts", _NUM_PROMPTS.value, 1, 10**6)
    output = JsonLinesWriter(_OUTPUT_JSON.value) if _OUTPUT_JSON.value else None
    texts = [one.text for one in read_prompts(_PROMPTS_FILE.value)]
    count = min(_NUM_PROMPTS.value, len(texts))
    texts = [texts[index * len(texts) // count] for index in range(count)]
    target = load_model(_TARGET.value, dtype=_DTYPE.value)
    options = DrafterOptions(draft_table=_DRAFT_TABLE.value)
    plain = Generator(target, drafter="none")
    answers = [plain.generate(request) for request in make_requests(texts, first_seed=0)]
    report = {}
    for name in _DRAFTERS.value:
        own = without_unread(name, options)
        report[name] = {"expected": expected_of(target, name, own, answers),
                        "observed": observed_of(target, name, own, texts)}  # fmt: skip
        line = (f"{key} {mean:.4f} [{low:.4f}, {high:.4f}]"
                for key, (mean, low, high) in report[name].items())  # fmt: skip
        print(f"{name}: {', '.join(line)}", flush=True)
    if output is not None:
        with output:
            values = {flag.name: flag.value for flag in _RECORDED}
            output.write(provenance.environment() | {"flags": values, "acceptance": report})


def make_requests(texts: Sequence[str], first_seed: int) -> list[Request]:
    """Returns the requests; each has a seed of its own."""
    settings = [
        Settings(
            max_new_tokens=_MAX_NEW_TOKENS.value,
            temperature=_TEMPERATURE.value,
            seed=first_seed + index,
        )
        for index in range(len(texts))
    ]
    return [Request(text, own) for text, own in zip(texts, settings, strict=True)]


def expected_of(
    target: LoadedModel, name: str, options: DrafterOptions, answers: Sequence[Result]
) -> Interval:
    """Returns the mean of the sums of min(target, draft) where there was a draft."""
    estimator = Estimator(target)
    law = estimator.make_law(name, options)
    records = [
        estimator.estimate(law, answer.settings, answer.prompt_token_ids, answer.token_ids)
        for answer in answers
    ]
    columns = (np.array([r[key] for r in records]) for key in ("sum_overlap", "num_places"))
    return mean_and_interval(*columns)


def observed_of(
    target: LoadedModel, name: str, options: DrafterOptions, texts: Sequence[str]
) -> Interval:
    """Returns the share of drafts kept, one draft a round."""
    generator = Generator(target, drafter=name, num_draft_tokens=1, drafter_options=options)
    stats = [generator.generate(one).stats for one in make_requests(texts, first_seed=10**6)]
    return mean_and_interval(
        np.array([s.num_accepted for s in stats]), np.array([s.num_proposed for s in stats])
    )


_RECORDED: tuple[Any, ...] = (_TARGET, _DRAFTERS, _NUM_PROMPTS, _MAX_NEW_TOKENS, _TEMPERATURE,
                              _DTYPE)  # fmt: skip


if __name__ == "__main__":
    cli.run_main(main)
