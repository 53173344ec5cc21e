"""A training run from a config: texts, a trainee, the loop, and the trained drafter in a folder."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.common import processes
from jspec.common.dataclass_fields import read_fields
from jspec.common.errors import InputError, check_among, say
from jspec.common.work_dir import check_or_write_config
from jspec.training.config import Recipe, TrainingConfig
from jspec.training.dflash import DflashTraining, DsparkTraining
from jspec.training.draft_model import DraftModelTraining
from jspec.training.eagle import EagleTraining
from jspec.training.heads import BlockwiseTraining
from jspec.training.lookahead import LookaheadTraining
from jspec.training.loop import train, write_figures
from jspec.training.medusa import MedusaTraining
from jspec.training.packing import Batches, iterate_rows, pack
from jspec.training.placement import ON_ONE, Placement
from jspec.training.texts import Text, read_texts, split

_ALL = (
    BlockwiseTraining,
    DflashTraining,
    DraftModelTraining,
    DsparkTraining,
    EagleTraining,
    LookaheadTraining,
    MedusaTraining,
)
KINDS: Mapping[str, type[TrainingConfig]] = {kind.drafter: kind for kind in _ALL}
_TEXTS = "texts.json"  # a digest of what is trained on, written when everything is ready


def read_config(plain: Mapping[str, Any]) -> TrainingConfig:
    """Returns the training run whose fields are given as in JSON; `drafter` decides which they are.

    Raises:
      InputError: an unknown field, or a value of another type or out of range.
    """
    check_among("drafter", plain.get("drafter"), KINDS)
    make = KINDS[plain["drafter"]]
    fields = read_fields(make, plain)
    fields["recipe"] = Recipe(**read_fields(Recipe, fields.get("recipe", {}), "recipe."))
    return make(**fields)


def run_training(
    config: TrainingConfig,
    workdir: pathlib.Path,
    place: Placement = ON_ONE,
    is_over: Callable[[int], bool] = lambda step: False,
) -> Mapping[str, Any]:
    """Trains a drafter and writes it to its folder in the workdir; returns its metrics.

    `is_over` may end the run before its last step; see `train`.

    Raises:
      InputError: texts that cannot be read, are too few or differ from those with which the workdir
        was begun, a model that cannot be loaded, a loss that is not finite, or a full disk.
    """
    place.check(config.batch_size)
    target = place.load(config.target, config.dtype)
    sizes = {"vocab_size": target.config.vocab_size, "seq_len": config.seq_len}
    texts = [text for path in config.texts for text in read_texts(path, target.tokenizer, **sizes)]
    if len(texts) <= config.num_held_out:
        raise InputError(
            f"expected more than {config.num_held_out} texts, as many as are held out "
            f"(num_held_out), got {len(texts)}"
        )
    digest = _digest(texts)
    if processes.of_first(lambda: digest) != digest:
        raise InputError("expected the same texts in all processes, got others here")
    claim = functools.partial(check_or_write_config, workdir / _TEXTS, digest)
    processes.of_first(lambda: claim() if has_begun(workdir) else None)
    training, held_out = split(texts, config.num_held_out)
    if config.score_prompts:
        training = [Text(text.ids[:1], text.ids[1:]) for text in training]
    num_answer_tokens = _count_answer_tokens(training, config.seq_len)
    _count_answer_tokens(held_out, config.seq_len)
    trainee = config.make_trainee(target, training)
    fill = config.make_fill(target, trainee.layers, texts)
    sizes = {"batch_size": config.batch_size, "seq_len": config.seq_len}
    batches = Batches(training, **sizes, seed=config.recipe.seed)
    say(
        f"{len(training)} texts ({len(held_out)} more are held out), "
        f"{num_answer_tokens} tokens to predict, {batches.num_batches} batches an epoch"
    )
    scored = list(iterate_rows(pack(held_out, config.seq_len), config.batch_size))
    processes.of_first(claim)
    place = dataclasses.replace(place, fill=fill)
    params, metrics = train(trainee, batches, scored, config.recipe, workdir, place, is_over)
    whole = processes.fetch({**trainee.borrowed, **params})
    processes.of_first(lambda: trainee.save(whole, workdir / config.OUTPUT))
    processes.of_first(lambda: write_figures(workdir))
    return metrics


def has_begun(workdir: pathlib.Path) -> bool:
    """Returns whether a run got as far as its first step here; the workdir is then taken."""
    return (workdir / _TEXTS).exists()


def _digest(texts: Sequence[Text]) -> dict[str, Any]:
    """Returns what identifies texts: a run goes on only with those with which it began."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(json.dumps([text.prompt, text.answer]).encode())
    return {"num_texts": len(texts), "sha256_of_texts": digest.hexdigest()}


def _count_answer_tokens(texts: Sequence[Text], seq_len: int) -> int:
    """Returns the number of tokens of answers that fit into rows; there have to be some."""
    count = sum(len(text.ids[len(text.prompt) : seq_len]) for text in texts)
    if count == 0:
        raise InputError(
            f"expected answers within seq_len tokens, {seq_len}; the prompts of all {len(texts)} "
            "texts are as long"
        )
    num_cut = sum(len(text.ids) > seq_len for text in texts)
    if num_cut:
        say(f"{num_cut} of {len(texts)} texts are cut to seq_len tokens, {seq_len}")
    return count
