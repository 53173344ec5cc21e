"""Serves a model over HTTP: `python -m jspec.serve --port=8000`, with OpenAI's interface.

Requests that come at any time are answered together, and each may have its own settings. The
sampling flags are what a request that says nothing gets. Ctrl-C and SIGTERM let the answers in
progress end. Needs more packages: `pip install -e ".[serve]"`.
"""

import asyncio
import contextlib
import os
import pathlib
import signal
import socket
from collections.abc import Iterator
from typing import Any

from absl import flags
from jax.sharding import Mesh

from jspec.cli import answer_flags, mesh_flags
from jspec.cli import program as cli
from jspec.cli.answer_flags import load_models, read_method, read_settings
from jspec.cli.program import list_flags
from jspec.common import processes
from jspec.common.errors import InputError, check_count, check_range, say
from jspec.common.memory import keep_freed_memory
from jspec.generation.generator import Generator
from jspec.generation.request import SamplingParams
from jspec.weights.resolver import check_decoder

flags.adopt_module_key_flags(answer_flags)  # so that --help lists them
flags.adopt_module_key_flags(mesh_flags)
# Sampled rows share a call's drafts, as greedy ones do. By a rule of which texts depend on the
# drafts, each row would choose its own drafts as if it were alone, which is slow beside others.
flags.FLAGS.set_default("acceptance", "coupled")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen at; 0.0.0.0 for all.")
_PORT = flags.DEFINE_integer("port", 8000, "Port to listen at; 0 takes any free port.")
_MAX_SLOTS = flags.DEFINE_integer("max_slots", 8, "Most answers in progress at once.")
_MAX_QUEUE = flags.DEFINE_integer("max_queue", 64, "Most requests that wait for a slot.")
_MAX_SEQ_LEN = flags.DEFINE_integer(
    "max_seq_len", 4096, "Most tokens of prompt and answer together, if the model's context has as "
    "many."
)  # fmt: skip
_ROUNDS_PER_VISIT = flags.DEFINE_integer(
    "rounds_per_visit", None, "Rounds between two looks of the scheduler: fewer stream more "
    "smoothly and admit requests sooner, more save the host's time. Default: as many as take "
    "40 ms, from 2 on; 2 while a request waits."
)  # fmt: skip
_PREFILL_BUDGET = flags.DEFINE_integer(
    "prefill_budget", 64, "Tokens of new prompts that are read between two visits, for each free "
    "slot that is wanted: fewer delay running answers less, more let new ones begin sooner, above "
    "all on a GPU."
)  # fmt: skip
_CACHE_BYTES = flags.DEFINE_integer(
    "cache_bytes", None, "Memory for keys and values of all slots: where it runs out, the answer "
    "that began last waits. Default: enough for all at their longest, or what is free."
)  # fmt: skip
_PREFIX_CACHE_BYTES = flags.DEFINE_integer(
    "prefix_cache_bytes", None, "How much of it may hold what was read of prompts and no slot "
    "needs, so that others which begin alike need not read it again; 0 keeps nothing. Default: all."
)  # fmt: skip
_MAX_SECONDS = flags.DEFINE_float(
    "max_seconds", None, "Seconds after which an answer ends with what it has."
)
_GRACE_SECONDS = flags.DEFINE_float(
    "grace_seconds", 30.0, "Seconds that answers in progress have to end when the server stops."
)
_API_KEY = flags.DEFINE_string(
    "api_key", None, "What clients must show as a bearer token. Default: the environment's "
    "JSPEC_API_KEY, which other users of the machine cannot see; without it, no key is asked for."
)  # fmt: skip
_MAX_BODY_MB = flags.DEFINE_integer("max_body_mb", 4, "Most megabytes of a request.")
list_flags("Sampling", "max_new_tokens")
flags.FLAGS[
    "max_new_tokens"
].help = "Most tokens of an answer; without it a chat may fill the context."


def main() -> None:
    """Reads the flags, listens, loads and compiles, then serves until it is told to stop."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InputError(
            f'a server needs {error.name}, which is not installed: pip install "jspec[serve]"'
        ) from None
    for flag, low, high in (
        (_PORT, 0, 65_535), (_MAX_SLOTS, 1, 4096), (_MAX_QUEUE, 0, 10**6),
        (_MAX_SEQ_LEN, 2, 2**31 - 1), (_MAX_BODY_MB, 1, 1024), (_PREFILL_BUDGET, 1, 2**31 - 1),
    ):  # fmt: skip
        check_count(flag.name, flag.value, low, high)
    check_range("grace_seconds", _GRACE_SECONDS.value, 0, 86_400)
    for flag, low in ((_CACHE_BYTES, 1), (_PREFIX_CACHE_BYTES, 0)):
        if flag.value is not None:
            check_count(flag.name, flag.value, low, 2**60)
    if _MAX_SECONDS.value is not None:
        check_range("max_seconds", _MAX_SECONDS.value, 0.001, 86_400)
    api_key = _API_KEY.value if _API_KEY.present else os.environ.get("JSPEC_API_KEY")
    if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable()):
        raise InputError("expected an API key of printable ASCII characters, got another")
    keep_freed_memory()
    signal.signal(signal.SIGTERM, _end_early)
    with mesh_flags.flagged_mesh() as mesh:
        if processes.is_first():
            with _listening(_HOST.value, _PORT.value) as listener:
                asyncio.run(_serve(listener, api_key, mesh))
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _follow(mesh)


def _end_early(*_: Any) -> None:
    """Ends the program by SIGTERM before it serves, with the status that it has afterwards."""
    say("stopped by SIGTERM before the server was ready")
    os._exit(0)  # Python's cleanup would free memory that the device uses


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Opens the port before anything slow is done; clients that come early wait.

    Raises:
      InputError: it cannot be opened.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=256)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"expected a free port, got --port={port} at --host={host}: {reason}"
        ) from None
    with listener:
        yield listener


def _follow(mesh: Mesh | None) -> None:
    from jspec.serving.many_processes import follow
    from jspec.serving.worker import make_slots

    follow(make_slots(_load(read_settings(), mesh), **_memory()))


def _load(settings: SamplingParams, mesh: Mesh | None) -> Generator:
    if settings.num_beams > 1:
        raise InputError(f"expected num_beams 1 in a server, got {settings.num_beams}")
    method = read_method(settings)  # before anything slow
    target, draft = load_models(mesh)
    check_decoder(target, "in a server")
    max_seq_len = min(_MAX_SEQ_LEN.value, target.config.max_seq_len)
    if _MAX_SEQ_LEN.present and max_seq_len < _MAX_SEQ_LEN.value:
        say(f"note: --max_seq_len={_MAX_SEQ_LEN.value} is reduced to the model's {max_seq_len}")
    if flags.FLAGS["max_new_tokens"].present and settings.max_new_tokens >= max_seq_len:
        say(f"note: --max_new_tokens={settings.max_new_tokens} is reduced to what --max_seq_len, "
            f"{max_seq_len}, leaves after the prompt")  # fmt: skip
    return Generator(
        target, draft, method,
        batch_size=_MAX_SLOTS.value,
        max_seq_len=max_seq_len,
        rounds_per_visit=_ROUNDS_PER_VISIT.value,
        notify=say,
    )  # fmt: skip


def _memory() -> dict[str, Any]:
    return {
        "prefill_budget": _PREFILL_BUDGET.value,
        "cache_bytes": _CACHE_BYTES.value,
        "prefix_cache_bytes": _PREFIX_CACHE_BYTES.value,
    }


async def _serve(listener: socket.socket, api_key: str | None, mesh: Mesh | None) -> None:
    import uvicorn

    from jspec.serving.http import make_app
    from jspec.serving.http_answers import Server
    from jspec.serving.metrics import Metrics
    from jspec.serving.traces import Traces
    from jspec.serving.worker import Worker, make_scheduler

    settings = read_settings()
    generator = _load(settings, mesh)
    target = generator.target
    scheduler = make_scheduler(
        generator, max_queue=_MAX_QUEUE.value, rounds_per_visit=_ROUNDS_PER_VISIT.value, **_memory()
    )
    # A folder's own name: clients need not know where it lies.
    name = pathlib.Path(target.name).name if os.path.exists(target.name) else target.name
    metrics = Metrics(name, scheduler)
    traces = Traces()
    loop, num_signals = asyncio.get_running_loop(), 0

    def stop(*_: Any) -> None:
        """The first signal lets answers end, the second ends them, the third ends connections."""
        nonlocal num_signals
        num_signals += 1
        scheduler.drain(_GRACE_SECONDS.value if num_signals == 1 else 0.0)
        uvicorn_server.should_exit, uvicorn_server.force_exit = True, num_signals > 2

    def observe(update: Any) -> None:
        metrics.observe(update)
        traces.observe(update)

    worker = Worker(scheduler, observe, lambda: loop.call_soon_threadsafe(stop))
    server = Server(
        worker, generator, metrics, traces, name, settings, flags.FLAGS["seed"].present > 0,
        flags.FLAGS["max_new_tokens"].present > 0, api_key, _MAX_BODY_MB.value * 2**20,
        _MAX_SECONDS.value,
    )  # fmt: skip
    config = uvicorn.Config(
        make_app(server), log_level="warning", server_header=False, ws="none",
        # Answers have ended by then: what is left are clients that do not read.
        timeout_graceful_shutdown=int(_GRACE_SECONDS.value) + 10,
    )  # fmt: skip
    uvicorn_server = uvicorn.Server(config)
    # In the place of uvicorn's own handlers, which end the process by the signal.
    uvicorn_server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    worker.start()
    host, port = listener.getsockname()[:2]
    memory = generator.method.drafter_options.draft_memory
    kept = f", which keeps {memory} tokens of answers (draft_memory)" if memory else ""
    say(f"{name} by {generator.drafter}{kept}: http://{host}:{port}")
    await uvicorn_server.serve(sockets=[listener])
    worker.stop()
    if worker.error is not None:
        raise InputError(f"the device has failed: {worker.error}") from worker.cause
    scheduler.slots.stop()


if __name__ == "__main__":
    cli.run_main(main)
