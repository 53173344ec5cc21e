"""Mistakes in drafters and rules of the user's own are told when a Generator is made."""

import importlib
import json
import re
import subprocess
import sys

import pytest

from jspec.drafters.cascade import CascadeDrafter
from jspec.generation.own_code import digest_of_own_code

# In its own process, as the tests' runtime checks of shapes would find some of them first.
_PROGRAM = """
import dataclasses, json
import jax.numpy as jnp
import jspec
from jspec.speculation.types import Drafter
from jspec.speculation.acceptance.rejection import RULE
from jspec.speculation.types import Kind
from tests.tiny_models import small


@dataclasses.dataclass(frozen=True)
class Own(Drafter):
    mistake: str
    num_draft_tokens = 3
    may_be_silent = False
    kinds = (Kind("own", 0.05, 0.3),)

    def init(self, batch_size, capacity):
        return {"n": jnp.zeros([] if self.mistake == "rows" else [batch_size], jnp.int32)}

    def observe(self, params, state, tokens, hidden, valid):
        if self.mistake == "raises":
            raise KeyError("missing")
        return {"n": state["n"] + 1.5} if self.mistake == "observe" else state

    @property
    def tree_depth(self):
        return int(self.mistake in ("tree", "no depth", "order", "deep"))

    @property
    def num_runners_up(self):
        return 2 * (self.mistake == "runners-up")

    def observe_runners_up(self, state, tokens, runners_up, is_fed, is_kept):
        return {"n": runners_up[:, 0] * is_fed[:, :1]}

    def propose(self, params, state, inputs):
        tokens = jnp.repeat(inputs.last_token[:, None], 3, axis=1)
        if self.mistake == "columns":
            tokens = tokens[:, :2]
        if self.mistake == "floats":
            tokens = tokens * 1.0
        probs = jnp.ones([*tokens.shape, 5]) if self.mistake == "probs" else None
        proposal = jspec.Proposal(tokens, inputs.wanted(), probs)
        if self.mistake in ("tree", "no depth", "parents", "order", "deep"):
            parents = jnp.full_like(tokens, -1)
            if self.mistake in ("order", "deep"):  # data: seen when the round is over
                parents = parents.at[:, 1].set(1 if self.mistake == "order" else 0)
            proposal = proposal.replace(parents=parents, max_depth=int(self.mistake != "no depth"))
        if self.mistake == "nothing":
            proposal = None
        if self.mistake == "no state":
            return proposal
        return proposal, {**state, "m": state["n"]} if self.mistake == "structure" else state


def told(drafter, rule="rejection", number=3, is_run=False, **settings):
    try:
        options = {"drafter": drafter, "num_draft_tokens": number, "acceptance": rule}
        generator = jspec.Generator(small(), **options)
        if is_run:
            generator.generate("abc", jspec.SamplingParams(max_new_tokens=4, **settings))
    except jspec.InputError as error:
        return str(error)
    return "fine"


def entry(mistake):
    return jspec.DrafterEntry("own", lambda spec: jspec.BuiltDrafter(Own(mistake)), "")


messages = {name: told(entry(name), is_run=name in ("order", "deep")) for name in (
    "right", "rows", "raises", "observe", "columns", "floats", "probs", "nothing", "structure",
    "no state", "runners-up", "tree", "no depth", "parents", "order", "deep",
)}
bare = jspec.DrafterEntry("own", lambda spec: jspec.BuiltDrafter(object()), "")
jspec.register_drafter(entry("columns"))
jspec.register_rule("mine", RULE._replace(accept=lambda probs, proposal, noise: None))
messages |= {
    "no drafter": told(jspec.DrafterEntry("own", lambda spec: Own("right"), "")),
    "beams": told(entry("deep"), is_run=True, num_beams=2),
    "auto": told(entry("tree"), number="auto"),
    "bare": told(bare),
    "member": told("prompt_lookup+own"),
    "rule": told("prompt_lookup", "mine"),
    "object": told("ngram", RULE._replace(accept=lambda probs, proposal, noise: 1 / 0)),
    "right rule": told("prompt_lookup", RULE._replace(is_lossless=False)),
}
from jspec.lab.auditing.rows import build_drafter
from jspec.lab.auditing.subject import Subject
try:
    build_drafter(Subject(small(), None, "own", 2, "rejection", jspec.SamplingParams()))
except jspec.InputError as error:
    messages["audit"] = str(error)
print(json.dumps(messages))
"""
_LIKE_INIT = (
    r"the drafter 'own' to return from {} a state like init's, \{{'n': 'int32 \[2\]'\}}; got "
)
EXPECTED = {
    "right": "^fine$",
    "rows": r"the drafter 'own' to have a state whose every leaf begins with the rows; got .*\[\]",
    "tree": "^fine$",
    "no depth": "'own' to propose parents, .*; got parents and max_depth 0 with tree_depth 1$",
    "parents": r"\(--tree_depth\), .*; got parents and max_depth 1 with tree_depth 0$",
    "order": "^expected a tree's parents before their children, from -1 to 0 for draft 1 of the "
    "drafter 'own'; got 1$",
    "deep": "^expected a tree of depth 1 at most of the drafter 'own', got 2$",
    "beams": "^expected a tree of depth 1 at most of the drafter 'own', got 2$",
    "auto": "^expected num_draft_tokens as a number with trees of own, got 'auto', which needs",
    "raises": r"^the drafter 'own', <string>:\d+: KeyError: 'missing'$",
    "no state": "TypeError: expected propose to return a Proposal and the state, got Proposal$",
    "no drafter": "^expected what the drafter 'own' is built as to be a BuiltDrafter, got Own",
    "observe": _LIKE_INIT.format("observe") + ".*float32",
    "runners-up": _LIKE_INIT.format("observe") + r".*int32 \[2, 2\]",
    "structure": _LIKE_INIT.format("propose") + ".*'m'",
    "columns": r"^for 2 rows, expected the drafter 'own' to propose tokens int32 \[2, 3\]; got "
    r"int32 \[2, 2\]$",
    "floats": r"'own' to propose tokens int32 \[2, 3\]; got float32 \[2, 3\]$",
    "probs": r"'own' to propose probs float32 \[2, 3, 128\]; got float32 \[2, 3, 5\]$",
    "nothing": "^expected what the drafter 'own' proposes to be a Proposal, got None$",
    "bare": "^expected the drafter 'own' to be a Drafter, got <object",
    "member": r"the drafter 'own' to propose tokens int32 \[2, 3\]",
    "audit": r"the drafter 'own' to propose tokens int32 \[2, 3\]",
    "rule": r"the acceptance rule 'mine' to accept with num_accepted int32 \[2\]; got None$",
    "object": r"^the acceptance rule 'own rule', <string>:\d+: ZeroDivisionError: ",
    "right rule": "^fine$",
}


@pytest.fixture(scope="module")
def told():
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mistake", EXPECTED)
def test_a_mistake_is_one_line_that_names_its_drafter_or_rule(told, mistake):
    """Guards against JAX's own errors, pages after the cause; and what is right is left alone."""
    assert re.search(EXPECTED[mistake], told[mistake]), told[mistake]
    assert "\n" not in told[mistake]


def test_a_drafter_that_was_edited_has_another_digest(tmp_path, monkeypatch):
    """Guards against costs of rounds that were measured before the user changed the drafter."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("first_own", "second_own"):
        (tmp_path / f"{name}.py").write_text("class Own:\n    pass\n")
    first, second = (importlib.import_module(name).Own() for name in ("first_own", "second_own"))
    before = digest_of_own_code(first)
    assert before is not None
    assert before == digest_of_own_code(second)
    (tmp_path / "second_own.py").write_text("class Own:\n    num_draft_tokens = 2\n")
    assert digest_of_own_code(second) != before
    cascade = CascadeDrafter((first, second))
    assert digest_of_own_code(cascade) not in (None, before)
    assert digest_of_own_code(CascadeDrafter(())) is None
