"""The whole audit for every drafter, at temperatures 0 and 1, with penalties and a bias."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from jspec.drafters import DRAFTERS, DrafterOptions, member_names, needs_draft_model
from jspec.drafters.tables import count_ngrams, save_table
from jspec.generation.request import SamplingParams
from jspec.lab.auditing.checks import run_checks
from jspec.lab.auditing.rows import choose_context
from tests.lab.auditing.subjects import make_subject
from tests.tiny_heads import SAVE_HEAD
from tests.tiny_models import CONFIG, draft, make_model, peaked_params, shared_generator, target

_PENALTIES = {
    "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2,
    "logit_bias": {97: 1.0, 98: -0.5},
}  # fmt: skip
_RULES = {0.0: "greedy", 1.0: "rejection"}
_CHECKS = {
    "zero probability", "greedy parity, float32", "greedy parity, bfloat16", "seeds", "caches",
    "emitted distribution", "negative control", "drafts",
}  # fmt: skip
_OF_TREES = {
    "tree control, a prefix kept", "tree control, no residual", "tree control, drafts misreported",
    "tree control, a path not moved", "tree control, depths ignored", "tree control, siblings seen",
}  # fmt: skip
_NUM_ROWS = 1024


@functools.cache
def _pattern():
    """Returns an expression of which some match begins after every token of the audited rows."""
    context = choose_context(target(), SamplingParams(temperature=1.0, **_PENALTIES))
    a, b, c, d = (f"\\x{token:02x}" for token in context.alphabet)
    return f"{a}{b}{c}|{b}{a}{d}|{c}{a}{b}|{d}{a}{a}"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Returns a file of counts of what the target says."""
    path = tmp_path_factory.mktemp("table") / "table.safetensors"
    prompts = [list(b"why is the sky blue"), list(b"1 2 3 4")]
    answers = shared_generator("none").generate(prompts, SamplingParams(max_new_tokens=60))
    save_table(count_ngrams([a.prompt_token_ids + a.token_ids for a in answers], 128), path)
    return str(path)


def _write_corpus(folder):
    """Writes a corpus of what the target says after the audited rows; returns its path."""
    context = choose_context(target(), SamplingParams(temperature=1.0, **_PENALTIES))
    ids = np.random.default_rng(0).choice(context.alphabet[:4], 300)
    path = folder / "corpus.jsonl"
    path.write_text(json.dumps({"token_ids": ids.tolist()}))
    return path


_TREE = {"tree_depth": 2, "tree_branches": 2}
# What is audited: a name, options beside the pattern and the table, and drafts a round.
_SUBJECTS = {
    "prompt_lookup": {},
    "prompt_lookup, tree": _TREE,
    "prompt_lookup, auto": {"num_draft_tokens": "auto"},
    "suffix": {},
    "suffix, corpus": {"draft_corpus": "corpus"},
    "suffix, memory": {"draft_memory": 8},
    "suffix, tree": {"draft_corpus": "corpus", "tree_depth": 2, "tree_branches": 2},
    "recycle": {},
    "recycle, tree": _TREE,
    "suffix+recycle, auto": {"num_draft_tokens": "auto"},
    "recycle+eagle": {},
    "ngram": {},
    "ngram, sampled": {"ngram_probs": "sampled"},
    "model": {},
    "model, auto": {"num_draft_tokens": "auto"},
    "model, unsure": {"draft_confidence": 0.4},
    "model, few tokens": {"draft_vocab_size": 100},
    "model, tree": _TREE,
    "model, tree with": _TREE | {"tree_draws": "with"},
    "model, tree without": _TREE | {"tree_draws": "without"},
    "hierarchical": {},
    "hierarchical, ngram": {"inner_drafter": "ngram"},
    "layer_skip, first": {"draft_layers": (0,)},
    "layer_skip, second": {"draft_layers": (1,)},
    "unigram": {},
    "bigram": {},
    "eagle": {},
    "eagle, tree without": _TREE | {"tree_draws": "without"},
    "eagle+model": {},
    "mtp": {},
    "prompt_lookup+mtp, auto": {"num_draft_tokens": "auto"},
    "dflash": {},
    "dflash, tree": _TREE,
    "dflash, tree without": _TREE | {"tree_draws": "without"},
    "ngram+dflash, auto": {"num_draft_tokens": "auto"},
    "medusa": {},
    "blockwise": {},
    "lookahead": {},
    "ngram+lookahead, auto": {"num_draft_tokens": "auto"},
    "prompt_lookup+medusa, unsure": {"draft_confidence": 0.4},
    # Beside a lookup: what is likeliest without the bias that keeps to the audited tokens, is none.
    "prompt_lookup+medusa, tree": _TREE,
    "prompt_lookup+mtp, tree": _TREE,
    "random": {},
    "pattern": {},
    "prompt_lookup+model": {},
    "prompt_lookup+model, tree": _TREE,
    "prompt_lookup+model, tree, auto": _TREE | {"num_draft_tokens": "auto"},
    "suffix+recycle+eagle, tree": {"tree_depth": 3, "tree_branches": 2},
    "ngram+layer_skip+unigram": {"draft_layers": (0,), "draft_confidence": 0.5},
    "pattern+prompt_lookup+hierarchical, auto": {"num_draft_tokens": "auto"},
}


def test_every_drafter_is_audited():
    """Guards against a new drafter that nobody audits."""
    names = {name for subject in _SUBJECTS for name in member_names(subject.partition(",")[0])}
    assert names == set(DRAFTERS) - {"none"}


def _target_of(members):
    """Returns the target; for `mtp` one that has its layer as well."""
    if "mtp" not in members:
        return target()
    return make_model(dataclasses.replace(CONFIG, family="mimo", num_mtp_layers=1))


def _is_drawn(subject):
    return subject.endswith(("with", "without"))


def _num_rows(subject):
    """Returns more rows for drawn trees, whose first branch is seldom wrong."""
    return (4 if _is_drawn(subject) else 1) * _NUM_ROWS


def _draft_for(subject):
    """Returns a draft model; for drawn trees one that is refused often.

    Of a draft that is nearly always right the first branch is kept, and no test of this size tells
    a wrong rule for the others.
    """
    if not _is_drawn(subject):
        return draft()
    return make_model(params=peaked_params(CONFIG, disturbance=0.12))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", _RULES)
@pytest.mark.parametrize("subject", _SUBJECTS)
def test_every_drafter_is_lossless(subject, temperature, table, tmp_path, monkeypatch):
    """Every check of the audit passes; there were drafts among its rows."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))  # costs that `auto` measures
    drafter, options = subject.partition(",")[0], dict(_SUBJECTS[subject])
    num_draft_tokens = options.pop("num_draft_tokens", 4)
    members = set(member_names(drafter))
    if "pattern" in members:
        options["pattern"] = _pattern()
    if "draft_corpus" in options:
        options["draft_corpus"] = str(_write_corpus(tmp_path))
    if members & {"unigram", "bigram"}:
        options["draft_table"] = table
    for name in members & set(SAVE_HEAD):
        # At temperature 0 all rows say the same: these heads are right there now and then.
        head = {"seed": 3 if name == "medusa" else 0}
        # Above, a drawn tree needs one that is refused often: see `_draft_for`.
        if name == "dflash" and not (_is_drawn(subject) and temperature):
            head = {"target": target().params}
        options["draft_head"] = SAVE_HEAD[name](tmp_path / "head", CONFIG, **head)
    audited = make_subject(
        _RULES[temperature], drafter, target=_target_of(members), num_draft_tokens=num_draft_tokens,
        draft=_draft_for(subject) if needs_draft_model(drafter) else None,
        drafter_options=DrafterOptions(**options),
        settings=SamplingParams(temperature=temperature, **_PENALTIES),
    )  # fmt: skip
    checks = list(run_checks(audited, num_rows=_num_rows(subject), max_new_tokens=16))
    of_trees = _OF_TREES if options.get("tree_depth") and temperature else set()
    assert {check.name for check in checks} == _CHECKS | of_trees
    failed = [f"{check.name}: {check.detail}" for check in checks if not check.has_passed]
    assert not failed
    caches = next(check for check in checks if check.name == "caches")
    model_members = {"model", "hierarchical", "layer_skip"} & members
    shared = {"layer_skip"} if subject == "layer_skip, first" else set()
    assert set(caches.data) == {"target"} | (model_members - shared)
    assert CONFIG.num_layers == 2, "the subjects name its layers"
