"""A training run from a config: texts, a trainee, the loop, and the trained drafter in a folder."""

import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from jspec.errors import InputError
from jspec.training.loop import train
from jspec.training.texts import Batches, iterate_rows, pack, read_texts, split
from jspec.training.training import Training
from jspec.weights.resolver import load_model


def run_training(training: Training, workdir: pathlib.Path) -> Mapping[str, Any]:
    """Trains a drafter and writes it to its folder in the workdir; returns its metrics.

    Raises:
      InputError: texts that cannot be read or are too few, a model that cannot be loaded, or a loss
        that is not finite.
    """
    target = load_model(training.target, dtype=training.dtype)
    size = target.config.vocab_size
    texts = [text for path in training.texts for text in read_texts(path, size)]
    if len(texts) <= training.num_held_out:
        raise InputError(f"expected more than {training.num_held_out} texts, got {len(texts)}")
    texts, held_out = split(texts, training.num_held_out)
    trainee = training.make_trainee(target, texts)
    batches = Batches(
        texts, batch_size=training.batch_size, seq_len=training.seq_len, seed=training.recipe.seed
    )
    num_answer_tokens = sum(len(text.answer) for text in texts)
    print(f"{len(texts)} texts, {num_answer_tokens} tokens of answers, {batches.num_batches} "
          "batches an epoch", file=sys.stderr, flush=True)  # fmt: skip
    held_rows = list(iterate_rows(pack(held_out, training.seq_len), training.batch_size))
    params, metrics = train(trainee, target.params, batches, held_rows, training.recipe, workdir)
    trainee.save(params, workdir / training.OUTPUT)
    return metrics
