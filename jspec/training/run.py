"""A training run from a config: texts, a trainee, the loop, and the trained drafter in a folder."""

import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError
from jspec.common.work_dir import check_or_write_config
from jspec.training.corpus import read_texts
from jspec.training.figures import write_figures
from jspec.training.loop import train
from jspec.training.state_store import StateStore
from jspec.training.texts import Batches, Rows, Text, iterate_rows, pack, split
from jspec.training.trainee import Trainee
from jspec.training.training import Training
from jspec.weights.resolver import LoadedModel, load_model

_TEXTS = "texts.json"  # what is trained on, written when everything is ready


def run_training(training: Training, workdir: pathlib.Path) -> Mapping[str, Any]:
    """Trains a drafter and writes it to its folder in the workdir; returns its metrics.

    Raises:
      InputError: texts that cannot be read, are too few or are others than those with which the
        workdir was begun, a model that cannot be loaded, a loss that is not finite, or a full disk.
    """
    target = load_model(training.target, dtype=training.dtype)
    texts = _read(training, target)
    if has_begun(workdir):
        check_or_write_config(workdir / _TEXTS, _summary_of(texts))
    training_on, held_out = split(texts, training.num_held_out)
    if training.score_prompts:
        training_on = [_all_scored(text) for text in training_on]
    num_answer_tokens = _count_answers(training_on, training.seq_len)
    _count_answers(held_out, training.seq_len)
    trainee = training.make_trainee(target, training_on)
    fill = _make_fill(training, target, trainee, texts)
    batches = Batches(
        training_on,
        batch_size=training.batch_size,
        seq_len=training.seq_len,
        seed=training.recipe.seed,
        fill=fill,
    )
    print(f"{len(training_on)} texts, {num_answer_tokens} tokens to predict, "
          f"{batches.num_batches} batches an epoch", file=sys.stderr, flush=True)  # fmt: skip
    held_rows = iterate_rows(pack(held_out, training.seq_len), training.batch_size)
    held_rows = [fill(rows) for rows in held_rows]
    check_or_write_config(workdir / _TEXTS, _summary_of(texts))
    params, metrics = train(trainee, target.params, batches, held_rows, training.recipe, workdir)
    trainee.save(params, workdir / training.OUTPUT)
    write_figures(workdir)
    return metrics


def has_begun(workdir: pathlib.Path) -> bool:
    """Returns whether a run has got so far that the workdir is its own."""
    return (workdir / _TEXTS).exists()


def _make_fill(
    training: Training, target: LoadedModel, trainee: Trainee, texts: Sequence[Text]
) -> Callable[[Rows], Rows]:
    """Returns what adds to rows the target's outputs, if they are to be stored, or what else."""
    if not training.states:
        return training.make_fill(target, texts)
    if not trainee.layers:
        raise InputError(f"expected no states with {training.drafter}: it asks the target itself")
    store = StateStore(
        pathlib.Path(training.states),
        target,
        trainee.layers,
        texts,
        seq_len=training.seq_len,
        batch_size=training.batch_size,
    )
    return store.fill


def _summary_of(texts: Sequence[Text]) -> dict[str, Any]:
    """Returns what tells texts from others: a run goes on with those with which it began."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(json.dumps([text.prompt, text.answer]).encode())
    return {"num_texts": len(texts), "sha256_of_texts": digest.hexdigest()}


def _count_answers(texts: Sequence[Text], seq_len: int) -> int:
    """Returns the tokens of answers in rows of that length.

    Raises:
      InputError: none, since all texts are cut before their answers begin.
    """
    count = sum(len(text.ids[len(text.prompt) : seq_len]) for text in texts)
    if count == 0:
        raise InputError(
            f"expected answers within seq_len tokens, {seq_len}; the prompts of all {len(texts)} "
            "texts are as long"
        )
    num_cut = sum(len(text.ids) > seq_len for text in texts)
    if num_cut:
        print(f"{num_cut} of {len(texts)} texts are cut to seq_len tokens, {seq_len}",
              file=sys.stderr, flush=True)  # fmt: skip
    return count


def _all_scored(text: Text) -> Text:
    return Text(text.ids[:1], text.ids[1:])


def _read(training: Training, target: LoadedModel) -> list[Text]:
    """Returns the texts of all files."""
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
    return texts
