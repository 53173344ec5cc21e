"""What the target says, on disk: the same as when it is asked, computed once, or refused."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.training import target_states
from jspec.training.packing import Batches, pack, packed_hidden
from jspec.training.target_states import StateStore
from jspec.training.texts import Text
from tests.tiny_models import CONFIG, make_model, peaked_params, target

SEQ_LEN, LAYERS = 32, (1, 2)


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Several of them, the last one not full."""
    monkeypatch.setattr(target_states, "_TEXTS_A_FILE", 4)


def make_texts(number, seed=0):
    """Returns texts of 2 to 37 ids, so that some are cut."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 36, number)
    ids = [tuple(rng.integers(1, CONFIG.vocab_size, n + 2).tolist()) for n in lengths]
    return [Text(one[:1], one[1:]) for one in ids]


def open_store(folder, texts, model=None, **options):
    options = {"seq_len": SEQ_LEN, "batch_size": 2} | options
    return StateStore(folder, model or target(), LAYERS, texts, **options)


def test_rows_get_what_the_target_says(tmp_path):
    """Wherever a text stands; what no text has is 0."""
    texts = make_texts(10)
    texts = [Text((), ()), *texts]  # one without tokens has no states
    rows = pack(texts[::-1], SEQ_LEN)
    filled = open_store(tmp_path, texts).fill(rows)
    run = jax.jit(lambda params: packed_hidden(CONFIG, params, rows, jnp.float32, LAYERS))
    wanted = np.asarray(run(target().params))
    is_text = rows.text > 0
    assert 0 < is_text.sum() < is_text.size
    outputs = filled.outputs.astype(np.float32)
    np.testing.assert_allclose(outputs[is_text], wanted[is_text], rtol=0.02, atol=1e-3)
    assert not outputs[~is_text].any()
    np.testing.assert_array_equal(filled.tokens, rows.tokens)


def test_a_head_learns_from_the_same_states(tmp_path):
    """Nearly: they are rounded to bfloat16. Control: those of other tokens."""
    texts, ids = make_texts(10), np.arange(60)
    rows = pack(texts, SEQ_LEN)
    filled = open_store(tmp_path, texts).fill(rows)
    others = filled._replace(outputs=np.roll(filled.outputs, 1, axis=1))
    of = lambda rows: target_states.target_states(CONFIG, target().params, rows, ids, LAYERS)  # noqa: E731
    asked, stored, wrong = jax.jit(lambda *rows: [of(one) for one in rows])(rows, filled, others)
    is_text = rows.text > 0
    for name in ("features", "hidden", "logits"):
        ours, theirs, control = (getattr(one, name)[is_text] for one in (asked, stored, wrong))
        np.testing.assert_allclose(theirs, ours, rtol=0.02, atol=0.02)
        assert np.abs(control - ours).mean() > 0.5


def test_what_is_there_is_not_computed_again(tmp_path, monkeypatch):
    """A second run reads; a longer list of texts adds files; another target has its files."""
    texts = make_texts(8)
    first = open_store(tmp_path, texts)
    assert len(list(tmp_path.iterdir())) == 2
    with monkeypatch.context() as patch:
        patch.setattr(target_states, "_write", None)
        again = open_store(tmp_path, texts)
    rows = pack(texts, SEQ_LEN)
    np.testing.assert_array_equal(again.fill(rows).outputs, first.fill(rows).outputs)
    open_store(tmp_path, texts + make_texts(3, seed=1))
    assert len(list(tmp_path.iterdir())) == 3
    open_store(tmp_path, texts, make_model(params=peaked_params(CONFIG, seed=5)))
    assert len(list(tmp_path.iterdir())) == 5


def test_a_run_that_was_killed_goes_on(tmp_path, monkeypatch):
    """After the last whole file; those that are there stay as they are."""
    texts, write = make_texts(10), target_states._write

    def kill(path, outputs):
        if len(list(tmp_path.iterdir())) == 2:
            raise KeyboardInterrupt
        write(path, outputs)

    with monkeypatch.context() as patch:
        patch.setattr(target_states, "_write", kill)
        with pytest.raises(KeyboardInterrupt):
            open_store(tmp_path, texts)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(before) == 2
    open_store(tmp_path, texts)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(after) == 3
    assert before.items() <= after.items()


def test_what_a_killed_run_had_half_written_goes(tmp_path):
    """Of processes that are no more; another run may be writing to the same folder."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [f"a.{ended.pid}.partial", "b.partial", f"c.{os.getpid()}.partial"]
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    open_store(tmp_path, make_texts(2))
    assert [path.name for path in tmp_path.glob("*.partial")] == names[2:]


def test_folders_of_earlier_versions_are_recognised():
    """Guards against another digest of the same texts: all states would be computed again."""
    name = target_states._digest_of_texts("model", [Text((), (1, 2)), Text((), ())])
    assert name == "35b9aa180233e177a74d5483a248f91e"


@pytest.mark.parametrize("content", [b"", b"no array", None])
def test_a_damaged_file_is_refused(tmp_path, content):
    """By name, before the first step; None is one that was cut short."""
    texts = make_texts(3)
    open_store(tmp_path, texts)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    with pytest.raises(InputError, match=r"cannot read .*\.npy: .*compute it anew"):
        open_store(tmp_path, texts)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*: File exists"):
        open_store(tmp_path / "file", make_texts(2))


def test_every_batch_is_filled(tmp_path):
    """In every epoch's order; it does not matter which tokens are scored."""
    texts = [Text(text.ids[:2], text.ids[2:]) for text in make_texts(12)]
    store = open_store(tmp_path, texts)
    scored = [Text(text.ids[:1], text.ids[1:]) for text in texts]
    batches = Batches(scored, batch_size=2, seq_len=SEQ_LEN, seed=0)
    for index in range(batches.num_batches + 1):
        rows = store.fill(batches[index])
        assert rows.outputs.shape == (2, SEQ_LEN, len(LAYERS), CONFIG.embed_dim)
        assert rows.outputs[rows.text > 0].astype(np.float32).any(axis=(1, 2)).all()
