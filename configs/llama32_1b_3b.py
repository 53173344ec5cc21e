"""Llama 3.2: 1B drafts for 3B, greedily and at temperature 1.

    hf auth login   # the weights need Meta's licence
    python -m jspec.experiment --config=configs/llama32_1b_3b.py --workdir=runs/llama32_1b_3b
    python -m jspec.report runs/llama32_1b_3b

With weights that are on this machine already, or another pair (folders, or any `--target`):

    python -m jspec.experiment --config=configs/llama32_1b_3b.py:TARGET_FOLDER,DRAFT_FOLDER \\
      --workdir=runs/llama32_1b_3b

For a GPU: the 3B in bfloat16 takes 6.4 GB, the 1B 2.5 GB, less in int8 and int4. A draft that reads
0.385 of the target's bytes must be accepted often to pay; a quantised one less often, and prompt
lookup costs nothing.

Expected on a GPU: not measured yet.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, method, ordered, split_pair

_TARGET = "meta-llama/Llama-3.2-3B-Instruct"
_DRAFT = "meta-llama/Llama-3.2-1B-Instruct"


def get_config(models: str = "") -> ConfigDict:
    """Returns the config.

    Args:
      models: "TARGET,DRAFT" takes those instead of the hub's.
    """
    config = defaults()
    config.title = "Llama 3.2: 1B for 3B"
    target, draft = split_pair(models) if models else (_TARGET, _DRAFT)
    if models:
        config.title = f"{draft} for {target}"
    config.target = target
    methods = {"plain": method("none")}
    for number in (1, 2, 3, 4, 6):
        methods[f"model:{number}"] = method("model", number, draft=draft)
    for kind in ("int8", "int4"):
        methods[f"model {kind}:4"] = method("model", 4, draft=draft, draft_quantization=kind)
    methods["prompt_lookup:4"] = method("prompt_lookup", 4)
    methods["prompt_lookup+model int4:auto"] = method(
        "prompt_lookup+model", "auto", draft=draft, draft_quantization="int4"
    )
    config.methods = ordered(methods)
    config.settings = ordered({"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}})
    config.max_new_tokens = 256
    config.repeats = 3
    return config
