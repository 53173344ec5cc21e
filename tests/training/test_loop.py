"""The loop, with a trainee of one vector: stops, accumulation, precision, a full disk, metrics."""

import contextlib
import dataclasses
import importlib.util
import json
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.training.chain_loss import SCORE
from jspec.training.config import Recipe, Trainee
from jspec.training.loop import train, training_curves, with_precision, write_figures
from jspec.training.packing import Rows
from tests.training.folders import read_metrics

WIDTH = 20_000  # more than the full disk takes
RECIPE = Recipe(
    num_steps=12, learning_rate=0.1, warmup_steps=0, max_norm=1e6, log_every=2, evaluate_every=3
)


class Numbers:
    """Batch k holds the number k, or what is said, in rows of 4 tokens."""

    def __init__(self, **others):
        self.others = {int(name[1:]): value for name, value in others.items()}

    def __getitem__(self, index):
        value = self.others.get(index, index)
        if callable(value):
            value()
            value = index
        tokens = np.full([1, 4], value, np.int32)
        return Rows(tokens, np.ones_like(tokens), np.zeros_like(tokens), tokens > -1)


def mean_of(rows):
    return jnp.mean(jnp.asarray(rows.tokens).astype(jnp.float32)) / 10


def loss(params, frozen, rows):
    """The squared distance of the vector from the batch's number."""
    del frozen
    value = jnp.mean(jnp.square(params["w"].astype(jnp.float32) - mean_of(rows)))
    metrics = {"size": jnp.max(params["w"]), "acceptance": params["w"][:2], SCORE: -value}
    return value, metrics


def make_trainee(loss=loss, first=None):
    start = jnp.linspace(-1.0, 1.0, WIDTH) if first is None else first
    return Trainee({"w": start}, {}, loss, lambda params, folder: None)


def run(folder, batches=None, trainee=None, **changes):
    recipe = dataclasses.replace(RECIPE, **changes)
    trained = train(trainee or make_trainee(), batches or Numbers(), [Numbers()[5]], recipe, folder)
    return *trained, read_metrics(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("undisturbed"))


def test_a_run_whose_time_is_over_scores_and_keeps_its_last_step(undisturbed, tmp_path):
    """It asks after each step; run again, it goes on to the same parameters, bit for bit."""
    asked = []

    def is_over(step):
        asked.append(step)
        return step == 5

    parts = make_trainee(), Numbers(), [Numbers()[5]], RECIPE, tmp_path
    _, metrics = train(*parts, is_over=is_over)
    assert asked == [1, 2, 3, 4, 5]
    journal = read_metrics(tmp_path)
    assert [record["step"] for record in journal if "held_out" in record] == [3, 5]
    assert metrics[SCORE] == max(
        record["held_out"][SCORE] for record in journal if "held_out" in record
    )
    params, _ = train(*parts)
    np.testing.assert_array_equal(params["w"], undisturbed[0]["w"])


def test_accumulated_batches_are_one_update(undisturbed, tmp_path):
    """Two batches whose mean gradient is that of one batch: the same parameters."""
    halves = Numbers(**{f"_{2 * k + i}": k for k in range(12) for i in range(2)})
    params, _, journal = run(tmp_path, halves, accumulate=2)
    np.testing.assert_allclose(params["w"], undisturbed[0]["w"], rtol=1e-5, atol=1e-6)
    assert [record["step"] for record in journal if "loss" in record] == [2, 4, 6, 8, 10, 12]
    mixed = Numbers(**{f"_{2 * k + i}": k + 20 * i for k in range(12) for i in range(2)})
    mixed_params, *_ = run(tmp_path / "mixed", mixed, accumulate=2)
    assert np.abs(mixed_params["w"] - params["w"]).max() > 0.1


@pytest.mark.parametrize(
    ("score", "patience", "steps"),
    [(lambda w: -jnp.square(w[0] + 0.7), 2, [3, 6, 9]),
     (lambda w: jnp.float32(2), 3, [3, 6, 9, 12])],
    ids=["gets no better", "never changes"],
)  # fmt: skip
def test_it_stops_when_the_score(tmp_path, capsys, score, patience, steps):
    """Step 3 is the best, or the first of equal ones, as of a drafter of which nothing is kept."""

    def scored(params, frozen, rows):
        value, metrics = loss(params, frozen, rows)
        return value, metrics | {SCORE: score(params["w"])}

    trainee = make_trainee(scored, first=jnp.full([WIDTH], -1.0))
    batches = Numbers(**{f"_{k}": 50 for k in range(60)})
    options = {"num_steps": 60, "patience": patience, "keep": 1}
    _, metrics, journal = run(tmp_path, batches, trainee, **options)
    scores = {line["step"]: line["held_out"][SCORE] for line in journal if "held_out" in line}
    assert list(scores) == steps
    assert metrics[SCORE] == scores[3]
    assert f"no better score in {patience} evaluations" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_no_number_stops_the_run(tmp_path, name):
    """It says at which step and batch; a resume begins before it."""

    def poisoned(params, frozen, rows):
        value, metrics = loss(params, frozen, rows)
        is_poisoned = rows.tokens[0, 0] == 99
        if name == "loss":
            return jnp.where(is_poisoned, jnp.nan, value), metrics
        return value + jnp.sqrt(jnp.where(is_poisoned, jnp.sum(params["w"] * 0.0), 1.0)), metrics

    with pytest.raises(InputError, match=f"the {name} of step 8, batch 7, is nan"):
        run(tmp_path, Numbers(_7=99), make_trainee(poisoned))
    assert read_metrics(tmp_path)[-1]["step"] == 6
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["3", "6"]


@contextlib.contextmanager
def full_disk():
    """Yields a function after which no file grows beyond a few kilobytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_stops_the_run_and_nothing_is_lost(undisturbed, tmp_path):
    """One line; with room again the run ends as if nothing had been."""
    with (
        full_disk() as fill,
        pytest.raises(InputError, match="cannot write a checkpoint") as caught,
    ):
        run(tmp_path, Numbers(_7=fill))
    assert "\n" not in str(caught.value)
    params, metrics, journal = run(tmp_path)
    np.testing.assert_array_equal(params["w"], undisturbed[0]["w"])
    assert (metrics, journal) == undisturbed[1:]


def test_a_checkpoint_that_was_half_removed_goes(undisturbed, tmp_path):
    """A kill may come while an old one is removed; it is neither the best nor a reason to stop."""

    def kill():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Numbers(_11=kill), keep=1)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["3", "9"]  # the best and the latest
    left_out = shutil.ignore_patterns("metrics", "_CHECKPOINT_METADATA")
    shutil.copytree(folder / "9", folder / "6", ignore=left_out)
    params, metrics, journal = run(tmp_path, keep=1)
    np.testing.assert_array_equal(params["w"], undisturbed[0]["w"])
    assert (metrics, journal) == undisturbed[1:]
    assert sorted(path.name for path in folder.iterdir()) == ["12", "3"]


def test_a_journal_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match=r"cannot write .*metrics\.jsonl: Is a directory"):
        run(tmp_path)


def test_bfloat16_is_for_computing_only(undisturbed, tmp_path):
    """The loss sees rounded parameters; those that are kept are not, and end nearby."""
    seen = []

    def watched(params, frozen, rows):
        seen.append(params["w"].dtype)
        return loss(params, frozen, rows)

    params, *_ = run(tmp_path, trainee=make_trainee(watched), compute_dtype="bfloat16")
    assert set(seen) == {jnp.dtype("bfloat16")}
    assert params["w"].dtype == jnp.float32
    np.testing.assert_allclose(params["w"], undisturbed[0]["w"], atol=0.1)
    assert (params["w"].astype(jnp.bfloat16) != params["w"]).any()


def test_recomputing_saves_memory_and_changes_nothing():
    """Layers of attention, whose scores need not be kept: the same gradients from less memory."""
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32, 32)) * 0.2, jnp.float32)

    def deep(params, frozen, rows):
        x = jnp.asarray(rows.tokens).astype(jnp.float32)[0, :, None] + frozen
        for w in params["w"]:
            heads = (x @ w).reshape(-1, 8, 4)
            scores = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", heads, heads))
            x += jnp.einsum("hqk,khd->qhd", scores, heads).reshape(x.shape)
        return jnp.sum(x), {}

    rows, frozen = Rows(*[np.ones([1, 128], np.int32)] * 4), jnp.linspace(0.0, 1.0, 32)
    outcomes = []
    for remat in ("none", "products"):
        deep_loss = with_precision(deep, Recipe(remat=remat))

        @jax.jit
        def pull_back(params, deep_loss=deep_loss):
            return jax.vjp(lambda p: deep_loss(p, frozen, rows)[0], params)[1]

        pull = pull_back({"w": weights})
        kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull))
        outcomes.append((kept, jax.jit(lambda pull: pull(jnp.float32(1))[0])(pull)))
    (whole, wanted), (less, grads) = outcomes
    assert less < 0.5 * whole
    np.testing.assert_allclose(grads["w"], wanted["w"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_steps", 0), ("accumulate", 0), ("patience", -1), ("compute_dtype", "float16"),
     ("remat", "some"), ("learning_rate", -1.0), ("max_norm", 0.0)],
)  # fmt: skip
def test_recipes_that_cannot_be_are_refused(field, value):
    with pytest.raises(InputError, match=f"expected {field}"):
        Recipe(**{field: value})


RECORDS = [
    {"step": 10, "loss": 3.0},
    {"step": 20, "loss": 2.0},
    {"step": 20, "held_out": {SCORE: 1.5, "acceptance": [0.5, 0.25]}},
    {"step": 30, "loss": 1.0},
    {"step": 40, "held_out": {SCORE: 1.75, "acceptance": [0.75, 0.5]}},
]


def test_curves_are_the_journal():
    """Three panels: the loss, the score, each draft of the chain."""
    loss, score, acceptance = training_curves(RECORDS)
    assert (loss.x, loss.lines) == ([10, 20, 30], {"loss": [3.0, 2.0, 1.0]})
    assert (score.x, score.lines) == ([20, 40], {"tokens per call": [1.5, 1.75]})
    assert acceptance.lines == {"draft 1": [0.5, 0.75], "draft 2": [0.25, 0.5]}
    assert training_curves([]) == []
    assert len(training_curves([{"step": 1, "held_out": {SCORE: 1.0}}])) == 1


def test_pictures_are_written_where_matplotlib_is(tmp_path, monkeypatch):
    """As PNG and SVG; a run without entries, or without matplotlib, has none."""
    write_figures(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        write_figures(tmp_path)
    assert not (tmp_path / "figures").exists()
    write_figures(tmp_path)
    assert (tmp_path / "figures" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "tokens per call" in (tmp_path / "figures" / "training.svg").read_text()
