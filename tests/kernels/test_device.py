"""How JAX starts: on what is asked for, or with one line that says what is there instead."""

import logging
import os
import subprocess
import sys

import jax
import pytest

from jspec.common.errors import InputError
from jspec.kernels import check_device, device

_CHECK = "from jspec.kernels import check_device; check_device(); import jax; print(jax.devices())"
# A plugin of JAX whose driver is too old: it says so when it is registered, or when it starts.
_REGISTERS = """
def initialize():
    cause = OSError("CUDA driver 12.2 is older than 13.0, which this jaxlib was built for.")
    raise RuntimeError("Unable to load CUDA. Is it installed?") from cause
"""
_STARTS = """
from jax._src import xla_bridge
def fail():
    raise RuntimeError("CUDA driver 12.2 is older than 13.0, which this jaxlib was built for.")
def initialize():
    xla_bridge.register_backend_factory("old", fail, priority=500, fail_quietly={is_quiet})
"""


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts JAX in a process with a plugin: all it printed."""

    def run(plugin, **variables):
        folder = tmp_path / "jax_plugins" / "old"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(plugin)
        paths = os.pathsep.join([str(tmp_path), *sys.path])
        changes = {"JAX_PLATFORMS": "", "PYTHONPATH": paths, **variables}
        command = [sys.executable, "-c", _CHECK]
        done = subprocess.run(command, env=os.environ | changes, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is another device")
@pytest.mark.parametrize("plugin", [_REGISTERS, _STARTS.format(is_quiet=False)])
def test_a_driver_that_is_too_old_is_one_line_and_the_cpu_is_used(start, plugin):
    """JAX alone prints a traceback for the first, and ends at the second."""
    status, output, errors = start(plugin)
    assert status == 0
    assert "CpuDevice" in output
    assert errors.startswith("jspec: it goes on with the CPU: ")
    assert "CUDA driver 12.2 is older than 13.0" in errors
    assert errors.count("\n") == 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is another device")
def test_a_wrong_platform_is_refused_with_those_that_are_there(start):
    status, output, errors = start(_STARTS.format(is_quiet=True), JAX_PLATFORMS="old")
    assert (status, output) == (1, "")
    last = errors.splitlines()[-1]
    assert last.startswith("jspec.common.errors.InputError: expected JAX_PLATFORMS among cpu; got ")
    assert "got old (Unable to initialize backend 'old': " in last
    assert "set JAX_PLATFORMS" not in last


def test_a_refusal_is_no_choice_of_another_device(monkeypatch):
    """Guards against a second call in a notebook that silently runs on the CPU."""
    monkeypatch.setattr(jax, "devices", lambda: fail())
    monkeypatch.setattr(device, "backends", lambda: {"cpu": None, "cuda": None})
    cleared = []
    monkeypatch.setattr(device, "clear_backends", lambda: cleared.append(True))

    def fail():
        raise AssertionError

    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", "rocm")
    try:
        for _ in range(2):
            with pytest.raises(
                InputError, match=r"^expected JAX_PLATFORMS among cpu, cuda; got rocm$"
            ):
                check_device()
        assert jax.config.values["jax_platforms"] == "rocm"
    finally:
        jax.config.update("jax_platforms", before)
    assert cleared == [True, True]


def test_what_jax_says_otherwise_is_left_alone(caplog):
    """Its information stays where the user asks for it, and nothing is said of a good start."""
    logger = logging.getLogger("jax._src.xla_bridge")
    check_device()
    with caplog.at_level(logging.INFO, logger.name):
        logger.info("a device")
        logger.warning("a warning")
    assert [record.message for record in caplog.records] == ["a device", "a warning"]
    assert not logger.filters
