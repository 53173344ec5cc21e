"""Expected beside measured speed-up, for every drafter, at T = 0 and T = 1.

    python -m jspec.experiment --config=configs/paper_walltime.py --workdir=runs/paper_walltime
    python scripts/summarize.py runs/paper_walltime

In kind of Tables 2 and 4 of arXiv 2211.17192. What the report expects comes from the acceptance on
one half of the prompts, and from the costs of rounds, which are measured apart before anything is
answered; it is compared with the speed-up of the other half. Tables of unigrams and bigrams are
counted first (configs/table_prompts.jsonl) and kept in the workdir.

Expected on two CPU cores (AMD EPYC, 2026-11-21, 65 prompts of Spec-Bench's categories): at T = 0
prompt_lookup and ngram 1.17, bigram 1.09, unigram 1.00, random 0.97, layer_skip 0.69, model 0.46;
at T = 1 1.05, 1.04, 1.02, 1.01, 0.95, 0.67, 0.47. Expectations by position within 8 % for all of
these but those with a draft model, which reads the prompt while it decodes. The answers took 44
minutes; counting the table and measuring the costs, done before in another workdir, some 15 more.
"""

from ml_collections import ConfigDict

from jspec.experiments.config import defaults, ordered, way

_TARGET = "smollm2-135m-instruct"
_NUMBERS = {
    "prompt_lookup": (3,),
    "ngram": (3,),
    "random": (1,),
    "unigram": (1,),
    "bigram": (1,),
    "layer_skip": (1,),
    "model": (1,),
    "hierarchical": (3,),
    "prompt_lookup+model": (3,),
}
_LAYERS = tuple(range(20))


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.title = "Expected and measured speed-up"
    config.target = _TARGET
    ways = {"plain": way("none")}
    for drafter, numbers in _NUMBERS.items():
        fields = {"options": {"draft_layers": _LAYERS}} if drafter == "layer_skip" else {}
        if "model" in drafter or drafter == "hierarchical":
            fields = {"draft": _TARGET, "draft_quantization": "int4"}
        for number in numbers:
            ways[f"{drafter}:{number}"] = way(drafter, number, **fields)
    config.ways = ordered(ways)
    config.settings = ordered({"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}})
    config.max_new_tokens = 32
    config.measure_costs = True
    return config
