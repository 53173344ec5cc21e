"""Trains a head of DSpark for SmolLM2-135M on its own answers.

python scripts/make_answers.py --prompts_file=PROMPTS.jsonl --output_json=answers.jsonl
python -m jspec.train --config=configs/train_dspark.py --config.texts='("answers.jsonl",)' \
  --workdir=runs/dspark
python -m jspec.generate --drafter=dflash --draft_head=runs/dspark/head --prompt="Hello"
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import training
from jspec.training.dflash import DsparkTraining


def get_config() -> ConfigDict:
    """Returns the config."""
    return training(DsparkTraining())
