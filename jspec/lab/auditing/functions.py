"""The audit of `speculate` for two functions of a user: does the chain follow g, on this machine?

A chain of g alone is drawn as often as a speculative chain, and their values are compared, by the
two-sample test of Kolmogorov and Smirnov for densities, by chi-square for categories: each number
of each of the first steps, and the products of neighbours, in which dependence shows. The p-value
of all is the smallest, times the number of tests. The rule without a residual must fail this test.
"""

import functools
import pathlib
import runpy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jspec.common.errors import InputError, describe_error
from jspec.lab.auditing.subject import Check
from jspec.speculation.distributions import draw
from jspec.speculation.function_checks import check_functions, is_pytree
from jspec.speculation.functions import RULES, Rule, judge_by_ratio, latest, run_rounds, speculate

NUM_STEPS = 4
FALSE_ALARM = 1e-6
_FEWEST = 10  # expected in a cell of chi-square


class Functions(NamedTuple):
    """What is audited: the arguments of `speculate`."""

    f: Any
    g: Any
    state: Any
    update: Callable[[Any, Any], Any] = latest


def read_functions(path: str) -> Functions:
    """Returns the f, g, state and, if it is there, update of a Python file.

    Raises:
      InputError: there is no such file, it raises, or it lacks one of them.
    """
    if not pathlib.Path(path).is_file():
        what = "a folder" if pathlib.Path(path).is_dir() else "no such file"
        raise InputError(f"expected a Python file with f, g and state, got {path}: {what}")
    try:
        names = runpy.run_path(path)
        if missing := [name for name in ("f", "g", "state") if name not in names]:
            raise InputError(f"{path}: expected f, g and state, got no {', '.join(missing)}")
        functions = Functions(names["f"], names["g"], names["state"], names.get("update", latest))
        check_functions(functions.f, functions.g, functions.update, functions.state)
    except InputError:
        raise
    except Exception as error:  # whatever the user's file raises is the user's error
        raise InputError(f"{path}: {describe_error(error)}") from None
    return functions


def check_speculate(functions: Functions, num_drafts: int, num_rows: int) -> Iterator[Check]:
    """Yields the outcome of each check, on chains of `NUM_STEPS` values.

    Raises:
      InputError: a `log_prob` is NaN.
    """
    yield check_chain(functions, num_drafts)
    plain = _chains(functions, RULES["coupled"], 0, num_rows, seed=1)[0]
    values, accepted = _chains(functions, RULES["rejection"], num_drafts, num_rows, seed=2)
    p_value = two_sample_p_value(values, plain)
    detail = f"p = {p_value:.2g} between {num_rows} chains of g alone and as many with guesses"
    yield Check("distribution", p_value >= FALSE_ALARM, detail, {"p_value": p_value})
    wrong, _ = _chains(functions, _WITHOUT_RESIDUAL, num_drafts, num_rows, seed=2)
    control = two_sample_p_value(wrong, plain)
    detail = f"no residual gives p = {control:.2g} (expected below {FALSE_ALARM:g})"
    yield Check("negative control", control < FALSE_ALARM, detail, {"p_value": control})
    detail = f"{accepted} guesses were kept in these chains"
    yield Check("drafts", accepted > 0, detail, {"num_accepted": accepted})


def check_chain(functions: Functions, num_drafts: int) -> Check:
    """Checks one chain: the same key, the same values; coupled, those of g alone."""
    run = functools.partial(
        speculate, functions.f, functions.g, functions.state, jax.random.key(0),
        num_steps=8 * (num_drafts + 1), update=functions.update,
    )  # fmt: skip
    twice = [np.asarray(run(num_drafts=num_drafts).values) for _ in range(2)]
    is_same = bool((twice[0] == twice[1]).all())
    coupled, alone = (
        np.asarray(run(num_drafts=number, acceptance="coupled").values, np.float64)
        for number in (num_drafts, 0)
    )
    is_plain = np.allclose(coupled, alone, rtol=1e-4, atol=1e-5)
    detail = f"{len(alone)} steps: the same key gives "
    detail += "the same values" if is_same else "other values"
    detail += f"; coupled, {'those' if is_plain else 'not those'} of g alone"
    return Check("seeds", is_same and bool(is_plain), detail, {})


def _from_target(target: Any, draft: Any, value: Any, is_rejected: Any, rng_key: Any) -> jax.Array:
    """Draws from g's own distribution after a rejection, too: the classic mistake."""
    del draft, value, is_rejected
    return draw(target, rng_key)


_WITHOUT_RESIDUAL = Rule(functools.partial(judge_by_ratio, after=_from_target), False)


def _chains(
    functions: Functions, rule: Rule, num_drafts: int, num_rows: int, *, seed: int
) -> tuple[np.ndarray, int]:
    """Returns the values of many chains, [rows steps ...], and how many guesses were kept.

    Raises:
      InputError: a `log_prob` is NaN.
    """
    parts = [part if is_pytree(part) else jax.tree_util.Partial(part)
             for part in (functions.f, functions.g, functions.update)]  # fmt: skip
    state = jax.tree.map(jax.numpy.asarray, functions.state)
    run = functools.partial(
        run_rounds, *parts, state, num_steps=NUM_STEPS, num_drafts=num_drafts, rule=rule
    )
    chains, _ = jax.vmap(lambda key: run(key))(jax.random.split(jax.random.key(seed), num_rows))
    if (np.asarray(chains.num_values) < NUM_STEPS).any():
        raise InputError("expected log_prob of f and g to be numbers in every chain, got NaN")
    return np.asarray(chains.values), int(chains.is_guess.sum())


def two_sample_p_value(values: np.ndarray, others: np.ndarray) -> float:
    """Returns the p-value that two samples of chains, [rows steps ...], are of one distribution."""
    import scipy.stats

    is_category = values.dtype.kind in "iub"
    p_values = []
    for sample, other in zip(_columns(values), _columns(others), strict=True):
        if is_category:
            p_values.append(_categories_p_value(sample, other))
        else:
            p_values.append(float(scipy.stats.ks_2samp(sample, other)[1]))  # type: ignore[arg-type]
    return min(1.0, min(p_values) * len(p_values))


def _columns(values: np.ndarray) -> list[np.ndarray]:
    """Returns each number of each step, and the products with that of the step before, [rows]."""
    flat = values.reshape(*values.shape[:2], -1).astype(np.float64)
    products = flat[:, 1:] * flat[:, :-1]
    return [*np.concatenate([flat, products], axis=1).reshape(len(flat), -1).T]


def _categories_p_value(sample: np.ndarray, reference: np.ndarray) -> float:
    import scipy.stats

    kinds, index = np.unique(np.concatenate([sample, reference]), return_inverse=True)
    counts = np.stack([np.bincount(part, minlength=len(kinds))
                       for part in (index[: len(sample)], index[len(sample) :])])  # fmt: skip
    is_rare = counts.sum(axis=0) < 2 * _FEWEST
    pooled = [counts[:, ~is_rare], counts[:, is_rare].sum(axis=1, keepdims=True)]
    counts = np.concatenate(pooled[: 1 + int(is_rare.any())], axis=1)
    counts = counts[:, counts.sum(axis=0) > 0]
    return float(scipy.stats.chi2_contingency(counts)[1]) if counts.shape[1] > 1 else 1.0  # type: ignore[arg-type]
