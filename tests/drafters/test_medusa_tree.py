"""Medusa's static tree, the rates that shape it, and the script that measures them."""

import json
import pathlib
import re
import runpy
import types

import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from jspec.common.errors import InputError
from jspec.drafters.medusa import FILE, NUM_RANKS, load_medusa, read_rates, save_rates
from jspec.models import make_apply
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests import tiny, tiny_medusa, tiny_models
from tests.drafters.rows import build, paths_of
from tests.speculation.drive import propose

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts/medusa_rates.py"
RATES = [[0.5, 0.3, 0.1], [0.6, 0.1], [0.2, 0.1], [0.1]]
VOCAB = tiny.CONFIG.vocab_size


@pytest.fixture
def folder(tmp_path):
    """Returns a folder of four heads."""
    return pathlib.Path(tiny_medusa.save_head(tmp_path / "head", tiny.CONFIG))


def build_tree(folder, **options):
    """Returns the drafter of a folder, and its parameters."""
    return build("medusa", 6, head=folder, tree_depth=3, tree_branches=2, **options)


@pytest.mark.parametrize(("least", "number"), [(0.0, 6), (0.25, 3), (0.9, 0)])
def test_the_tree_follows_the_rates(folder, tiny_pair, least, number):
    """The nodes are the best by the product of rates; their tokens are ranked by numpy."""
    save_rates(folder, [rates + [0.0] * (3 - len(rates)) for rates in RATES])
    drafter, params = build_tree(folder, draft_confidence=least)
    assert drafter.tree_depth == 3
    state = jnp.asarray(np.random.default_rng(0).normal(size=(2, tiny.CONFIG.embed_dim)))
    state = state.astype(jnp.float32)
    proposal, _ = propose(tiny_pair, drafter, params, state, [0, 0], [6, 0], temperature=1.0)
    assert proposal.num_tokens.tolist() == [number, 0]
    # 0.5, 0.3, 0.5·0.6, 0.3·0.6, 0.5·0.6·0.2, 0.5·0.1: two branches at most.
    ranks = [(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 1)]
    hidden = np.asarray(drafter.read(tiny_pair.target, state))[0, 0]
    order = np.argsort(-_logits(params, hidden), axis=-1)
    expected = [tuple(order[depth, rank] for depth, rank in enumerate(path)) for path in ranks]
    assert set(paths_of(proposal, 0)) == set(expected[:number])
    if number == 6:
        assert paths_of(proposal, 0)[:3] == [expected[i] for i in (0, 2, 4)]


def _logits(params, hidden):
    """Returns what every head says of an output [d], [h v]; heads have one block."""
    return tiny_medusa.logits_of(None, params, hidden, num_layers=1)


def test_rates_are_assumed_until_they_are_measured(folder):
    """They fall by head and by rank."""
    rates = np.asarray(read_rates(folder, 4))
    assert rates.shape == (4, NUM_RANKS)
    assert (np.diff(rates, axis=0) < 0).all()
    assert (np.diff(rates, axis=1) < 0).all()
    assert (rates.sum(axis=1) < 1).all()


@pytest.mark.parametrize(
    "content", [{}, {"rates": [[0.5]] * 3}, {"rates": [[0.9, 0.8]] * 4}, {"rates": "no"},
                {"rates": [[-0.5]] * 4}, {"rates": [[]] * 4},
             {"rates": [[0.0], [0.5], [0.5], [0.5]]}],
)  # fmt: skip
def test_a_wrong_file_is_one_line(folder, content):
    """Of another number of heads, of no probabilities, or of none at all."""
    (folder / FILE).write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"{FILE}: expected rates of 4 heads, of 0 to 1 by rank"):
        build_tree(folder)


@pytest.fixture(scope="module")
def script():
    """Yields the script's names. Flags of programs that other tests have imported make way."""
    names = re.findall(r'DEFINE_\w+\(\s*"(\w+)"', SCRIPT.read_text())
    others = {name: flags.FLAGS[name] for name in names if name in flags.FLAGS}
    for name in others:
        delattr(flags.FLAGS, name)
    yield types.SimpleNamespace(**runpy.run_path(str(SCRIPT)))
    for name in names:
        delattr(flags.FLAGS, name)
    for name, flag in others.items():
        flags.FLAGS[name] = flag


def test_the_script_writes_what_the_heads_rank(script, folder, tmp_path, monkeypatch, capsys):
    """All of it, on one answer; the heads' best tokens are those of numpy at each token."""
    target = tiny_models.make_model(tiny.CONFIG, tokenizer=ByteTokenizer(VOCAB))
    tokens = np.random.default_rng(0).integers(1, VOCAB, 40)
    answers = tmp_path / "answers.jsonl"
    record = {"prompt_token_ids": tokens[:10].tolist(), "token_ids": tokens[10:].tolist()}
    answers.write_text(json.dumps(record))
    main = script.main.__globals__
    monkeypatch.setitem(main, "load_model", lambda name: target)
    for flag, value in (("_HEAD", str(folder)), ("_INPUT", str(answers)), ("_TARGET", "tiny")):
        monkeypatch.setitem(main, flag, types.SimpleNamespace(value=value))
    script.main()
    assert f"{FILE}: 29 tokens" in capsys.readouterr().out
    heads = load_medusa(folder, tiny.CONFIG).params
    apply, cache = tiny.one_program(make_apply(tiny.CONFIG)), tiny.empty_cache(1, 40)
    hidden = np.asarray(apply(target.params, jnp.asarray(tokens)[None], cache)[1][0])
    expected = np.zeros([4, NUM_RANKS])
    for at in range(9, 38):
        order = np.argsort(-_logits(heads, hidden[at]), axis=-1)
        for head in range(4):
            if at + head + 2 < 40:
                rank = int(np.flatnonzero(order[head] == tokens[at + head + 2])[0])
                if rank < NUM_RANKS:
                    expected[head, rank] += 1 / (29 - head)
    np.testing.assert_allclose(read_rates(folder, 4), expected, atol=1e-4)
    assert expected.sum() > 0
