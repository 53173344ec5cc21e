"""The server's slots on a mesh of devices, and in several processes that follow the first."""

import json
import queue
import signal
import socket
import subprocess
import threading
import urllib.request

import numpy as np
import pytest

from jspec.common import processes
from jspec.generation.request import SamplingParams
from jspec.kernels import PAGE
from jspec.serving import many_processes
from jspec.serving.many_processes import LeadingSlots, follow
from jspec.serving.scheduler import Scheduler
from jspec.serving.worker import make_slots
from tests.meshes import run_on_devices
from tests.programs import command, environment
from tests.serving.served import step, submit
from tests.serving.test_page_pool import Machine
from tests.tiny_models import make_generator, save_folder

SHARED = [1 + n * n % 97 for n in range(140)]
PROMPTS = [[*SHARED, 3], [2, 3, 4], [*SHARED, 5, 6], [9], [*SHARED[:70], 8]]
PROMPTS += [[4, 5], [*SHARED, 9]]


def answer_all(slots, generator, cancelled=None):
    """Lets a scheduler of these slots answer the prompts; returns token ids, and the pauses.

    The job of that pause, from 0, is cancelled while it waits.
    """
    sizes = {"max_queue": 20, "rounds_per_visit": 2, "prefill_budget": 64}
    scheduler = Scheduler(slots, generator.target, 4, clock=lambda: 0.0, **sizes)
    lengths = [57 if len(prompt) > 9 else 130 for prompt in PROMPTS]
    jobs = [
        submit(generator, scheduler, prompt, SamplingParams(length, temperature=1.0, seed=seed))
        for seed, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True))
    ]
    while scheduler.is_busy:
        step(scheduler)
        if scheduler.num_paused - 1 == cancelled:
            scheduler.cancel(next(job for job, _ in jobs if job.paused is not None))
            cancelled = None
    return [results[0].token_ids for _, results in jobs], scheduler.num_paused


def cache_bytes(slots, num_pages):
    """Returns the bytes of that many pages: too few for all answers at once."""
    return num_pages * sum(slots._batch.page_bytes)


@pytest.fixture
def told(monkeypatch):
    """Two processes in one process: what the first broadcasts goes to the second by a queue."""
    calls = queue.Queue()
    thread_id = threading.get_ident()

    def broadcast(value):
        if threading.get_ident() == thread_id:
            calls.put(value)
            return value
        return calls.get(timeout=60)

    monkeypatch.setattr(processes, "broadcast", broadcast)
    monkeypatch.setattr(many_processes.signal, "signal", lambda *_: None)  # of main threads alone
    return calls


class Led(Machine):
    """The machine of `test_page_pool`, whose calls are told to other slots."""

    def __init__(self):
        super().__init__()
        self.local_slots, self.slots = self.slots, LeadingSlots(self.slots)

    def shared(self):
        return set(), set()

    def pause(self, row):
        is_reading = self.reading is not None and row == self.reading[0]
        text = self.reading[1] if is_reading else list(self.device.texts[row])
        saved = self.slots.pause(row)
        self.reading = None if is_reading else self.reading
        self.waiting.insert(0, (text, saved))
        self.order.remove(row)
        self.num_paused += 1


def test_followers_know_the_pages_of_the_first(told):
    """Guards against a call that is not told, or told late; what nobody waits for is forgotten."""
    led, rng, most_saved = Led(), np.random.default_rng(0), 0
    following = Machine()
    thread = threading.Thread(target=follow, args=(following.slots,))
    thread.start()
    for _ in range(3000):
        action, kind, number = rng.integers([12, 3, 5 * PAGE]).tolist()
        if action == 0 and len(led.waiting) < 8:
            led.come(kind, 1 + number)
        elif action == 1 and number < 2 * PAGE:
            led.end(number)
        elif action < 6:
            led.read()
        else:
            led.visit(1 + number % 20)
        most_saved = max(most_saved, len(led.slots._calls._saved))
    led.waiting.clear()
    led.slots.keep_alive()
    assert not led.slots._calls._saved
    led.slots.stop()
    thread.join(timeout=60)
    assert led.num_paused > most_saved > 0
    assert (led.device.contents == following.device.contents).all()
    assert (led.device.lengths == following.device.lengths).all()
    assert [pool._free for pool in led.local_slots.pools] == [
        p._free for p in following.slots.pools
    ]


@pytest.mark.slow
def test_followers_compute_what_the_first_does(told):
    """Through pauses, and a paused answer that is cancelled: pages, prompts and rows are alike."""
    generator = make_generator("model", batch_size=3, acceptance="coupled")
    few = cache_bytes(make_slots(generator), 5)
    first, second = (make_slots(generator, cache_bytes=few) for _ in range(2))
    leading = LeadingSlots(first)
    thread = threading.Thread(target=follow, args=(second,))
    thread.start()
    _, num_paused = answer_all(leading, generator, cancelled=1)
    leading.keep_alive()
    leading.stop()
    thread.join(timeout=60)
    assert num_paused > 1
    for pool, copy in zip(first.pools, second.pools, strict=True):
        assert pool._free == copy._free
    assert first.tree.num_bytes == second.tree.num_bytes > 0
    assert (first._batch.lengths == second._batch.lengths).all()
    assert not leading._calls._saved


_SERVED = """
from jspec.common.timing import compile_clock
from jspec.serving.worker import make_scheduler, make_slots
from tests.serving.test_many_devices import answer_all, cache_bytes

outputs = []
for mesh in (None, "data:2,model:2", "model:4"):
    generator = make_generator({drafter!r}, mesh, batch_size=4)
    scheduler = make_scheduler(generator, max_queue=20, rounds_per_visit=2)
    begin = compile_clock().num_programs
    texts, _ = answer_all(scheduler.slots, generator)
    again, _ = answer_all(scheduler.slots, generator)  # what was read of prompts is there
    num_compiled = compile_clock().num_programs - begin
    few = cache_bytes(scheduler.slots, 5)
    of_few = answer_all(make_slots(generator, cache_bytes=few), generator)
    outputs.append([texts, again, num_compiled, of_few])
report(outputs)
"""


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["model", "prompt_lookup"])
def test_answers_are_those_of_one_device(drafter):
    """Rows on their own rows of the mesh, prompts shared by all; where memory is short, paused."""
    outputs = run_on_devices(_SERVED.format(drafter=drafter))
    texts = outputs[0][0]
    assert len({tuple(ids) for ids in texts}) == len(texts)
    for first, again, num_compiled, (of_few, num_paused) in outputs:
        assert first == again == of_few == texts
        assert num_compiled == 0
        assert num_paused > 0


_AUTO = """
from jspec.generation.costs import RoundCosts
from jspec.serving.worker import make_slots

rounds = ((1.0, 1.1, 1.3, 1.7),)
costs = RoundCosts((512,), (0, 1, 3, 7), ("prompt_lookup",), (rounds,), ((0.0,),))
outputs = []
for mesh in (None, "data:2,model:2", "model:4"):
    options = {"batch_size": 4, "num_draft_tokens": "auto", "costs": costs}
    slots = make_slots(make_generator("prompt_lookup", mesh, **options))
    outputs.append(slots._batch._state.control.num_rows)
report(outputs)
"""


@pytest.mark.slow
def test_costs_are_those_of_the_rows_of_a_device():
    """Guards against rounds of all rows held for twice as many as a row of the mesh has."""
    assert run_on_devices(_AUTO) == [4, 2, 4]


@pytest.fixture
def servers(tmp_path, compile_cache):
    """Returns a function that starts the processes of a server; they and the first one's port."""
    folder, begun = save_folder(tmp_path / "m", num_heads=8, max_seq_len=256), []

    def start(number, *flags):
        env = environment(compile_cache, tmp_path / "home") | {"JAX_PLATFORMS": "cpu"}
        usual = ("--port=0", f"--target={folder}", "--dtype=float32", "--max_slots=2",
                 "--drafter=prompt_lookup", *flags)  # fmt: skip
        for process_id in range(number):
            line = command("jspec.serve", *usual)
            line += [f"--process_id={process_id}"] * (number > 1)
            begun.append(subprocess.Popen(line, env=env, stderr=subprocess.PIPE, text=True))
        for line in begun[-number].stderr:
            if "http://" in line:
                return begun[-number:], int(line.rpartition(":")[2])
        raise AssertionError([process.communicate() for process in begun[-number:]])

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.fixture
def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def complete(port, prompt):
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 1.0, "seed": 5}
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())["choices"][0]["text"]


def of_run(number, port):
    coordinator = f"--coordinator=localhost:{port}", f"--num_processes={number}"
    return f"--mesh=model:{number}", *coordinator


@pytest.mark.slow
def test_two_processes_serve_as_one(servers, free_port):
    """The same texts; SIGTERM to the first ends both; to the second it does nothing."""
    (alone,), port = servers(1)
    expected = [complete(port, prompt) for prompt in ("hello there", "x" * 100)]
    alone.send_signal(signal.SIGTERM)
    servers_begun, port = servers(2, *of_run(2, free_port))
    servers_begun[1].send_signal(signal.SIGTERM)
    assert [complete(port, prompt) for prompt in ("hello there", "x" * 100)] == expected
    assert threading.Event().wait(40) is False, "nothing is asked for, and all stay"
    assert complete(port, "hello there") == expected[0]
    servers_begun[0].send_signal(signal.SIGTERM)
    assert [process.wait(timeout=40) for process in servers_begun] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_the_server(servers, free_port, lost):
    servers_begun, _ = servers(2, *of_run(2, free_port))
    servers_begun[lost].kill()
    left = servers_begun[1 - lost]
    _, errors = left.communicate(timeout=90)
    assert left.returncode == 2
    said = f"error: process {1 - lost} of 2: process {lost} of the run was lost"
    assert errors.splitlines()[-1] == said


@pytest.mark.slow
def test_two_processes_serve_with_numbers_that_adapt(servers, free_port):
    """Both measure what rounds cost, and have the first one's costs."""
    flags, prompts = ("--num_draft_tokens=auto", "--acceptance=coupled"), ("hello there", "x" * 100)
    (alone,), port = servers(1, *flags)
    expected = [complete(port, prompt) for prompt in prompts]
    alone.send_signal(signal.SIGTERM)
    servers_begun, port = servers(2, *flags, *of_run(2, free_port))
    assert [complete(port, prompt) for prompt in prompts] == expected
    servers_begun[0].send_signal(signal.SIGTERM)
    assert [process.wait(timeout=40) for process in servers_begun] == [0, 0]
