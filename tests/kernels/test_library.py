"""The library: built once, built again when damaged, and done without where it cannot be built."""

import dataclasses
import shutil
import subprocess

import pytest

from jspec.common.errors import InputError
from jspec.kernels import check_device
from jspec.kernels import library as native

# Without the memory of the process:
prepare, prepare_cuda = (f.__wrapped__ for f in (native._prepare_cpp, native._prepare_cuda))


def test_it_is_compiled_once_and_a_damaged_one_again(library, cache, monkeypatch, tmp_path):
    sources, folder = native._CPP, tmp_path / "cpp"  # one source is soon compiled
    folder.mkdir()
    for name in ("pack.cc", *(path.name for path in sources.glob("*.h"))):
        shutil.copy(sources / name, folder)
    monkeypatch.setattr(native, "_CPP", folder)
    runs = []
    run = subprocess.run

    def counted(command, **kwargs):
        runs.append("-shared" in command)
        return run(command, **kwargs)

    monkeypatch.setattr(subprocess, "run", counted)
    monkeypatch.setattr(native, "_CPP_OPTIONS", ("-std=gnu++17", "-fPIC", "-w"))
    path = cache / "native" / f"jspec-{native.cpp_recipe().fingerprint()}.so"
    for number in (1, 2):
        for _ in range(2):
            native.load_library(native.cpp_recipe())
        assert sum(runs) == number
        assert path.stat().st_size > 10_000
        beside = sorted(path.parent.iterdir())
        assert beside == [path.with_suffix(".sha256"), path]  # nothing else
        whole = path.read_bytes()
        path.unlink()  # the one that is loaded lives on
        path.write_bytes(whole[:5000])  # of a killed process, say: to load it would end this one


def test_another_processor_gets_a_library_of_its_own(monkeypatch):
    fingerprint = native.cpp_recipe().fingerprint()
    monkeypatch.setattr(native, "_processor", lambda: "another")
    assert native.cpp_recipe().fingerprint() != fingerprint


def check_line(capsys, reason):
    """Checks that one line is said, jspec's: no time, file and number of a logger before it."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jspec: ")
    assert reason in line
    assert "XLA computes" in line


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/nowhere/c++", "there is no C++ compiler /nowhere/c++ ($CXX)"),
        ("/nowhere/nvcc", "there is no CUDA C++ compiler /nowhere/nvcc ($CUDA_HOME)"),
        ("false", "false failed: status 1"),
        (None, "C++ compiler was found"),
    ],
)
def test_without_a_compiler_xla_computes_and_one_line_says_so(
    cache, monkeypatch, capsys, compiler, reason
):
    for name in ("_cpp_compiler", "find_nvcc"):
        monkeypatch.setattr(native, name, lambda: compiler)
    is_cuda = "CUDA" in reason or compiler is None
    assert (prepare_cuda("9.0") if is_cuda else prepare()) is None
    check_line(capsys, reason)
    assert not list(cache.glob("native/*"))


def test_a_format_that_does_not_compile_is_left_to_xla(cache, monkeypatch, capsys):
    recipe = dataclasses.replace(native.packed_recipe("q4_0"), compiler="false")
    monkeypatch.setattr(native, "packed_recipe", lambda kind: recipe)
    monkeypatch.setattr(native, "_begun_packed", native._begun_packed.__wrapped__)
    assert native._prepare_packed.__wrapped__("q4_0") is None
    check_line(capsys, "false failed: status 1")


def test_a_cache_folder_that_cannot_be_written(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "file"))
    assert prepare() is None
    check_line(capsys, "Not a directory")


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("JSPEC_NATIVE", "0")
    assert not native.is_available()
    monkeypatch.setenv("JSPEC_NATIVE", "off")
    with pytest.raises(InputError, match="expected JSPEC_NATIVE to be 0 or 1, got 'off'"):
        check_device()
