"""The user's cache: its folder; of programs, what a killed process or another version leaves."""

import os
import pathlib
import shutil
import subprocess
import sys
import zlib

import pytest

from jspec.common.errors import InputError
from jspec.common.user_cache import _rebuild_damaged_entries, cache_dir

# Two programs, so that two entries are damaged; prints how many came from the cache, and how many
# were told to listeners as compiled anew.
_PROGRAM = """
import sys
import jax
from jax._src import cache_key
from jspec.common.user_cache import compile_listeners, use_compile_cache

use_compile_cache()
told = []
compile_listeners.append(told.append)
if len(sys.argv) > 1:
    cache_key.jaxlib_version_str = sys.argv[1]
hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(1) if event.endswith("cache_hits") else None
)
for factor in (3, 5):
    print(jax.jit(lambda x: factor * x)(jax.numpy.ones(7)))
print("hits", len(hits), len([key for key in told if key.startswith("jit__lambda")]))
"""


def start(folder, *arguments, program=_PROGRAM):
    """Runs the program; returns its output, its hits and its errors.

    Either both programs come from the cache or both are told as compiled anew.
    """
    removed = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    env = {name: value for name, value in os.environ.items() if name not in removed}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=env | {"JSPEC_CACHE": str(folder)},
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    output, _, numbers = done.stdout.partition("hits")
    hits, told = map(int, numbers.split())
    assert told == (0 if hits else 2)
    return output, hits, done.stderr


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Returns the folder of a first start, and its output."""
    folder = tmp_path_factory.mktemp("first")
    output, hits, errors = start(folder)
    assert (hits, errors) == (0, "")
    return folder, output


def entries(folder):
    return {path.name: path for path in pathlib.Path(folder, "xla").glob("*-cache")}


def cut(path):
    """Leaves what a process leaves that is killed while it writes."""
    path.write_bytes(path.read_bytes()[:7])


def spoil(path):
    """Leaves a whole file in which XLA finds no program."""
    path.write_bytes(zlib.compress(b"\0\0\0\0 no program"))


@pytest.mark.parametrize("damage", [cut, pytest.param(spoil, marks=pytest.mark.slow)])
def test_a_damaged_entry_is_rebuilt_with_one_line(first, damage):
    """Guards against a warning in two lines, and a compilation, at every later start."""
    folder, expected = first
    damaged = entries(folder)
    assert len(damaged) >= 2
    for path in damaged.values():
        damage(path)
    output, hits, errors = start(folder)
    assert (output, hits) == (expected, 0)
    assert errors.startswith("jspec: the cache of compiled programs is damaged")
    assert errors.count("\n") == 1
    assert entries(folder).keys() == damaged.keys()
    assert start(folder) == (expected, len(damaged), "")


def test_what_another_version_has_left_is_not_read(first, tmp_path):
    """JAX's key holds the version: entries of another stay, beside those of this version."""
    shutil.copytree(first[0], tmp_path, dirs_exist_ok=True)
    others = entries(tmp_path)
    assert start(tmp_path, "0.0.1") == (first[1], 0, "")
    assert entries(tmp_path).keys() > others.keys()


def test_a_folder_of_the_users_own_is_left_to_jax(tmp_path, monkeypatch):
    """Guards against an entry removed where other programs keep theirs; JAX is told once only."""
    import jax
    from jax._src import compilation_cache

    def fail(cache_key, *_):
        raise ValueError(cache_key)

    monkeypatch.setattr(compilation_cache, "get_executable_and_time", fail)
    _rebuild_damaged_entries()
    wrapper = compilation_cache.get_executable_and_time
    _rebuild_damaged_entries()
    assert compilation_cache.get_executable_and_time is wrapper
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    entry = tmp_path / "xla" / "jit_f-00-cache"
    entry.parent.mkdir()
    entry.write_bytes(b"abc")
    assert jax.config.values["jax_compilation_cache_dir"] != str(entry.parent)
    with pytest.raises(ValueError, match="jit_f-00"):
        wrapper("jit_f-00")
    assert entry.exists()


# As where a disk is full: no file of more than a few bytes.
_FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
"""


def test_a_full_disk_is_one_line(first, tmp_path):
    """Guards against two lines of JAX for each program, and parts of entries that are left."""
    output, hits, errors = start(tmp_path / "full", program=_FULL + _PROGRAM)
    assert (output, hits) == (first[1], 0)
    folder = tmp_path / "full" / "xla"
    message = "jspec: the cache of compiled programs cannot be written"
    assert errors == f"{message}: {folder}: File too large\n"
    assert entries(tmp_path / "full") == {}


def test_a_folder_that_is_none_is_one_line(first, tmp_path):
    """Guards against a folder that cannot be used being called damaged."""
    (tmp_path / "xla").write_text("no folder")
    output, _, errors = start(tmp_path)
    assert output == first[1]
    folder = tmp_path / "xla"
    message = "jspec: the cache of compiled programs cannot be used"
    assert errors == f"{message}: {folder}: File exists\n"


def test_variables_come_before_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JSPEC_CACHE", raising=False)
    assert cache_dir() == tmp_path / "jspec"
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_without_a_home_folder_it_says_what_to_set(monkeypatch):
    """As in a container whose user has no name."""

    for name in ("JSPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what Python does without one
    with pytest.raises(InputError, match=r"expected \$JSPEC_CACHE or \$HOME"):
        cache_dir()
