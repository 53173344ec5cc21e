"""Proves by statistics that the lossless rules are lossless, through the compiled loop.

`python scripts/prove.py --output_json=benchmarks/results/2026-11-21-cpu-prove.json`

A tiny random Llama that has opinions, and a draft that is its first layer disturbed. For every
lossless rule, drafter and way of sampling: as many rows as --num_rows, each with a seed of its own,
run through the rounds that the Generator runs, and the joint distribution of the first tokens of
each is compared by a chi-square with the distribution computed in float64
(`jspec.evaluation.auditing.reference`). At temperature 0 every row has to take the one path. Seeds
differ from cell to cell. A right library fails somewhere in the table for one in a million choices
of seeds. The whole took 24 minutes on two busy cores.

Then the same for rules, drafters and a target that are wrong on purpose: each has to be refused.

Exits with status 1 if a cell fails or a control passes.
"""

import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import flags
from flax.traverse_util import unflatten_dict

from jspec.common import cli
from jspec.common.typing import Params
from jspec.evaluation.analysis.goodness import Fit
from jspec.evaluation.auditing import controls
from jspec.evaluation.auditing.context import Context, path_logits
from jspec.evaluation.auditing.distribution import fit_rows, flattened, joint_distribution
from jspec.evaluation.auditing.rows import Rows, build_drafter
from jspec.evaluation.auditing.subject import Subject
from jspec.generation import provenance
from jspec.generation.request import Settings
from jspec.models import LlamaConfig
from jspec.speculation.acceptance import get_rule
from jspec.speculation.acceptance.types import AcceptanceRule
from jspec.speculation.types import Drafter
from jspec.weights.resolver import LoadedModel
from jspec.weights.tensor_names import parameter_table
from jspec.weights.tokenizers.byte_tokenizer import ByteTokenizer

_NUM_ROWS = flags.DEFINE_integer("num_rows", 200_000, "Independent rows of every cell.")
_ROWS_PER_RUN = flags.DEFINE_integer("rows_per_run", 20_000, "Rows that run together.")
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write the table to this file.")

FALSE_ALARM = 1e-6  # of the whole table
NUM_TOKENS = 6  # of the joint distribution; a round emits 1 to 3
_NUM_DRAFT_TOKENS = 2
_STD = 0.5
_DISTURBANCE = 0.2
_CONTROL_SHARE = 4  # a control takes one row where a cell takes so many
_OWN_TEMPERATURE = 0.5  # of the drafter, where it has one of its own
_TARGET_CONFIG = LlamaConfig(
    vocab_size=5, embed_dim=16, hidden_dim=16, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=8, max_seq_len=64,
)  # fmt: skip
_CONTEXT = Context(prompt=[0, 1, 2, 0, 1, 3], first=0, alphabet=list(range(5)))

SETTINGS = {
    "T=1": Settings(temperature=1.0),
    "T=0.7": Settings(temperature=0.7),
    "top_k": Settings(temperature=1.0, top_k=3),
    "top_p": Settings(temperature=1.0, top_p=0.8),
    "min_p": Settings(temperature=1.0, min_p=0.15),
    "penalties": Settings(
        temperature=1.0,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={1: -0.5, 4: 1.0},
    ),
    "T=0": Settings(temperature=0.0),
}


class Cell(NamedTuple):
    """One line of the table.

    Attributes:
      rule: by name.
      drafter: by name.
      draft_temperature: the drafter's own; None takes the target's.
      settings: a key of `SETTINGS`.
    """

    rule: str
    drafter: str
    draft_temperature: float | None
    settings: str


class Control(NamedTuple):
    """One thing that is wrong.

    Attributes:
      name: what.
      cell: all the rest.
      rule: what is done to the rule.
      drafter: what is done to the drafter.
      target: what is done to the target's parameters; the drafter's stay.
    """

    name: str
    cell: Cell
    rule: Callable[[AcceptanceRule], AcceptanceRule] | None = None
    drafter: Callable[[Any], Drafter] | None = None
    target: Callable[[Params], Params] | None = None


def make_cells() -> list[Cell]:
    """Returns every lossless rule with every drafter under all settings."""
    drafters: list[tuple[str, float | None]] = [
        ("prompt_lookup", None), ("model", None), ("model", _OWN_TEMPERATURE)
    ]  # fmt: skip
    cells = [Cell("rejection", "none", None, settings) for settings in SETTINGS]
    rules = ("rejection", "block", "coupled")
    for rule, (drafter, temperature), settings in itertools.product(rules, drafters, SETTINGS):
        cells.append(Cell(rule, drafter, temperature, settings))
    for drafter, temperature in drafters:
        cells.append(Cell("greedy", drafter, temperature, "T=0"))
    return cells


def make_controls() -> list[Control]:
    """Returns what has to be refused."""
    hot = functools.partial(controls.misreporting, drawn=controls.hotter)
    unsaid = functools.partial(controls.misreporting, reported=controls.unprocessed)
    undone = functools.partial(controls.misreporting, drawn=controls.unprocessed)
    plain = Cell("rejection", "none", None, "T=1")
    coupled, greedy = (Cell("coupled", "model", None, "T=1"), Cell("greedy", "model", None, "T=0"))
    found = [
        Control("target with logits times 0.7", plain, target=flattened),
        Control("target with logits times 0.7", coupled, target=flattened),
        Control("every draft kept", coupled, rule=controls.keeping_all),
        Control("every draft kept", greedy, rule=controls.keeping_all),
    ]
    for rule in ("rejection", "block"):
        model, lookup = (Cell(rule, name, None, "T=1") for name in ("model", "prompt_lookup"))
        found += [
            Control("target with logits times 0.7", model, target=flattened),
            Control("drafts drawn at twice the temperature reported", model, drafter=hot),
            Control("no residual", model, rule=controls.without_residual),
            Control("no residual", lookup, rule=controls.without_residual),
        ]
        for settings in ("penalties", "top_k"):
            here = model._replace(settings=settings)
            found += [
                Control(f"draft distribution reported without {settings}", here, drafter=unsaid),
                Control(f"drafts drawn without {settings}", here, drafter=undone),
            ]
        if rule == "block":
            # With a draft model as many rows as a cell has, or more, are needed to see it.
            keyed = controls.with_absolute_uniforms
            found.append(Control("uniforms keyed by absolute position", lookup, rule=keyed))
    return found


class Bench:
    """Runs cells; those of one rule and drafter share their compiled programs.

    Attributes:
      target: the target.
      draft: the draft model.
      entropy: of the target's distribution, a share of that of the uniform one, mean over all
        paths.
      distance: total variation between draft and target, likewise.
    """

    def __init__(self, num_rows: int, rows_per_run: int) -> None:
        """Makes the models, which have to have opinions and to differ.

        Args:
          num_rows: of every cell.
          rows_per_run: that run together.
        """
        self._num_rows, self._rows_per_run = num_rows, rows_per_run
        self._num_runs = 0
        self.target, self.draft = make_models()
        self._logits = path_logits(self.target, _CONTEXT, NUM_TOKENS)
        target, draft = (
            softmax(logits)
            for logits in (self._logits, path_logits(self.draft, _CONTEXT, NUM_TOKENS))
        )
        size = self.target.config.vocab_size
        self.entropy = float(-np.sum(target * np.log(target), axis=-1).mean() / np.log(size))
        self.distance = float(0.5 * np.abs(target - draft).sum(axis=-1).mean())
        assert self.entropy <= 0.7, self.entropy
        assert 0.2 <= self.distance <= 0.8, self.distance
        self.expected_distribution = functools.cache(self._expected_distribution)
        self._rows = functools.lru_cache(maxsize=1)(self._make_rows)

    def fit(self, cell: Cell, control: Control | None = None) -> Fit:
        """Returns how well the rows of a cell fit the distribution."""
        settings = dataclasses.replace(
            SETTINGS[cell.settings], draft_temperature=cell.draft_temperature
        )
        num_rows, params, change = self._num_rows, self.target.params, (None, None)
        if control is not None:
            num_rows, change = num_rows // _CONTROL_SHARE, (control.rule, control.drafter)
            params = params if control.target is None else control.target(params)
        if settings.temperature == 0:  # all rows alike
            num_rows = self._rows_per_run
        self._num_runs += 1
        return fit_rows(
            self._rows(cell.rule, cell.drafter, *change),
            _CONTEXT,
            self.expected_distribution(cell.settings),
            num_rows,
            params=params,
            settings=settings,
            first_seed=self._num_runs * (self._num_rows + self._rows_per_run),
        )

    def _expected_distribution(self, settings: str) -> np.ndarray:
        return joint_distribution(self._logits, _CONTEXT, SETTINGS[settings], NUM_TOKENS)

    def _make_rows(
        self,
        rule: str,
        drafter: str,
        change_rule: Callable[[AcceptanceRule], AcceptanceRule] | None,
        change_drafter: Callable[[Any], Drafter] | None,
    ) -> Rows:
        draft = self.draft if drafter == "model" else None
        subject = Subject(self.target, draft, drafter, _NUM_DRAFT_TOKENS, rule, Settings())
        return Rows(
            subject, _CONTEXT, NUM_TOKENS, rows_per_run=self._rows_per_run,
            rule=None if change_rule is None else change_rule(get_rule(rule)),
            drafter=change_drafter and change_drafter(build_drafter(subject).drafter),
        )  # fmt: skip


def make_models() -> tuple[LoadedModel, LoadedModel]:
    """Returns the target, and a draft that is its first layer disturbed."""
    tokenizer = ByteTokenizer(_TARGET_CONFIG.vocab_size, eos_ids=())
    models = []
    for num_layers, disturbance in ((_TARGET_CONFIG.num_layers, 0.0), (1, _DISTURBANCE)):
        config = dataclasses.replace(_TARGET_CONFIG, num_layers=num_layers)
        leaves = {}
        for index, rule in enumerate(parameter_table(_TARGET_CONFIG)):
            weights, noise = np.random.default_rng((0, index)).normal(size=(2, *rule.shape))
            values = _STD * (weights + disturbance * noise) + (rule.path[-1] == "scale")
            leaves[rule.path] = jnp.asarray(values, jnp.float32)
        leaves = {rule.path: leaves[rule.path] for rule in parameter_table(config)}
        name = f"{num_layers} layers of random weights"
        models.append(LoadedModel(config, unflatten_dict(leaves), tokenizer, name, "random"))
    return models[0], models[1]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns probabilities in float64."""
    exp = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def describe(cell: Cell, fit: Fit, has_passed: bool, seconds: float) -> dict[str, Any]:
    """Returns a line of the table as plain values, and prints it."""
    own = "" if cell.draft_temperature is None else f", T={cell.draft_temperature:g}"
    line = {"rule": cell.rule, "drafter": cell.drafter + own, "settings": cell.settings}
    print(
        "ok  " if has_passed else "FAIL",
        f"{line['rule']:10} {line['drafter']:14} {line['settings']:10} p = {fit.p_value:<9.2g}"
        f"{fit.num_cells:5} cells  TV {fit.total_variation:.4f} (noise {fit.noise:.4f})"
        f"{seconds:6.1f} s",
        flush=True,
    )
    return {**line, **fit._asdict(), "seconds": round(seconds, 1), "is_as_expected": has_passed}


def run_table(bench: Bench, level: float) -> Iterator[dict[str, Any]]:
    """Yields every cell's line."""
    for cell in make_cells():
        begin = time.perf_counter()
        fit = bench.fit(cell)
        yield describe(cell, fit, fit.p_value >= level, time.perf_counter() - begin)


def run_controls(bench: Bench, level: float) -> Iterator[dict[str, Any]]:
    """Yields every control's line."""
    for control in make_controls():
        begin = time.perf_counter()
        fit = bench.fit(control.cell, control)
        print(f"{control.name}:")
        line = describe(control.cell, fit, fit.p_value < level, time.perf_counter() - begin)
        yield {"control": control.name, **line}


def main() -> None:
    """Runs the table and the controls, prints them, and writes them down."""
    begin = time.perf_counter()
    bench = Bench(_NUM_ROWS.value, _ROWS_PER_RUN.value)
    num_cells = len(make_cells())
    level = FALSE_ALARM / num_cells
    print(
        f"{num_cells} cells of {_NUM_ROWS.value} rows, {NUM_TOKENS} tokens; one fails below "
        f"p = {level:.2g}, the table by chance once in {1 / FALSE_ALARM:.0f}\n"
        f"target entropy {bench.entropy:.2f} of the uniform distribution's, draft and target "
        f"{bench.distance:.2f} apart"
    )
    cells = list(run_table(bench, level))
    refused = list(run_controls(bench, level))
    has_passed = all(line["is_as_expected"] for line in cells + refused)
    seconds = time.perf_counter() - begin
    print(f"{'passed' if has_passed else 'FAILED'} ({seconds:.0f} s)")
    record = {
        **provenance.environment(),
        "num_tokens": NUM_TOKENS,
        "num_draft_tokens": _NUM_DRAFT_TOKENS,
        "false_alarm_rate": FALSE_ALARM,
        "level_per_cell": level,
        "target_entropy_share": bench.entropy,
        "draft_target_distance": bench.distance,
        "settings": {name: dataclasses.asdict(one) for name, one in SETTINGS.items()},
        "has_passed": has_passed,
        "seconds": round(seconds),
        "cells": cells,
        "controls": refused,
    }
    if _OUTPUT_JSON.value is not None:
        with open(_OUTPUT_JSON.value, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
    if not has_passed:
        sys.exit(1)


if __name__ == "__main__":
    cli.run_main(main)
