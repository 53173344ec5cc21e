"""A test that the compiled loop emits the target's distribution, and its negative control."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec.common.typing import Params
from jspec.generation.request import SamplingParams
from jspec.lab.analysis.goodness import Fit, goodness_of_fit
from jspec.lab.auditing.rows import Context, Rows, first_tokens, jit_logits, rows_at_once
from jspec.lab.auditing.subject import Check
from jspec.weights.resolver import LoadedModel

NUM_TOKENS = 4  # of the joint distribution; rows whose drafts fail take as many rounds
FALSE_ALARM = 1e-6
_PATHS_A_CALL = 32  # of ten tokens: few enough rows for the matrix products of a round
_FLATTENING = 0.7
_SMALLEST_DISTANCE = 0.02  # in total variation; anything closer is no fair control


def path_logits(target: LoadedModel, context: Context, num_tokens: int) -> np.ndarray:
    """Returns the target's logits of the alphabet along every path of that many tokens.

    Returns:
      [k, ..., k, num_tokens, k] with num_tokens - 1 leading axes: entry [a, b, ..., t] belongs to
      the position after t tokens of the path a, b, ...
    """
    size, begin = len(context.alphabet), len(context.prompt)
    paths = itertools.product(context.alphabet, repeat=num_tokens - 1)
    blocks = np.array([[*context.prompt, context.first, *path] for path in paths], np.int32)
    logits_of, step = jit_logits(target), rows_at_once(target, _PATHS_A_CALL)
    chunks = [
        np.asarray(logits_of(target.params, blocks[i : i + step]))[:, begin:]
        for i in range(0, len(blocks), step)
    ]
    logits = np.concatenate([chunk[..., context.alphabet] for chunk in chunks])
    return logits.reshape(*[size] * (num_tokens - 1), num_tokens, size)


def joint_distribution(
    logits: np.ndarray, context: Context, settings: SamplingParams, num_tokens: int
) -> np.ndarray:
    """Returns the distribution of the tokens after the context's first, [k, ..., k] float64.

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


def reference_distribution(
    logits: np.ndarray,
    token_ids: Sequence[int],
    settings: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int] = (),
) -> np.ndarray:
    """Returns the next token's distribution over an alphabet, [k] float64, the only tokens allowed.

    Independent of the code that samples: it sorts, and takes one position at a time.

    Args:
      logits: the target's, of the alphabet's tokens, [k].
      token_ids: the alphabet, [k].
      settings: how tokens are sampled.
      prompt: the request's ids.
      output: ids emitted so far.
      stop_ids: tokens that end the row.
    """
    ids = np.asarray(token_ids)
    logits = np.asarray(logits, np.float64) + [dict(settings.logit_bias).get(i, 0.0) for i in ids]
    repeated = np.where(logits < 0, settings.repetition_penalty, 1 / settings.repetition_penalty)
    logits = np.where(np.isin(ids, [*prompt, *output]), logits * repeated, logits)
    counts = np.array([list(output).count(i) for i in ids])
    logits -= settings.presence_penalty * (counts > 0) + settings.frequency_penalty * counts
    logits[np.isin(ids, settings.forbidden_token_ids)] = -np.inf
    if len(output) < settings.min_new_tokens:
        logits[np.isin(ids, stop_ids)] = -np.inf
    if settings.temperature == 0:
        return (np.arange(len(ids)) == np.argmax(logits)).astype(float)
    return _filtered(logits / settings.temperature, settings)


def _filtered(logits: np.ndarray, settings: SamplingParams) -> np.ndarray:
    """Applies top-k, top-p and min-p; tokens that tie with the last one stay."""
    import scipy.special

    if settings.top_k:
        logits = _keep_from(logits, np.sort(logits)[::-1][min(settings.top_k, len(logits)) - 1])
    if settings.top_p < 1:
        probs = np.sort(scipy.special.softmax(logits))[::-1]
        last = np.argmax(np.cumsum(probs) >= settings.top_p - 1e-12)
        logits = _keep_from(logits, np.sort(logits)[::-1][last])
    if settings.min_p:
        logits = _keep_from(logits, logits.max() + np.log(settings.min_p))
    return scipy.special.softmax(logits)


def _keep_from(logits: np.ndarray, threshold: float) -> np.ndarray:
    return np.where(logits >= threshold, logits, -np.inf)


def check_distribution(rows: Rows, num_rows: int) -> tuple[Check, Check]:
    """Tests the distribution that rows of `NUM_TOKENS` rounds emit, and the test itself.

    It must reject 30 % flatter logits.
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
    detail = (
        f"a target of 30 % flatter logits, {distance:.2g} away, gives p = {control.p_value:.2g} "
        f"(expected below {FALSE_ALARM:g})"
    )
    data = control._asdict() | {"distance": distance}
    return distribution, Check("negative control", control.p_value < FALSE_ALARM, detail, data)


def flattened(params: Params) -> Params:
    """Returns the target with logits times 0.7: the same programs run it."""
    norm = {name: leaf * _FLATTENING for name, leaf in params["final_norm"].items()}
    return params | {"final_norm": norm}


def fit_rows(rows: Rows, expected: np.ndarray, num_rows: int, **options: Any) -> Fit:
    """Tests the joint distribution of the rows' first tokens; one outside the alphabet refutes it.

    There are as many rounds as `expected`, of `joint_distribution`, has axes, or more. `options`
    are those of `Rows.run`.
    """
    counts, num_outside = np.zeros_like(expected), 0
    for infos, _ in rows.run(num_rows, **options):
        tokens = first_tokens(infos, expected.ndim)
        is_place = tokens[..., None] == np.array(rows.context.alphabet)
        is_inside = is_place.any(axis=2).all(axis=1)
        np.add.at(counts, tuple(is_place[is_inside].argmax(axis=2).T), 1)
        num_outside += int((~is_inside).sum())
    return goodness_of_fit(np.append(counts, num_outside), np.append(expected, 0.0))
