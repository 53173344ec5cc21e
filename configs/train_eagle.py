"""Trains a head of EAGLE-3 for SmolLM2-135M on its own answers.

python scripts/make_answers.py --prompts_file=PROMPTS.jsonl --output_json=answers.jsonl
python -m jspec.train --config=configs/train_eagle.py --config.texts='("answers.jsonl",)' \
  --workdir=runs/eagle
python -m jspec.generate --drafter=eagle --draft_head=runs/eagle/head --prompt="Hello"
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import training
from jspec.training.eagle import EagleTraining


def get_config() -> ConfigDict:
    """Returns the config."""
    return training(EagleTraining())
