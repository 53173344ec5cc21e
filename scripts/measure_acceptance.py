"""Measures how often drafts are kept, in theory and in fact.

`python scripts/measure_acceptance.py --draft_table=table.safetensors --drafters=unigram,bigram`

In theory: the target answers, and at every token of the answers the sum over the vocabulary of
min(target, draft) is taken (Leviathan et al., arXiv 2211.17192, Cor. 3.6). In fact: it answers once
more, one draft a round, and kept drafts are counted. Both follow the target's distribution. The
means of drafters whose kept drafts do not come in runs (tables, models) should agree within the
intervals, which resample prompts; those of drafters that copy (prompt_lookup, ngram) keep fewer in
rounds, see jspec.evaluation.experiments.estimates.
"""

import dataclasses
from typing import Any

from absl import flags

from jspec.common import cli
from jspec.common.errors import check_range
from jspec.common.json_lines import JsonLinesWriter
from jspec.drafters import DrafterOptions
from jspec.evaluation.experiments.kept_drafts import measure_kept_drafts
from jspec.generation import provenance
from jspec.generation.generator import DEFAULT_TARGET
from jspec.generation.prompts import read_prompts
from jspec.generation.request import Request, Settings
from jspec.weights.resolver import load_model

_TARGET = flags.DEFINE_string("target", DEFAULT_TARGET, "The target.")
_DRAFT_TABLE = flags.DEFINE_string("draft_table", None, "Made by scripts/count_ngrams.py.")
_DRAFTERS = flags.DEFINE_list("drafters", ["unigram", "bigram", "random"], "Without a model.")
_PROMPTS_FILE = flags.DEFINE_string("prompts_file", "configs/prompts.jsonl", "JSONL.")
_NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 13, "Evenly spaced over the file.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Tokens of an answer.")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Of target and draft.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the weights.")
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write the results to this file.")
_RECORDED: tuple[Any, ...] = (_TARGET, _DRAFTERS, _NUM_PROMPTS, _MAX_NEW_TOKENS, _TEMPERATURE,
                              _DTYPE)  # fmt: skip
_SHOWN = {"alpha": "expected", "kept": "observed"}


def main() -> None:
    """Measures and prints; writes JSON."""
    check_range("num_prompts", _NUM_PROMPTS.value, 1, 10**6)
    inputs = (_PROMPTS_FILE.value,)
    output = JsonLinesWriter(_OUTPUT_JSON.value, *inputs) if _OUTPUT_JSON.value else None
    report = measure_kept_drafts(
        make_requests(),
        load_model(_TARGET.value, dtype=_DTYPE.value),
        None,
        _DRAFTERS.value,
        DrafterOptions(draft_table=_DRAFT_TABLE.value),
        num_draft_tokens=1,
        batch_size=1,
    )
    for name, one in report["drafters"].items():
        shares = (f"{text} {one[key]['value']:.4f} [{one[key]['low']:.4f}, {one[key]['high']:.4f}]"
                  for key, text in _SHOWN.items())  # fmt: skip
        print(f"{name}: {', '.join(shares)}", flush=True)
    if output is not None:
        with output:
            values = {flag.name: flag.value for flag in _RECORDED}
            output.write(provenance.environment() | {"flags": values, "acceptance": report})


def make_requests() -> list[Request]:
    """Returns the requests, evenly spaced over the file; each has a seed of its own."""
    texts = [one.text for one in read_prompts(_PROMPTS_FILE.value)]
    count = min(_NUM_PROMPTS.value, len(texts))
    settings = Settings(_MAX_NEW_TOKENS.value, _TEMPERATURE.value)
    return [
        Request(texts[index * len(texts) // count], dataclasses.replace(settings, seed=index))
        for index in range(count)
    ]


if __name__ == "__main__":
    cli.run_main(main)
