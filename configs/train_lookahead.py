"""Trains look-ahead embeddings for SmolLM2-135M on its own answers.

python scripts/make_answers.py --prompts_file=PROMPTS.jsonl --output_json=answers.jsonl
python -m jspec.train --config=configs/train_lookahead.py --config.texts='("answers.jsonl",)' \
  --workdir=runs/lookahead
python -m jspec.generate --drafter=lookahead --draft_head=runs/lookahead/head --prompt="Hello"
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import training
from jspec.training.lookahead import LookaheadTraining


def get_config() -> ConfigDict:
    """Returns the config."""
    return training(LookaheadTraining())
