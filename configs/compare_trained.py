"""The trained drafters on equal footing: same texts, same steps, same prompts.

    for kind in eagle medusa blockwise lookahead draft_model; do
      python -m jspec.train --config=configs/train_$kind.py --workdir=runs/trained/$kind
    done
    python -m jspec.experiment --config=configs/compare_trained.py --workdir=runs/compare_trained
    python -m jspec.report runs/compare_trained

The loop trains each drafter (for --config.texts and --config.recipe see
docs/train_a_drafter.md). Another folder than `runs/trained` is given after a colon:
`--config=configs/compare_trained.py:FOLDER`.

Measured on two cores of an AMD EPYC (2026-11-22, SmolLM2, 150 steps of 512 tokens, 26 prompts of
Spec-Bench's categories, 32 tokens, T = 0, one draft): eagle is 1.04 times as fast as plain
decoding, look-ahead 0.96, medusa 0.91, the draft model 0.86, blockwise 0.78.
"""

from typing import Any

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, method, ordered

_HEADS = "eagle", "medusa", "blockwise", "lookahead"
_NUM_DRAFT_TOKENS = 1, 3


def get_config(folder: str = "runs/trained") -> ConfigDict:
    """Returns the config.

    Args:
      folder: the workdirs of the trained drafters.
    """
    config = defaults()
    config.title = "Trained drafters on equal footing"
    methods: dict[str, Any] = {"plain": method("none")}
    for number in _NUM_DRAFT_TOKENS:
        for name in _HEADS:
            options = {"draft_head": f"{folder}/{name}/head"}
            methods[f"{name}:{number}"] = method(name, number, options=options)
        methods[f"model:{number}"] = method("model", number, draft=f"{folder}/draft_model/draft")
    config.methods = ordered(methods)
    config.settings = ordered({"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}})
    return config
