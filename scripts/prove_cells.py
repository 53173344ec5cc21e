"""The table of `prove.py`: what is proved, and what is wrong on purpose."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from jspec.common.typing import Params
from jspec.generation.request import SamplingParams
from jspec.lab.auditing import controls, distribution
from jspec.speculation.acceptance.types import AcceptanceRule
from jspec.speculation.types import Drafter

_OWN_TEMPERATURE = 0.5  # of the drafter, where it has one of its own
_FEW_IDS = 3  # tokens that the draft model knows, where it does not know all
_TREES = "likeliest", "with", "without"  # of drafts: the options of tree_draws

SETTINGS = {
    "T=1": SamplingParams(temperature=1.0),
    "T=0.7": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(temperature=1.0, top_k=3),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.15),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3,
        logit_bias={1: -0.5, 4: 1.0},
    ),
    "T=0": SamplingParams(temperature=0.0),
}  # fmt: skip


class Cell(NamedTuple):
    """One line of the table; it is a negative control if something in it is wrong.

    Attributes:
      rule: by name.
      drafter: by name.
      settings: a key of `SETTINGS`.
      draft_temperature: the drafter's own; None takes the target's.
      num_ids: tokens among which the draft model chooses; 0 takes all five.
      tree: how its trees of two branches of two drafts are made; "" drafts a chain.
      wrong: what is wrong; "" if nothing is.
      change_rule: what is done to the rule.
      change_drafter: to the drafter, which keeps its parameters.
      change_target: to the target's parameters.
    """

    rule: str
    drafter: str
    settings: str = "T=1"
    draft_temperature: float | None = None
    num_ids: int = 0
    tree: str = ""
    wrong: str = ""
    change_rule: Callable[[AcceptanceRule], AcceptanceRule] | None = None
    change_drafter: Callable[[Any], Drafter] | None = None
    change_target: Callable[[Params], Params] | None = None


def make_cells() -> list[Cell]:
    """Returns every lossless rule with every drafter under all settings."""
    drafters = (("prompt_lookup", None, 0), ("model", None, 0), ("model", _OWN_TEMPERATURE, 0),
                ("model", None, _FEW_IDS))  # fmt: skip
    cells = [Cell("rejection", "none", settings) for settings in SETTINGS]
    rules = ("rejection", "block", "coupled")
    for rule, (drafter, own, few), settings in itertools.product(rules, drafters, SETTINGS):
        cells.append(Cell(rule, drafter, settings, own, few))
    for rule, tree, settings in itertools.product(rules, _TREES, SETTINGS):
        cells.append(Cell(rule, "model", settings, tree=tree))
    cells += [Cell("k_seq", "model", settings, tree="with") for settings in SETTINGS]
    return cells + [Cell("greedy", drafter, "T=0", own, few) for drafter, own, few in drafters]


def make_controls() -> list[Cell]:
    """Returns what has to be rejected."""
    draw = functools.partial(functools.partial, controls.misreporting)
    flattened = distribution.flattened
    flat: dict[str, Any] = {"wrong": "target with logits times 0.7", "change_target": flattened}
    kept: dict[str, Any] = {"wrong": "every draft accepted", "change_rule": controls.keeping_all}
    empty: dict[str, Any] = {"wrong": "no residual", "change_rule": controls.without_residual}
    found = [Cell("rejection", "none", **flat), Cell("coupled", "model", **flat),
             Cell("coupled", "model", **kept), Cell("greedy", "model", "T=0", **kept)]  # fmt: skip
    few = functools.partial(controls.claiming_all, num_ids=_FEW_IDS)
    changes = {"drafts drawn at twice the temperature reported": draw(drawn=controls.hotter),
               f"{_FEW_IDS} tokens drafted, the distribution of all reported": few}  # fmt: skip
    unprocessed = {"draft distribution reported": draw(reported=controls.unprocessed),
                   "drafts drawn": draw(drawn=controls.unprocessed)}  # fmt: skip
    for rule in ("rejection", "block"):
        found.append(Cell(rule, "model", **flat))
        found += [Cell(rule, "model", wrong=w, change_drafter=f) for w, f in changes.items()]
        found += [Cell(rule, drafter, **empty) for drafter in ("model", "prompt_lookup")]
        for settings, wrong in itertools.product(("penalties", "top_k"), unprocessed):
            own = {"wrong": f"{wrong} without {settings}", "change_drafter": unprocessed[wrong]}
            found.append(Cell(rule, "model", settings, **own))
    # With a draft model as many rows as a cell has, or more, are needed to see it.
    prefix = {"wrong": "a prefix kept", "change_rule": controls.keeping_a_prefix}
    for rule, tree in itertools.product(("rejection", "block"), ("likeliest", "with")):
        found += [Cell(rule, "model", tree=tree, **change) for change in (prefix, empty, kept)]
    found.append(Cell("coupled", "model", tree="without", **prefix))
    wrong, keyed = "uniforms keyed by absolute position", controls.with_absolute_uniforms
    return [*found, Cell("block", "prompt_lookup", wrong=wrong, change_rule=keyed)]
