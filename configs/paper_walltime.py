"""Expected beside measured speed-up, for each drafter and number of drafts, at T = 0 and T = 1.

    python -m jspec.experiment --config=configs/paper_walltime.py --workdir=runs/paper_walltime
    python scripts/summarize.py runs/paper_walltime

In kind of Tables 2 and 4 of arXiv 2211.17192. What the report expects comes from the acceptance and
the costs of one half of the prompts, and is compared with the speed-up of the other half. Tables of
bigrams are counted first (configs/table_prompts.jsonl) and kept in the workdir.
"""

from ml_collections import ConfigDict

from jspec.experiments.config import defaults, ordered, way

_TARGET = "smollm2-135m-instruct"
_NUMBERS = {
    "prompt_lookup": (1, 3, 5, 7),
    "ngram": (1, 3, 5),
    "bigram": (1, 3),
    "layer_skip": (1, 3),
    "model": (1, 3),
}
_FIELDS = {
    "ngram": {"options": {"ngram_max_tokens": 5}},
    "layer_skip": {"options": {"draft_layers": tuple(range(20))}},
    "model": {"draft": _TARGET, "draft_quantization": "int4"},
}


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.title = "Expected and measured speed-up"
    config.target = _TARGET
    ways = {"plain": way("none")}
    for drafter, numbers in _NUMBERS.items():
        for number in numbers:
            ways[f"{drafter}:{number}"] = way(drafter, number, **_FIELDS.get(drafter, {}))
    config.ways = ordered(ways)
    config.settings = ordered({"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}})
    config.repeats = 3
    config.measure_costs = True
    return config
