"""Chains against trees of the same number of drafts: when does a tree pay?

    python -m jspec.experiment --config=configs/trees.py --workdir=runs/trees
    python -m jspec.report runs/trees

SmolLM2 with its shipped head, by default: a tree of 8 keeps 1.90 tokens a call where a chain of 8
keeps 1.59. A pair of models: --config=configs/trees.py:TARGET,DRAFT (packed files stay packed, the
draft is q4_0); with Qwen2.5-Coder a chain keeps more than any tree (docs/trees.md, 2026-11-26). A
tree's drafts are those of all its branches, so "eagle, tree:8" verifies as many tokens a call as
"eagle:8". Members of a cascade share one tree.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, method, ordered, split_pair
from jspec.weights.published import MODELS

_TREES = {4: (2, 2), 6: (3, 2), 8: (4, 3), 12: (4, 4)}  # drafts: depth, branches
_CHAINS = 2, 3, 4, 6, 8


def get_config(models: str = "") -> ConfigDict:
    """Returns the config.

    Args:
      models: "TARGET,DRAFT" takes these instead of SmolLM2 and its head.
    """
    config = defaults()
    config.title = "Chains against trees"
    drafter, fields = "eagle", {}
    if models:
        config.target, draft = split_pair(models)
        if config.target in MODELS or config.target.endswith(".gguf"):
            config.target_quantization = "packed"
        drafter, fields = "model", {"draft": draft, "draft_quantization": "q4_0"}
    methods = {"plain": method("none")}
    for number in _CHAINS:
        methods[f"{drafter}:{number}"] = method(drafter, number, **fields)
    cascade = f"prompt_lookup+{drafter}"
    methods[f"{cascade}:4"] = method(cascade, 4, **fields)
    for number, (depth, branches) in _TREES.items():
        options = {"tree_depth": depth, "tree_branches": branches}
        for name in (drafter, cascade):
            methods[f"{name}, tree:{number}"] = method(name, number, options=options, **fields)
    for branches in (1, 2, 4):  # whole drafts, drawn from the drafter's distribution: for T=1
        options = {"tree_depth": 8 // branches, "tree_branches": branches, "tree_draws": "without"}
        methods[f"{drafter}, drawn:{branches} x {8 // branches}"] = method(
            drafter, 8, acceptance="block", options=options, **fields
        )
    config.methods = ordered(methods)
    config.settings = ordered({"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}})
    config.per_category = 1
    return config
