"""Whether what the compiled loop emits follows the target's law: a test, and its control."""

import itertools
from collections.abc import Sequence

import numpy as np

from jspec.analysis.goodness import Fit, goodness_of_fit
from jspec.auditing.check import Check
from jspec.auditing.reference import reference_law
from jspec.auditing.rows import Context, Rows, path_logits
from jspec.auditing.subject import Subject
from jspec.request import Settings
from jspec.typing import Params

NUM_TOKENS = 4  # of the joint law; rows whose drafts fail take as many rounds
FALSE_ALARM = 1e-6
_FLATTENING = 0.7


def joint_law(
    logits: np.ndarray, context: Context, settings: Settings, num_tokens: int
) -> np.ndarray:
    """Returns the joint law of the tokens after the context's first one, [k, ..., k] float64.

    Args:
      logits: of `path_logits`.
      context: where the rows begin.
      settings: how tokens are sampled.
      num_tokens: how many.
    """
    size = len(context.alphabet)
    joint = np.zeros([size] * num_tokens)
    for path in itertools.product(range(size), repeat=num_tokens - 1):
        probs = np.ones(())
        for t in range(num_tokens):
            law = _law_after(path[:t], logits[(*path, t)], context, settings)
            probs = probs * (law[path[t]] if t < num_tokens - 1 else law)
        joint[path] = probs
    return joint


def _law_after(
    path: Sequence[int], logits: np.ndarray, context: Context, settings: Settings
) -> np.ndarray:
    output = [context.first, *(context.alphabet[i] for i in path)]
    return reference_law(logits, context.alphabet, settings, prompt=context.prompt, output=output)


def check_law(subject: Subject, rows: Rows, context: Context, num_rows: int) -> tuple[Check, Check]:
    """Tests the emitted law, and that the test would see a target whose logits are 30 % flatter.

    Args:
      subject: what is audited.
      rows: its compiled rounds, of `NUM_TOKENS` rounds.
      context: of the rows.
      num_rows: independent rows.
    """
    logits = path_logits(subject.target, context, NUM_TOKENS)
    expected = joint_law(logits, context, rows.settings, NUM_TOKENS)
    fit = _fit(rows, context, expected, num_rows, None)
    law = Check(
        "emitted law",
        fit.p_value >= FALSE_ALARM,
        f"p = {fit.p_value:.2g}, total variation {fit.total_variation:.4f} where sampling noise "
        f"gives {fit.noise:.4f} ({fit.num_samples} rows, {NUM_TOKENS} tokens, {fit.num_cells} "
        "cells)",
        fit._asdict() | {"entropy_bits": float(-np.sum(expected * np.log2(expected + 1e-300)))},
    )
    flat = _flattened(subject.target.params)
    control = _fit(rows, context, expected, num_rows, flat)
    is_blind = rows.settings.temperature == 0
    return law, Check(
        "negative control",
        is_blind or control.p_value < FALSE_ALARM,
        "not at temperature 0, where flatter logits have the same maximum"
        if is_blind
        else f"a target of 30 % flatter logits is refused: p = {control.p_value:.2g}",
        control._asdict(),
    )


def _flattened(params: Params) -> Params:
    """Returns the target with logits scaled: the same programs run it."""
    scale = params["final_norm"]["scale"]
    return params | {"final_norm": {"scale": scale * _FLATTENING}}


def _fit(
    rows: Rows, context: Context, expected: np.ndarray, num_rows: int, params: Params | None
) -> Fit:
    place = {token: i for i, token in enumerate(context.alphabet)}
    counts = np.zeros_like(expected)
    for tokens, _ in rows.run(num_rows, params=params):
        cells = np.vectorize(place.__getitem__)(tokens)
        np.add.at(counts, tuple(cells.T), 1)
    return goodness_of_fit(counts, expected)
