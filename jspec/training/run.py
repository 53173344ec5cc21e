"""A training run from a config: texts, a trainee, the loop, and the trained head in a folder."""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.errors import InputError
from jspec.models.eagle import default_feature_layers
from jspec.training.eagle import eagle_config, make_eagle_trainee
from jspec.training.loop import Recipe, train
from jspec.training.texts import Batches, iterate_rows, most_frequent, pack, read_texts, split
from jspec.weights.eagle_head import save_eagle
from jspec.weights.resolver import load_model

HEAD = "head"  # the folder of the trained head in a workdir


@dataclasses.dataclass(frozen=True)
class Training:
    """A training run.

    Attributes:
      target: the frozen target, as `load_model` takes it.
      dtype: of the target's weights.
      texts: JSONL files of the target's answers; see `read_texts`.
      num_held_out: texts that are not trained on but scored.
      seq_len: tokens of a row.
      batch_size: rows of a batch.
      vocab_size: tokens that the head can propose: the most frequent ones of the answers.
      feature_layers: of the target; empty takes a low, a middle and a high one.
      chain_steps: calls of each chain in training.
      chain_decay: weight of each call relative to the one before.
      recipe: see `Recipe`.
    """

    target: str = "smollm2-135m-instruct"
    dtype: str = "bfloat16"
    texts: tuple[str, ...] = ()
    num_held_out: int = 64
    seq_len: int = 512
    batch_size: int = 4
    vocab_size: int = 8192
    feature_layers: tuple[int, ...] = ()
    chain_steps: int = 4
    chain_decay: float = 0.8
    recipe: Recipe = dataclasses.field(default_factory=Recipe)


def run_training(training: Training, workdir: pathlib.Path) -> Mapping[str, Any]:
    """Trains a head of EAGLE-3 and writes it to WORKDIR/head; returns its metrics.

    Raises:
      InputError: texts that cannot be read or are too few, a model that cannot be loaded, or a loss
        that is not finite.
    """
    target = load_model(training.target, dtype=training.dtype)
    config = target.config
    size = config.vocab_size
    texts = [text for path in training.texts for text in read_texts(path, size)]
    if len(texts) <= training.num_held_out:
        raise InputError(f"expected more than {training.num_held_out} texts, got {len(texts)}")
    texts, held_out = split(texts, training.num_held_out)
    ids = most_frequent(texts, size, min(training.vocab_size, size))
    layers = tuple(training.feature_layers) or default_feature_layers(config.num_layers)
    shape = eagle_config(config, vocab_size=len(ids), feature_layers=layers)
    trainee = make_eagle_trainee(
        target,
        shape,
        ids,
        num_steps=training.chain_steps,
        decay=training.chain_decay,
        seed=training.recipe.seed,
    )
    batches = Batches(
        texts, batch_size=training.batch_size, seq_len=training.seq_len, seed=training.recipe.seed
    )
    num_answer_tokens = sum(len(text.answer) for text in texts)
    print(f"{len(texts)} texts, {num_answer_tokens} tokens of answers, {batches.num_batches} "
          f"batches an epoch; the head can propose {len(ids)} tokens, {_coverage(texts, ids):.1%} "
          "of the answers", file=sys.stderr, flush=True)  # fmt: skip
    held_rows = list(iterate_rows(pack(held_out, training.seq_len), training.batch_size))
    params, metrics = train(trainee, target.params, batches, held_rows, training.recipe, workdir)
    stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    save_eagle(workdir / HEAD, shape, stored | {"ids": jnp.asarray(ids)})
    return metrics


def _coverage(texts: list[Any], ids: np.ndarray) -> float:
    answers = np.concatenate([np.array(text.answer, int) for text in texts])
    return float(np.isin(answers, ids).mean())
