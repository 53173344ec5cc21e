"""A Llama trained from scratch on texts, by the run that trains draft models.

Such a run wants a model to draft for: its tokens are taken, and the score compares the two. For the
first model that there is, a tiny random one stands in; with cross-entropy as the only loss nothing
is learnt from it, its run's tokens a call mean nothing, and looking but once, at the end, keeps
the score from choosing a checkpoint.
"""

import pathlib

from jspec.models import LlamaConfig
from jspec.training.draft_model import DraftModelTraining
from jspec.training.recipe import Recipe
from jspec.training.run import run_training
from jspec.weights import Tokenizer
from jspec.weights.hf import save_hf
from jspec.weights.random_weights import random_params

HEAD_DIM = 32
_WIDTH = 8
_NUM_HELD_OUT = 64


def write_stand_in(folder: pathlib.Path, tokenizer: Tokenizer, max_seq_len: int) -> None:
    """Writes a random model of next to no size, whose tokens and context others can have.

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
    workdir: pathlib.Path, *, texts: pathlib.Path, beside: pathlib.Path, num_layers: int,
    width: int, seq_len: int, batch_size: int, num_steps: int, learning_rate: float,
) -> pathlib.Path:  # fmt: skip
    """Trains by cross-entropy alone, unless the model is there; returns its folder.

    Args:
      workdir: of the run; see `jspec.train`.
      texts: the file to train on; see `read_texts`.
      beside: the folder of the model whose tokens and context it has, and with which it is
        compared at the end.
      num_layers: of the model.
      width: of its residual stream, a multiple of `HEAD_DIM`; thrice as much in between.
      seq_len: tokens of a row.
      batch_size: rows.
      num_steps: updates.
      learning_rate: see `Recipe`.

    Raises:
      InputError: see `run_training`.
    """
    training = DraftModelTraining(
        target=str(beside), dtype="float32", texts=(str(texts),), num_held_out=_NUM_HELD_OUT,
        seq_len=seq_len, batch_size=batch_size, num_layers=num_layers, embed_dim=width,
        hidden_dim=3 * width, num_heads=width // HEAD_DIM, num_kv_heads=width // HEAD_DIM,
        cross_entropy_weight=1.0, kl_weight=0.0,
        recipe=Recipe(
            num_steps=num_steps, learning_rate=learning_rate, max_norm=1.0,
            evaluate_every=num_steps,
        ),
    )  # fmt: skip
    folder = workdir / training.OUTPUT
    if not folder.exists():
        workdir.mkdir(parents=True, exist_ok=True)
        run_training(training, workdir)
    return folder
