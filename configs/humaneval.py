"""Code: functions to be completed, as raw text without a chat template.

    python -m jspec.experiment --config=configs/humaneval.py --workdir=runs/humaneval \\
      --config.prompts_file=HumanEval.jsonl
    python -m jspec.report runs/humaneval

`HumanEval.jsonl` is that of github.com/openai/human-eval (arXiv 2107.03374); only its prompts are
used. Without it the 12 stubs of configs/code_prompts.jsonl are completed. Answers are not cut where
the function ends: a model may go on with the next, or with tests.

Measured on two cores of an AMD EPYC (2026-11-22, SmolLM2, 26 functions of HumanEval, 64 tokens, two
repeats), times plain decoding's speed at temperature 0 / 1: prompt_lookup:3 1.37 / 1.01,
prompt_lookup:7 1.36 / 0.97, prompt_lookup:auto 1.46 / 1.12, ngram:3 1.33 / 1.03.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, methods, ordered


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.title = "HumanEval: completing functions"
    config.prompts_file = "configs/code_prompts.jsonl"
    config.chat = "no"
    config.methods = methods("prompt_lookup:3", "prompt_lookup:7", "prompt_lookup:auto", "ngram:3")
    config.settings = ordered({"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}})
    config.max_new_tokens = 128
    return config
