"""python -m jspec.serve as a process: it starts, answers, and stops as it is told."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import threading
import time
import urllib.request

import pytest

from tests.programs import command, environment, refuse_all
from tests.serving.served import TEMPLATE, events
from tests.tiny_models import save_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    return save_folder(path, template=TEMPLATE, num_layers=1)


@pytest.fixture
def env(compile_cache, tmp_path):
    return environment(compile_cache, tmp_path / "home") | {"JSPEC_API_KEY": "secret"}


@pytest.fixture
def process(folder, env):
    """A server, its port and its lines on standard error."""
    flags = ("--port=0", f"--target={folder}", "--dtype=float32", "--max_slots=2",
             "--drafter=prompt_lookup", "--num_draft_tokens=3", "--grace_seconds=20")  # fmt: skip
    process = subprocess.Popen(command("jspec.serve", *flags), env=env, stderr=subprocess.PIPE)
    lines = []
    for line in process.stderr:
        lines.append(line.decode())
        if "http://" in lines[-1]:
            break
    rest = threading.Thread(target=lambda: lines.extend(map(bytes.decode, process.stderr)))
    rest.start()
    yield process, int(lines[-1].rpartition(":")[2]), lines
    process.kill()
    process.wait()
    rest.join()
    process.stderr.close()
    assert not any("Traceback" in line for line in lines)


def post(port, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    url, data = f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60)


def test_a_server_lets_the_answers_in_progress_end(process):
    """SIGTERM: the stream is whole, and the status is 0."""
    process, port, lines = process
    asked = {"prompt": "abc", "max_tokens": 190, "min_tokens": 190, "stream": True}
    with post(port, asked) as stream:
        begin = stream.read(20)
        process.send_signal(signal.SIGTERM)
        chunks = events(begin + stream.read())
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert process.wait(timeout=30) == 0
    assert not any("Traceback" in line for line in lines)


def test_a_signal_before_it_serves_ends_it_in_one_line(folder, env):
    """Guards against status 143 and no word; before that, flags beyond the model are named."""
    flags = ("--port=0", f"--target={folder}", "--dtype=float32", "--max_slots=2",
             "--drafter=none", "--max_seq_len=9999", "--max_new_tokens=8888")  # fmt: skip
    with subprocess.Popen(
        command("jspec.serve", *flags), env=env, stderr=subprocess.PIPE, text=True
    ) as process:
        notes = [process.stderr.readline() for _ in range(2)]
        process.send_signal(signal.SIGTERM)
        *_, last = process.stderr.readlines()
    assert notes == [
        "note: --max_seq_len=9999 is reduced to the model's 200\n",
        "note: --max_new_tokens=8888 is reduced to what --max_seq_len, 200, leaves after the prompt"
        "\n",
    ]
    assert (process.returncode, last) == (0, "stopped by SIGTERM before the server was ready\n")


@pytest.mark.slow
def test_a_second_signal_ends_answers_at_once(process):
    """Forty answers would take many seconds more, and had 20 to end: those that have begun end as
    they are, the others are refused; nobody is told of an error within the server."""
    process, port, _ = process
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    asked = {"prompt": "abc", "max_tokens": 190, "min_tokens": 190}
    connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(40)]
    for number, connection in enumerate(connections):
        body = json.dumps(asked | {"stream": number == 39})
        connection.request("POST", "/v1/completions", body, headers)
    assert connections[0].getresponse().status == 200
    begin = time.monotonic()
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    statuses = set()
    for connection in connections[1:39]:
        with contextlib.closing(connection), connection.getresponse() as reply:
            answer = json.loads(reply.read())
            statuses.add(reply.status)
            assert ("error" in answer) == (reply.status == 503)
    assert statuses == {200, 503}
    with contextlib.closing(connections[39]) as connection:
        assert b'"message": "the server is stopping' in connection.getresponse().read()
    connections[0].close()
    assert process.wait(timeout=30) == 0
    assert time.monotonic() - begin < 10


@pytest.mark.slow
def test_a_full_disk_keeps_nobody_from_an_answer(folder, env, tmp_path):
    """No file can grow, so no compiled program is kept: two starts answer, without a traceback."""
    variables = env | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla")}
    flags = ("--port=0", f"--target={folder}", "--dtype=float32", "--max_slots=2")
    limited = ["bash", "-c", 'ulimit -f 0 && exec "$@"', "-", *command("jspec.serve", *flags)]
    for _ in range(2):
        with subprocess.Popen(limited, env=variables, stderr=subprocess.PIPE, text=True) as process:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "http://" in line:
                    break
            with post(int(line.rpartition(":")[2]), {"prompt": "abc", "max_tokens": 5}) as reply:
                assert len(json.loads(reply.read())["choices"]) == 1
            process.send_signal(signal.SIGTERM)
            lines += process.stderr.readlines()
        assert process.returncode == 0
        assert not any("Traceback" in line for line in lines), lines
    assert not any(path.stat().st_size for path in (tmp_path / "xla").rglob("*") if path.is_file())


def test_bad_flags_are_refused_in_one_line(env):
    """A port that another server has among them."""
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    cases = {
        f"--port={port}": f"got --port={port} at --host=127.0.0.1",
        "--port=70000": "expected port from 0 to 65535, got 70000",
        "--host=no.such.host.invalid": "--host=no.such.host.invalid",
        "--max_slots=0": "expected max_slots from 1",
        "--cache_bytes=0": "expected cache_bytes from 1",
        "--max_seconds=-1": "expected max_seconds",
        "--api_key=": "API key of printable",
        "--port=0 --num_draft_tokens=many": "num_draft_tokens",
        "--port=0 --num_beams=2": "expected num_beams 1 in a server",
    }
    with taken:
        refuse_all("jspec.serve", cases, env=env)
