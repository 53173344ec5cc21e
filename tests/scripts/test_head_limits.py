"""scripts/head_limits.py: its shares are those of the head's own drafts after every place."""

import json
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np

from jspec.drafters.eagle_head import apply_head, fuse, load_eagle
from jspec.models import init_cache, make_apply
from jspec.weights.resolver import load_model
from tests import tiny_eagle
from tests.programs import check_refusal, environment
from tests.tiny_models import save_folder

_SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "head_limits.py"
_PROMPT, _ANSWER = 3, 20


def run(compile_cache, tmp_path, *flags):
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), *flags], capture_output=True, text=True, timeout=120,
        env=environment(compile_cache, tmp_path / "home"),
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def ranks_of_first_drafts(folder, head_folder, text):
    """Returns how many tokens the head finds likelier than the text's, at each place; -1: none."""
    target = load_model(folder)
    head = load_eagle(head_folder, target.config, jnp.float32)
    tokens = jnp.asarray([text], jnp.int32)
    size = {"batch_size": 1, "capacity": len(text), "dtype": jnp.float32}
    cache, apply = init_cache(target.config, **size), make_apply(target.config)
    layers = head.config.feature_layers
    features = apply(target.params, tokens, cache, hidden_layers=layers)[1]
    logits = apply_head(
        head.config, head.params, target.params["embedding"][tokens[:, 1:]],
        fuse(head.params, features)[:, :-1], init_cache(head.config.layer, **size),
    )[0][0]  # fmt: skip
    ids, ranks = np.asarray(head.params["ids"]).tolist(), []
    for place in range(_PROMPT, len(text)):
        own = logits[place - 2]  # from the pair of token `place` - 1
        if text[place] not in ids:
            ranks.append(-1)
        else:
            ranks.append(int((own > own[ids.index(text[place])]).sum()))
    return ranks


def test_first_drafts_are_ranked_as_the_head_ranks_them(compile_cache, tmp_path):
    folder = save_folder(tmp_path / "target")
    config = load_model(folder).config
    head = tiny_eagle.save_head(tmp_path / "head", config)
    text = np.random.default_rng(3).integers(2, 258, _PROMPT + _ANSWER).tolist()
    line = {"prompt_token_ids": text[:_PROMPT], "token_ids": text[_PROMPT:]}
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps(line) + "\n")
    flags = [f"--target={folder}", f"--draft_head={head}", f"--answers={answers}", "--seq_len=32"]
    status, output, errors = run(compile_cache, tmp_path, *flags, "--num_draft_tokens=2")
    assert status == 0, errors
    _, first, second, chains, decoding = (row.split() for row in output.splitlines())
    ranks = ranks_of_first_drafts(folder, pathlib.Path(head), text)
    expected = [
        sum(rank >= 0 for rank in ranks),
        *(sum(0 <= r < k for r in ranks) for k in (1, 2, 4, 8)),
    ]
    assert first[2:] == [str(_ANSWER), *(f"{count / _ANSWER:.3f}" for count in expected)]
    assert 0 < expected[0] < _ANSWER  # some tokens are none of the head's
    assert int(second[2]) == _ANSWER
    assert 1 <= float(chains[-4]) <= float(chains[-1]) <= 3
    place, calls = 1, 0  # the prefill gives the first token
    while place < _ANSWER:
        place, calls = place + 1 + (ranks[place] == 0), calls + 1
    assert decoding[decoding.index("with") - 1] == f"{(_ANSWER - 1) / calls:.2f}"
    assert calls < _ANSWER - 1  # some drafts are right


def test_a_target_without_a_head_is_told(compile_cache, tmp_path):
    folder = save_folder(tmp_path / "target")
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"prompt_token_ids": [1], "token_ids": [2]}\n')
    outcome = run(compile_cache, tmp_path, f"--target={folder}", f"--answers={answers}")
    assert "expected --draft_head" in check_refusal(*outcome)
