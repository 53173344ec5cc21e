"""A real pair, both in 4 bits: Qwen2.5-Coder 1.5B as its file holds it, drafted for by the 0.5B.

    python -m jspec.experiment --config=configs/coder_pair.py --workdir=runs/coder_pair
    python -m jspec.report runs/coder_pair

The first run fetches both models, 1.6 GB. The report has the paper's table for the pair: alpha by
category, c, and the speed-up that they predict beside the measured one; c is measured apart from
the answers, by rounds that are timed one at a time. The draft model's head has 96,000 tokens, but
for one method. Ten minutes on two cores (AMD EPYC, 2026-11-25, benchmarks/coder_pair: with 3 drafts
1.21 [1.13, 1.30] times plain decoding at temperature 0, 1.25 predicted by Theorem 3.8; 1.03 [0.93,
1.15] at temperature 1). Spec-Bench's prompts, one of each category:
--config.prompts_file=SPEC_BENCH.jsonl; code: --config.prompts_file=HUMAN_EVAL.jsonl with
--config.per_category=0 --config.num_prompts=10. A run that was stopped goes on where it was.
Another pair of files: --config=configs/coder_pair.py:target.gguf,draft.gguf.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, method, ordered, split_pair

_PAIR = "qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct"


def get_config(models: str = "") -> ConfigDict:
    """Returns the config.

    Args:
      models: "TARGET,DRAFT" takes those instead.
    """
    config = defaults()
    config.title = "Qwen2.5-Coder: 0.5B for 1.5B, both in 4 bits"
    config.target, draft = split_pair(models) if models else _PAIR
    if models:
        config.title = f"{draft} for {config.target}"
    config.target_quantization = "packed"
    draft_fields = {"draft": draft, "draft_quantization": "q4_0"}
    small_head = {"options": {"draft_vocab_size": 96_000}}
    config.methods = ordered(
        {
            "plain": method("none"),
            "model:3": method("model", 3, **draft_fields, **small_head),
            "model:5": method("model", 5, **draft_fields, **small_head),
            "model, whole head:5": method("model", 5, **draft_fields),
        }
    )
    config.per_category = 1
    config.measure_costs = True
    config.settings = ordered({"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}})
    config.max_new_tokens = 128
    return config
