"""A real pair, both packed in 4 bits: Qwen2.5-Coder 1.5B, drafted for by the 0.5B.

    python -m jspec.experiment --config=configs/coder_pair.py --workdir=runs/coder_pair
    python -m jspec.report runs/coder_pair

The first run fetches both models, 1.6 GB. Other prompts: --config.prompts_file=HumanEval.jsonl. A
run that was stopped goes on where it was. Another pair of files:
--config=configs/coder_pair.py:target.gguf,draft.gguf.
"""

from ml_collections import ConfigDict

from jspec.evaluation.experiments.config import defaults, method, ordered, split_pair

_PAIR = "qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct"


def get_config(models: str = "") -> ConfigDict:
    """Returns the config.

    Args:
      models: "TARGET,DRAFT" takes those instead.
    """
    config = defaults()
    config.title = "Qwen2.5-Coder: 0.5B for 1.5B, both in 4 bits"
    config.target, draft = split_pair(models) if models else _PAIR
    config.target_quantization = "packed"
    own = {"draft": draft, "draft_quantization": "packed"}
    small_head = {"options": {"draft_vocab_size": 32_000}}
    config.methods = ordered(
        {
            "plain": method("none"),
            "prompt_lookup:5": method("prompt_lookup", 5),
            "model:3": method("model", 3, **own),
            "model:5": method("model", 5, **own),
            "model, small head:5": method("model", 5, **own, **small_head),
            "prompt_lookup+model:5": method("prompt_lookup+model", 5, **own),
            "prompt_lookup+model:auto": method("prompt_lookup+model", "auto", **own, **small_head),
        }
    )
    config.prompts_file = "configs/code_prompts.jsonl"
    config.settings = ordered({"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}})
    config.max_new_tokens = 256
    return config
