"""Trains heads of Medusa for SmolLM2-135M on its own answers.

python scripts/make_answers.py --prompts_file=PROMPTS.jsonl --output_json=answers.jsonl
python -m jspec.train --config=configs/train_medusa.py --config.texts='("answers.jsonl",)' \
  --workdir=runs/medusa
python -m jspec.generate --drafter=medusa --draft_head=runs/medusa/head --prompt="Hello"

Medusa-2, which changes the target and writes it to `runs/medusa2/target`, beside its heads:
`--config.train_target=True --config.init_head=runs/medusa/head --config.recipe.learning_rate=1e-4`
`--workdir=runs/medusa2`.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import training
from jspec.training.medusa import MedusaTraining


def get_config() -> ConfigDict:
    """Returns the config."""
    return training(MedusaTraining())
