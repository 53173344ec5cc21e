"""Launches of a round: the profiler sees about what the compiled program says."""

from types import SimpleNamespace

import jax
import pytest
from jspec.lab.accelerators.seen import read_seen

from jspec.generation.request import Request, SamplingParams
from jspec.lab.benchmarking.profile import count_launches
from tests import tiny_models

pytestmark = pytest.mark.usefixtures("lines_of_code")


@pytest.mark.parametrize("drafter", ["none", "self"])
def test_the_profiler_sees_what_the_compiler_wrote(drafter):
    """On a CPU, whose operations are counted: loops as often as they run.

    The model drafts for itself, so that rounds are full. What lies around the rounds is shared out.
    """
    model = tiny_models.with_eos(tiny_models.target(), 127)
    generator = tiny_models.make_generator(drafter, model)
    found = count_launches(generator, Request([1, 2, 3], SamplingParams(max_new_tokens=4)))
    assert found["num_rounds"] == 16
    compiled = found["compiled"]["launches_per_round"]
    assert found["seen"]["launches_per_round"] == pytest.approx(compiled, rel=0.1)
    assert max(found["kernels"].values()) >= (1 if drafter == "none" else 3)  # a chain of drafts
    assert found["seen"]["copies"] < compiled


def event(name, **stats):
    return SimpleNamespace(name=name, stats=stats.items())


def plane(name, **lines):
    made = [SimpleNamespace(name=key.replace("_", " "), events=own) for key, own in lines.items()]
    return SimpleNamespace(name=name, lines=made)


def test_of_a_gpu_its_streams_are_counted(tmp_path, monkeypatch):
    """Guards against kernels counted twice: by the host, as steps, and on another device."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "host.xplane.pb").touch()
    planes = [
        plane("/host:CPU", python=[event("dot.1", hlo_op="dot.1"), event("PjitFunction")]),
        plane("/device:GPU:0", Stream_1=[event("gemm"), event("gemm")],
              Stream_2=[event("MemcpyD2D")], XLA_Modules=[event("jit_run")]),
        plane("/device:GPU:1", Stream_1=[event("gemm")]),
    ]  # fmt: skip
    monkeypatch.setattr(
        jax.profiler.ProfileData, "from_file", lambda path: SimpleNamespace(planes=planes)
    )
    assert read_seen(str(tmp_path)) == {"gemm": 2, "MemcpyD2D": 1}
    del planes[1:]
    assert read_seen(str(tmp_path)) == {"dot.1": 1}
