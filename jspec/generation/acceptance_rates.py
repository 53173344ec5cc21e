"""How many of its drafts a drafter has accepted, and how long answers are: measured with the costs.

With "auto" a row decides in its first rounds, before any draft of its own was accepted or refused.
What it assumes then is measured once for the models and the machine, unless several processes share
it: a few prompts of several kinds are answered at temperature 0, with as many drafts in each round
as there may be.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec.common import processes
from jspec.common.errors import InputError
from jspec.generation.batch import Batch
from jspec.generation.costs import LONGEST_MEASURED
from jspec.generation.engine import MAX_ROUNDS_PER_VISIT
from jspec.generation.prompts import encode_text, read_prompt
from jspec.generation.request import Request, SamplingParams
from jspec.generation.rows import Row, make_row
from jspec.weights.resolver import LoadedModel

_MAX_NEW_TOKENS = 96
_PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Why is the sky blue? Explain it to a child in a few sentences.",
    "Correct the spelling and repeat the whole text: The quik brown fox jumps over the lasy dog. "
    "The dog dos not mind, becaus it sleeps. The fox runs back over the lasy dog once more.",
    "A train leaves at 9:40 and arrives at 12:05 after a stop of 15 minutes. How long did it move? "
    "Think step by step.",
)


class AcceptanceRates(NamedTuple):
    """What was measured.

    Attributes:
      accepted: for each kind of proposal the number of first and of later drafts accepted.
      decided: likewise of those that were accepted or refused.
      answer_tokens: expected length of an answer. Each was cut at 96 tokens: if answers end at any
        token alike, the estimate is the tokens of all for each that ended before.
    """

    accepted: tuple[tuple[float, float], ...]
    decided: tuple[tuple[float, float], ...]
    answer_tokens: int


def measure_rates(
    batch: Batch, num_rows: int, target: LoadedModel, max_seq_len: int
) -> AcceptanceRates:
    """Answers the prompts by the first rows of a batch, which choose numbers of drafts.

    A model that hears, or whose chat template refuses the prompts, answers none of them: nothing is
    known of it before its first answer.
    """
    encoder = target.config.encoder
    if encoder is not None and encoder.is_audio:
        return AcceptanceRates((), (), 0)
    try:
        rows = _rows(target, min(batch.max_length, max_seq_len, LONGEST_MEASURED))
    except InputError:
        return AcceptanceRates((), (), 0)
    size = min(num_rows, batch.num_apart)
    groups = [rows[first : first + size] for first in range(0, len(rows), size)]
    counts = [_answer(batch, group) for group in groups]
    accepted, decided, lengths = (np.concatenate(leaves) for leaves in zip(*counts, strict=True))
    return AcceptanceRates(
        tuple(map(tuple, accepted.sum(axis=0).tolist())),
        tuple(map(tuple, decided.sum(axis=0).tolist())),
        round(float(lengths.sum()) / max(int((lengths < _MAX_NEW_TOKENS).sum()), 1)),
    )


def _rows(target: LoadedModel, longest: int) -> list[Row]:
    settings, rows = SamplingParams(max_new_tokens=_MAX_NEW_TOKENS, temperature=0.0), []
    for text in _PROMPTS:
        prompt = encode_text(target, text, chat=None, system=None)[-(longest // 2) :]
        prompt, source = read_prompt(target, Request(prompt, settings), chat=None, system=None)
        rows.append(make_row(prompt, settings, target, longest, source))
    return rows


def _answer(batch: Batch, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns accepted and decided drafts, [rows k 2], and lengths of the answers, [rows]."""
    for number, row in enumerate(rows):
        batch.fill(number, row)
    control = batch.state.control
    assert control is not None
    most = jnp.full_like(control.forced, batch.engine.numbers[-1])
    batch.state = batch.state.replace(control=control.replace(forced=most))
    while not np.all(processes.fetch(batch.state.is_done)):
        batch.run(MAX_ROUNDS_PER_VISIT)
    control = batch.state.control
    assert control is not None
    counts = processes.fetch((control.kept, control.tried, control.num_emitted))
    for number in range(len(rows)):
        batch.finish(number)
    return tuple(leaf[: len(rows)] for leaf in counts)  # type: ignore[return-value]
