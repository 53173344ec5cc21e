"""How often each drafter's tokens would be accepted: alpha = E[Σ min(target, draft)].

    python -m jspec.experiment --config=configs/paper_alpha.py --workdir=runs/paper_alpha
    python -m jspec.report runs/paper_alpha

Like Table 3 of arXiv 2211.17192, at temperatures 0 and 1, at every token of the target's own
answers. Tables of unigrams and bigrams are counted first, on 10,000 tokens of the target's answers
to other prompts (configs/table_prompts.jsonl); they are kept in the workdir. `hierarchical` has the
distribution of its draft model and is not listed separately. A cascade has the distribution of its
first member that proposes something. `pattern` completes stock phrases and proposes nothing
elsewhere.

Not allowed: `none`, which drafts nothing, and `eagle`, alone or in a cascade: its distribution at a
token needs the hidden states of a round, which do not exist without drafting. Numbers of drafts and
acceptance rules are not allowed either: alpha does not depend on them.

The paper looked at 10,000 tokens: a file of 65 prompts gives as many if answers reach the limit of
160 tokens (`--config.prompts_file=FILE`), the 13 of configs/prompts.jsonl give 2,000.

Alpha of SmolLM2 (2026-11-23, the first five prompts of each of Spec-Bench's 13 categories; 8,601
tokens at T = 0, 9,103 at T = 1); tokens for which a drafter proposes nothing are left out:

    drafter                   T = 0             T = 1
    random, unigram           0.000, 0.032      0.037, 0.094
    bigram                    0.145             0.134
    ngram, prompt_lookup      0.58 of 76 %      0.23 of 49 %
    layer_skip:10, 20, 25     0.06, 0.18, 0.42  0.09, 0.15, 0.30
    model int4, int8          0.78, 0.97        0.68, 0.96
    prompt_lookup+model int4  0.72              0.63
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, method, ordered

_TARGET = "smollm2-135m-instruct"
_PHRASES = (
    "In conclusion,",
    "For example,",
    "Here are some",
    "It is important to note that",
    "On the other hand,",
)


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.kind = "estimate"
    config.title = "Alpha of every drafter"
    config.target = _TARGET
    methods = {
        "random": method("random"),
        "unigram": method("unigram"),
        "bigram": method("bigram"),
        "ngram": method("ngram"),
        "ngram sampled": method("ngram", options={"ngram_probs": "sampled"}),
        "prompt_lookup": method("prompt_lookup"),
        "pattern": method("pattern", options={"pattern": "|".join(_PHRASES)}),
        "prompt_lookup+bigram": method("prompt_lookup+bigram"),
    }
    for layers in (10, 20, 25):
        options = {"draft_layers": tuple(range(layers))}
        methods[f"layer_skip:{layers} layers"] = method("layer_skip", options=options)
    for kind in ("int4", "int8"):
        methods[f"model {kind}"] = method("model", draft=_TARGET, draft_quantization=kind)
    methods["prompt_lookup+model int4"] = method(
        "prompt_lookup+model", draft=_TARGET, draft_quantization="int4"
    )
    config.methods = ordered(methods)
    config.settings = ordered({"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}})
    config.max_new_tokens = 160
    return config
