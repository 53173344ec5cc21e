"""A test that the compiled loop emits the target's distribution, and its negative control."""

import itertools
from typing import Any

import numpy as np

from jspec.common.typing import Params
from jspec.evaluation.analysis.goodness import Fit, goodness_of_fit
from jspec.evaluation.auditing.context import Context, path_logits
from jspec.evaluation.auditing.reference import reference_distribution
from jspec.evaluation.auditing.rows import Rows, first_tokens
from jspec.evaluation.auditing.subject import Check
from jspec.generation.request import Settings

NUM_TOKENS = 4  # of the joint distribution; rows whose drafts fail take as many rounds
FALSE_ALARM = 1e-6
_FLATTENING = 0.7
_SMALLEST_DISTANCE = 0.02  # in total variation; anything closer is no fair control


def joint_distribution(
    logits: np.ndarray, context: Context, settings: Settings, num_tokens: int
) -> np.ndarray:
    """Returns the joint distribution of tokens after the context's first, [k, ..., k] float64.

    `logits` are those of `path_logits`.
    """
    joint = np.ones(())
    for t in range(num_tokens):
        distributions = [
            reference_distribution(
                logits[(*path, *[0] * (num_tokens - 1 - t), t)],
                context.alphabet,
                settings,
                prompt=context.prompt,
                output=[context.first, *(context.alphabet[i] for i in path)],
            )
            for path in itertools.product(range(len(context.alphabet)), repeat=t)
        ]
        joint = joint[..., None] * np.reshape(distributions, (*joint.shape, -1))
    return joint


def check_distribution(rows: Rows, num_rows: int) -> tuple[Check, Check]:
    """Tests the emitted distribution, and that the test would notice 30 % flatter logits.

    Args:
      rows: compiled rounds, `NUM_TOKENS` a run.
      num_rows: independent rows.
    """
    target, context, settings = rows.subject.target, rows.context, rows.settings
    logits = path_logits(target, context, NUM_TOKENS)
    expected = joint_distribution(logits, context, settings, NUM_TOKENS)
    fit = fit_rows(rows, expected, num_rows)
    distribution = Check(
        "emitted distribution",
        fit.p_value >= FALSE_ALARM,
        f"p = {fit.p_value:.2g}, total variation {fit.total_variation:.4f} where sampling noise "
        f"gives {fit.noise:.4f} ({fit.num_samples} rows, {NUM_TOKENS} tokens, {fit.num_cells} "
        f"cells, {rows.num_draft_tokens} drafts a round)",
        fit._asdict() | {"num_draft_tokens": rows.num_draft_tokens},
    )
    flat = joint_distribution(_FLATTENING * logits, context, settings, NUM_TOKENS)
    distance = 0.5 * float(np.abs(flat - expected).sum())
    if distance < _SMALLEST_DISTANCE:
        detail = f"none: flatter logits are only {distance:.2g} away under these settings"
        return distribution, Check("negative control", True, detail, {"distance": distance})
    control = fit_rows(rows, expected, num_rows, params=flattened(target.params))
    return distribution, Check(
        "negative control",
        control.p_value < FALSE_ALARM,
        f"a target of 30 % flatter logits, {distance:.2g} away, gives p = {control.p_value:.2g} "
        f"(expected below {FALSE_ALARM:g})",
        control._asdict() | {"distance": distance},
    )


def flattened(params: Params) -> Params:
    """Returns the target with logits times 0.7: the same programs run it."""
    return params | {"final_norm": {"scale": params["final_norm"]["scale"] * _FLATTENING}}


def fit_rows(rows: Rows, expected: np.ndarray, num_rows: int, **options: Any) -> Fit:
    """Tests the joint distribution of the rows' first tokens; one outside the alphabet refutes it.

    Args:
      rows: compiled rounds, at least as many as `expected` has axes.
      expected: the joint distribution, of `joint_distribution`.
      num_rows: independent rows.
      **options: of `Rows.run`.
    """
    counts, num_outside = np.zeros_like(expected), 0
    for infos, _ in rows.run(num_rows, **options):
        tokens = first_tokens(infos, expected.ndim)
        is_place = tokens[..., None] == np.array(rows.context.alphabet)
        is_inside = is_place.any(axis=2).all(axis=1)
        np.add.at(counts, tuple(is_place[is_inside].argmax(axis=2).T), 1)
        num_outside += int((~is_inside).sum())
    return goodness_of_fit(np.append(counts, num_outside), np.append(expected, 0.0))
