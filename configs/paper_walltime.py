"""Expected and measured speed-up of every drafter, at T = 0 and T = 1.

    python -m jspec.experiment --config=configs/paper_walltime.py --workdir=runs/paper_walltime
    python -m jspec.report runs/paper_walltime

Like Tables 2 and 4 of arXiv 2211.17192. The expected speed-up follows from the acceptance on one
half of the prompts and from the costs of rounds, which are measured before anything is answered; it
is compared with the measured speed-up of the other half. Tables of unigrams and bigrams are
counted first (configs/table_prompts.jsonl) and kept in the workdir.

Expected on two CPU cores (AMD EPYC, 2026-11-22, 65 prompts of Spec-Bench's categories): at T = 0
prompt_lookup 1.21, ngram 1.19, bigram 1.04, unigram 0.97, random 0.93, layer_skip 0.68, model 0.63;
at T = 1 1.04, 1.04, 1.00, 0.96, 0.92, 0.67, 0.63. Expectations by position within 10 % in 13 of the
18 cells of method and temperature (prompt_lookup, ngram, random, unigram and bigram at both);
`model` is 11 to 15 % faster than expected. All of it took 13 minutes.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, method, ordered

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
    methods = {"plain": method("none")}
    for drafter, numbers in _NUMBERS.items():
        fields = {"options": {"draft_layers": _LAYERS}} if drafter == "layer_skip" else {}
        if "model" in drafter or drafter == "hierarchical":
            fields = {"draft": _TARGET, "draft_quantization": "int4"}
        for number in numbers:
            methods[f"{drafter}:{number}"] = method(drafter, number, **fields)
    config.methods = ordered(methods)
    config.settings = ordered({"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}})
    config.max_new_tokens = 32
    config.measure_costs = True
    return config
