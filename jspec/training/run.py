"""A training run from a config: texts, a trainee, the loop, and the trained drafter in a folder."""

import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from jspec.errors import InputError
from jspec.training.corpus import read_texts
from jspec.training.figures import write_figures
from jspec.training.loop import train
from jspec.training.texts import Batches, Text, iterate_rows, pack, split
from jspec.training.training import Training
from jspec.weights.resolver import LoadedModel, load_model


def run_training(training: Training, workdir: pathlib.Path) -> Mapping[str, Any]:
    """Trains a drafter and writes it to its folder in the workdir; returns its metrics.

    Raises:
      InputError: texts that cannot be read or are too few, a model that cannot be loaded, or a loss
        that is not finite, or a full disk.
    """
    target = load_model(training.target, dtype=training.dtype)
    texts, held_out = _read(training, target)
    trainee = training.make_trainee(target, texts)
    batches = Batches(
        texts, batch_size=training.batch_size, seq_len=training.seq_len, seed=training.recipe.seed
    )
    num_answer_tokens = sum(len(text.answer) for text in texts)
    print(f"{len(texts)} texts, {num_answer_tokens} tokens of answers, {batches.num_batches} "
          "batches an epoch", file=sys.stderr, flush=True)  # fmt: skip
    held_rows = list(iterate_rows(pack(held_out, training.seq_len), training.batch_size))
    params, metrics = train(trainee, target.params, batches, held_rows, training.recipe, workdir)
    write_figures(workdir)
    trainee.save(params, workdir / training.OUTPUT)
    return metrics


def _read(training: Training, target: LoadedModel) -> tuple[list[Text], list[Text]]:
    """Returns the texts to train on and the held-out ones."""
    texts = []
    for path in training.texts:
        texts += read_texts(
            path,
            target.tokenizer,
            vocab_size=target.config.vocab_size,
            seq_len=training.seq_len,
        )
    if len(texts) <= training.num_held_out:
        raise InputError(f"expected more than {training.num_held_out} texts, got {len(texts)}")
    return split(texts, training.num_held_out)
