"""A Llama trained from scratch on texts, by the run that trains draft models.

Such a run needs a target: it gives the tokenizer, and the score compares the two. For the first
model a tiny random one stands in. With cross-entropy as the only loss nothing is learned from the
target; the run's tokens a call mean nothing, and evaluating only once, at the end, keeps the score
from choosing a checkpoint.
"""

import dataclasses
import pathlib
from typing import Any

from jspec.models import LlamaConfig
from jspec.training.config import Recipe
from jspec.training.draft_model import DraftModelTraining
from jspec.training.run import run_training
from jspec.weights import Tokenizer
from jspec.weights.hf import save_hf
from jspec.weights.random_weights import random_params

HEAD_DIM = 32
_WIDTH = 8


def write_stand_in(folder: pathlib.Path, tokenizer: Tokenizer, max_seq_len: int) -> None:
    """Writes a tiny random model with a tokenizer and a context length that others can take.

    Raises:
      InputError: the folder exists or cannot be written.
    """
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, embed_dim=_WIDTH, hidden_dim=_WIDTH, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=_WIDTH, max_seq_len=max_seq_len,
        bos_id=tokenizer.bos_id, eos_ids=tokenizer.eos_ids,
    )  # fmt: skip
    save_hf(folder, config, random_params(config, 0, "bfloat16"), tokenizer=tokenizer)


def train_from_scratch(
    workdir: pathlib.Path, *, num_layers: int, width: int, recipe: Recipe, **fields: Any
) -> pathlib.Path:
    """Trains by cross-entropy alone, unless the model is there; returns its folder.

    Args:
      workdir: of the run; see `jspec.train`.
      num_layers: of the model.
      width: of its residual stream, a multiple of `HEAD_DIM`; its feed-forward layers are three
        times as wide.
      recipe: how to train; it is evaluated at the last step only.
      **fields: others of `DraftModelTraining`: the target, whose tokenizer and context length it
        gets, the texts, and the sizes of batches.

    Raises:
      InputError: see `run_training`.
    """
    config = DraftModelTraining(
        num_layers=num_layers, embed_dim=width, hidden_dim=3 * width, num_heads=width // HEAD_DIM,
        num_kv_heads=width // HEAD_DIM, cross_entropy_weight=1.0, kl_weight=0.0,
        recipe=dataclasses.replace(recipe, evaluate_every=recipe.num_steps), **fields,
    )  # fmt: skip
    folder = workdir / config.OUTPUT
    if not folder.exists():
        workdir.mkdir(parents=True, exist_ok=True)
        run_training(config, workdir)
    return folder
