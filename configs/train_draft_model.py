"""Trains a small Llama to draft for SmolLM2-135M, on the target's own answers.

python scripts/make_answers.py --prompts_file=PROMPTS.jsonl --output_json=answers.jsonl
python -m jspec.train --config=configs/train_draft_model.py --config.texts='("answers.jsonl",)' \
  --workdir=runs/draft
python -m jspec.generate --drafter=model --draft=runs/draft/draft --prompt="Hello"

Six layers of the target instead of noise to begin with:
`--config.init_layers='(0, 1, 2, 27, 28, 29)' --config.embeddings=shared --config.num_layers=0`
`--config.embed_dim=0 --config.hidden_dim=0 --config.num_heads=0 --config.num_kv_heads=0`.
For acceptance at temperature 1 itself: `--config.total_variation_weight=1`. A second draft, on what
the first one misses: `--config.earlier='("runs/draft/draft",)' --workdir=runs/second`.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import training
from jspec.training.draft_model import DraftModelTraining


def get_config() -> ConfigDict:
    """Returns the config."""
    draft = DraftModelTraining(
        num_layers=4, embed_dim=256, hidden_dim=768, num_heads=4, num_kv_heads=2
    )
    return training(draft)
