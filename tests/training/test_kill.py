"""Training runs that are killed by SIGKILL at random moments, through the program."""

import random
import signal
import subprocess
import time

import numpy as np
import pytest
import safetensors.numpy

from jspec.training.texts import Text
from tests.programs import command, environment, run
from tests.tiny_models import save_folder
from tests.training.folders import read_metrics, save_texts

_NUM_KILLS = 6
_NUM_STEPS = 600
_LONGEST = 0.8  # seconds from a line of metrics to the kill


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("killed training")
    save_folder(home / "target")
    rng = np.random.default_rng(0)
    texts = [Text((1,), tuple(rng.integers(3, 250, 20).tolist())) for _ in range(48)]
    save_texts(home / "answers.jsonl", texts)
    return home


def flags_of(home, workdir):
    """Returns a run of many short steps, with a checkpoint every few of them."""
    fields = {
        "target": home / "target", "texts": (str(home / "answers.jsonl"),), "num_held_out": 4,
        "seq_len": 24, "batch_size": 2, "vocab_size": 60, "feature_layers": (1, 2),
        "dtype": "float32", "chain_steps": 2, "recipe.num_steps": _NUM_STEPS,
        "recipe.warmup_steps": 10, "recipe.evaluate_every": 10, "recipe.accumulate": 2,
    }  # fmt: skip
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    return ["--config=configs/train_eagle.py", f"--workdir={workdir}", *overrides]


def kill_among_steps(home, workdir, env, seconds):
    """Kills a run so long after its first new line; returns whether it was still on its way."""
    process = subprocess.Popen(
        command("jspec.train", *flags_of(home, workdir)),
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    metrics = workdir / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else 0
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > size):
        time.sleep(0.02)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return not (workdir / "head").exists()


@pytest.mark.slow
def test_killed_runs_end_like_an_undisturbed_one(home, compile_cache):
    """Bit for bit, with the same curve; at least half of the kills fall among the steps."""
    env = environment(compile_cache, home / "cache")
    status, _, errors = run("jspec.train", *flags_of(home, home / "one"), env=env, timeout=600)
    assert status == 0, errors
    rng, workdir = random.Random(0), home / "other"
    num_among = sum(
        kill_among_steps(home, workdir, env, rng.uniform(0.0, _LONGEST)) for _ in range(_NUM_KILLS)
    )
    status, _, errors = run("jspec.train", *flags_of(home, workdir), env=env, timeout=600)
    assert status == 0, errors
    assert num_among >= _NUM_KILLS // 2
    killed, undisturbed = (
        safetensors.numpy.load_file(home / name / "head" / "model.safetensors")
        for name in ("one", "other")
    )
    assert killed.keys() == undisturbed.keys()
    for name, tensor in killed.items():
        np.testing.assert_array_equal(undisturbed[name], tensor, err_msg=name)
    assert read_metrics(home / "other") == read_metrics(home / "one")
