"""Proves by statistics that the lossless rules are lossless, through the compiled loop.

`python scripts/prove.py --output_json=prove.json`

A tiny random Llama with opinions, and a draft that is its first layer disturbed. For every lossless
rule, drafter and way of sampling, --num_rows rows with seeds of their own run through the rounds
that the Generator runs. A chi-square compares the joint distribution of each row's first tokens
with that computed in float64. At temperature 0 every row has to take the one path. A right library
fails for one in a million choices of seeds. What is wrong on purpose has to be rejected, for which
140,000 rows are enough, but 20,000 are not. The default takes half an hour on one core.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy.special
from absl import flags
from flax.traverse_util import unflatten_dict

from jspec.cli import program as cli
from jspec.common.errors import check_count
from jspec.common.timing import timed
from jspec.common.typing import Params
from jspec.drafters import DrafterOptions
from jspec.generation.provenance import Recorder
from jspec.generation.request import SamplingParams
from jspec.lab.analysis.goodness import Fit, samples_needed
from jspec.lab.auditing import controls, distribution
from jspec.lab.auditing.rows import Context, Rows, build_drafter
from jspec.lab.auditing.subject import Subject
from jspec.models import DecoderConfig
from jspec.speculation.acceptance import get_rule
from jspec.speculation.types import AcceptanceRule, Drafter
from jspec.weights.resolver import LoadedModel
from jspec.weights.tensor_names import parameter_table
from jspec.weights.tokenizers.tokenizer import ByteTokenizer

_NUM_ROWS = flags.DEFINE_integer("num_rows", 200_000, "Independent rows of every cell.")
_ROWS_PER_RUN = flags.DEFINE_integer("rows_per_run", 20_000, "Rows that run together.")
_ONLY_TREES = flags.DEFINE_bool("trees", False, "Only the cells of trees, and their controls.")
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write the table to this file.")

FALSE_ALARM = 1e-6  # of the whole table
NUM_TOKENS = 6  # of the joint distribution; a round emits 1 to 3
_NUM_DRAFT_TOKENS = 2
_STD, _DISTURBANCE = 0.5, 0.2  # of the target's weights; of the draft's, as a share of it
_CONTROL_SHARE = 4  # a cell takes this many rows for one of a control
_TARGET_CONFIG = DecoderConfig(
    vocab_size=5, embed_dim=16, hidden_dim=16, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=8, max_seq_len=64,
)  # fmt: skip
_CONTEXT = Context(prompt=[0, 1, 2, 0, 1, 3], first=0, alphabet=list(range(5)))


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
    for rule, (drafter, temperature, num_ids), settings in itertools.product(
        rules, drafters, SETTINGS
    ):
        cells.append(Cell(rule, drafter, settings, temperature, num_ids))
    for rule, tree, settings in itertools.product(rules, _TREES, SETTINGS):
        cells.append(Cell(rule, "model", settings, tree=tree))
    cells += [Cell("k_seq", "model", settings, tree="with") for settings in SETTINGS]
    return cells + [
        Cell("greedy", drafter, "T=0", temperature, num_ids)
        for drafter, temperature, num_ids in drafters
    ]


def make_controls() -> list[Cell]:
    """Returns what has to be rejected."""
    draw = functools.partial(functools.partial, controls.misreporting)
    flattened = distribution.flattened
    flat: dict[str, Any] = {"wrong": "target with logits times 0.7", "change_target": flattened}
    kept: dict[str, Any] = {"wrong": "every draft accepted", "change_rule": controls.keeping_all}
    empty: dict[str, Any] = {"wrong": "no residual", "change_rule": controls.without_residual}
    cells = [Cell("rejection", "none", **flat), Cell("coupled", "model", **flat),
             Cell("coupled", "model", **kept), Cell("greedy", "model", "T=0", **kept)]  # fmt: skip
    few = functools.partial(controls.claiming_all, num_ids=_FEW_IDS)
    changes = {"drafts drawn at twice the temperature reported": draw(drawn=controls.hotter),
               f"{_FEW_IDS} tokens drafted, the distribution of all reported": few}  # fmt: skip
    unprocessed = {"draft distribution reported": draw(reported=controls.unprocessed),
                   "drafts drawn": draw(drawn=controls.unprocessed)}  # fmt: skip
    for rule in ("rejection", "block"):
        cells.append(Cell(rule, "model", **flat))
        cells += [Cell(rule, "model", wrong=w, change_drafter=f) for w, f in changes.items()]
        cells += [Cell(rule, drafter, **empty) for drafter in ("model", "prompt_lookup")]
        for settings, wrong in itertools.product(("penalties", "top_k"), unprocessed):
            change = {"wrong": f"{wrong} without {settings}", "change_drafter": unprocessed[wrong]}
            cells.append(Cell(rule, "model", settings, **change))
    # With a draft model as many rows as a cell has, or more, are needed to see it.
    prefix = {"wrong": "a prefix kept", "change_rule": controls.keeping_a_prefix}
    for rule, tree in itertools.product(("rejection", "block"), ("likeliest", "with")):
        cells += [Cell(rule, "model", tree=tree, **change) for change in (prefix, empty, kept)]
    cells.append(Cell("coupled", "model", tree="without", **prefix))
    wrong, keyed = "uniforms keyed by absolute position", controls.with_absolute_uniforms
    return [*cells, Cell("block", "prompt_lookup", wrong=wrong, change_rule=keyed)]


class Bench:
    """Runs cells; those of one rule and drafter share their compiled programs.

    Attributes:
      entropy: of the target, as a share of the uniform distribution's; mean over all paths.
      distance: total variation between draft and target, likewise.
    """

    def __init__(self, num_rows: int, rows_per_run: int) -> None:
        """Makes the models, which have to have opinions and to differ; see the flags."""
        self._num_rows, self._rows_per_run, self._num_runs = num_rows, rows_per_run, 0
        self._target, self._draft = models = make_models()
        logits, others = (distribution.path_logits(model, _CONTEXT, NUM_TOKENS) for model in models)
        target, draft = (scipy.special.softmax(np.float64(x), axis=-1) for x in (logits, others))
        self.entropy = float(scipy.special.entr(target).sum(axis=-1).mean() / np.log(len(target.T)))
        self.distance = float(0.5 * np.abs(target - draft).sum(axis=-1).mean())
        assert (self.entropy <= 0.7) & (0.2 <= self.distance <= 0.8), "no opinions, or the same"
        joint = functools.partial(distribution.joint_distribution, logits, _CONTEXT)
        self._expected = functools.cache(lambda name: joint(SETTINGS[name], NUM_TOKENS))
        self._rows = functools.lru_cache(maxsize=1)(self._make_rows)

    def fit(self, cell: Cell) -> Fit:
        """Returns how well the rows of a cell fit the distribution."""
        settings, draft_temperature = SETTINGS[cell.settings], cell.draft_temperature
        settings = dataclasses.replace(settings, draft_temperature=draft_temperature)
        num_rows = self._num_rows // (_CONTROL_SHARE if cell.wrong else 1)
        num_rows = num_rows if settings.temperature else self._rows_per_run  # at 0 all are alike
        self._num_runs, params = self._num_runs + 1, self._target.params
        return distribution.fit_rows(
            self._rows(cell._replace(settings="", draft_temperature=None, change_target=None)),
            self._expected(cell.settings), num_rows, settings=settings,
            params=params if cell.change_target is None else cell.change_target(params),
            first_seed=self._num_runs * (self._num_rows + self._rows_per_run),
        )  # fmt: skip

    def _make_rows(self, cell: Cell) -> Rows:
        draft = self._draft if cell.drafter == "model" else None
        options: dict[str, Any] = {"draft_vocab_size": cell.num_ids}
        if cell.tree:
            options |= {"tree_depth": 2, "tree_branches": 2, "tree_draws": cell.tree}
        subject = Subject(
            self._target, draft, cell.drafter, _NUM_DRAFT_TOKENS * (2 if cell.tree else 1),
            cell.rule, SamplingParams(), drafter_options=DrafterOptions(**options),
        )  # fmt: skip
        rule = cell.change_rule and cell.change_rule(get_rule(cell.rule))
        changed_drafter = cell.change_drafter and cell.change_drafter(
            build_drafter(subject).drafter
        )
        return Rows(subject, _CONTEXT, NUM_TOKENS, rows_per_run=self._rows_per_run, rule=rule,
                    drafter=changed_drafter)  # fmt: skip


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
        params = unflatten_dict({rule.path: leaves[rule.path] for rule in parameter_table(config)})
        models.append(
            LoadedModel(config, params, tokenizer, f"{num_layers} layers", is_random=True)
        )
    return models[0], models[1]


def run(bench: Bench, cells: list[Cell], level: float) -> Iterator[dict[str, Any]]:
    """Prints and yields a line of each cell: p is below the level where something is wrong."""
    for cell in cells:
        seconds, fit = timed(functools.partial(bench.fit, cell))
        is_as_expected = (fit.p_value < level) == bool(cell.wrong)
        title = f", {cell.num_ids} tokens" if cell.num_ids else ""
        title += f", tree {cell.tree}" if cell.tree else ""
        title += "" if cell.draft_temperature is None else f", T={cell.draft_temperature:g}"
        line = {"rule": cell.rule, "drafter": cell.drafter + title, "settings": cell.settings}
        if cell.wrong:
            print(f"{cell.wrong}:")
            line = {"control": cell.wrong} | line
        print("ok  " if is_as_expected else "FAIL",
              f"{line['rule']:10} {line['drafter']:22} {line['settings']:10} "
              f"p = {fit.p_value:<9.2g}{fit.num_cells:5} cells  TV {fit.total_variation:.4f} "
              f"(noise {fit.noise:.4f}){seconds:6.1f} s", flush=True)  # fmt: skip
        if cell.wrong and not is_as_expected:
            more = _CONTROL_SHARE * (samples_needed(fit, level) or 0)
            print(f"too few rows: --num_rows={more} should do" if more else "nothing is seen of it")
        yield line | fit._asdict() | {"seconds": seconds, "is_as_expected": is_as_expected}


def main() -> None:
    """Runs the table and the controls, prints them, and writes them down."""
    sizes = {flag.name: flag.value for flag in (_NUM_ROWS, _ROWS_PER_RUN)}
    for size in sizes.items():
        check_count(*size, 1, 10**9)
    recorder = Recorder(_OUTPUT_JSON.value, sizes | {_ONLY_TREES.name: _ONLY_TREES.value})
    bench = Bench(*sizes.values())
    table, mistakes = (
        [cell for cell in cells if cell.tree or not _ONLY_TREES.value]
        for cells in (make_cells(), make_controls())
    )
    level = FALSE_ALARM / len(table)
    print(f"{len(table)} cells of {_NUM_ROWS.value} rows, {NUM_TOKENS} tokens; one fails below "
          f"p = {level:.2g}, the table by chance once in {1 / FALSE_ALARM:.0f}\n"
          f"target entropy {bench.entropy:.2f} of the uniform distribution's, draft and target "
          f"{bench.distance:.2f} apart")  # fmt: skip
    seconds, lines = timed(lambda: list(run(bench, [*table, *mistakes], level)))
    has_passed = all(line["is_as_expected"] for line in lines)
    print(f"{'passed' if has_passed else 'FAILED'} ({seconds:.0f} s)")
    recorder.save({
        "num_tokens": NUM_TOKENS, "num_draft_tokens": _NUM_DRAFT_TOKENS,
        "false_alarm_rate": FALSE_ALARM, "level_per_cell": level,
        "target_entropy_share": bench.entropy, "draft_target_distance": bench.distance,
        "settings": {name: dataclasses.asdict(one) for name, one in SETTINGS.items()},
        "has_passed": has_passed, "seconds": round(seconds),
        "cells": lines[: len(table)], "controls": lines[len(table) :],
    })  # fmt: skip
    if not has_passed:
        sys.exit(1)


if __name__ == "__main__":
    cli.run_main(main)
