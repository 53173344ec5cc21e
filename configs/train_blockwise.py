"""Trains the heads of blockwise parallel decoding for SmolLM2-135M on its own answers.

python scripts/make_answers.py --prompts_file=PROMPTS.jsonl --output_json=answers.jsonl
python -m jspec.train --config=configs/train_blockwise.py --config.texts='("answers.jsonl",)' \
  --workdir=runs/blockwise
python -m jspec.generate --drafter=blockwise --draft_head=runs/blockwise/head --prompt="Hello"
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import training
from jspec.training.heads import BlockwiseTraining


def get_config() -> ConfigDict:
    """Returns the config."""
    return training(BlockwiseTraining())
