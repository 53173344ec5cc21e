"""Records where an answer's time goes, for a viewer of JAX's profiler such as XProf.

And counts what a round launches: in the profiler, and in the program that XLA has compiled.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jspec.common.text_table import format_table
from jspec.generation.batch import needed_switches
from jspec.generation.engine import MAX_ROUNDS_PER_VISIT
from jspec.generation.generator import Generator
from jspec.generation.request import Request
from jspec.lab.accelerators.hlo import Module
from jspec.lab.accelerators.rounds import Assumptions, count_round
from jspec.lab.accelerators.seen import read_seen
from jspec.lab.benchmarking.measurement import Measurement, Outcome

_COPIES = "memcpy", "copy"  # of a profiler, without regard to case


def measure_profile(asked: Measurement) -> Iterator[Outcome]:
    """Answers a prompt of equal tokens once to compile and once under the profiler.

    The profiler slows down what it watches: shares count, not times.
    """
    (generator,) = asked.generators(*asked.models()).values()
    request = Request([1] * asked.contexts()[0], asked.settings())
    generator.generate(request)
    folder = asked.trace_folder or tempfile.mkdtemp(prefix="jspec-trace-")
    with jax.profiler.trace(folder):
        stats = generator.generate(request).stats
    record = {
        "described": generator.describe(),
        "num_rounds": stats.num_rounds,
        "decode_seconds": stats.decode_seconds,
        "trace_folder": folder,
        "a_round": count_launches(generator, request),
    }
    title = f"{stats.num_rounds} rounds in {stats.decode_seconds:.3f} s, in the profiler"
    show = f"{title}; `xprof --logdir={folder}` shows them operation by operation"
    rows = [
        [name, *(f"{record['a_round'][side][key]:.1f}" for side in ("seen", "compiled"))]
        for name, key in (("launches", "launches_per_round"), ("copies", "copies"))
    ]
    yield Outcome(record, f"{show}\n{format_table(['a round', 'seen', 'compiled'], rows)}")


def count_launches(generator: Generator, request: Request) -> dict[str, Any]:
    """Returns the launches and copies of one round that the profiler sees, and the compiler's.

    What one run does before its first round and after the last is shared out among its rounds. The
    profiler's copies are all that there are, the compiler's those of a megabyte or more.
    """
    engine, params, drafts = generator.engine, generator.params, generator.num_draft_tokens
    # Enough for two runs in which every draft is accepted.
    length = 2 * MAX_ROUNDS_PER_VISIT * (drafts + 1) + 1
    settings = dataclasses.replace(request.settings, max_new_tokens=length)
    row = generator.with_costs(generator.make_row(Request(request.prompt, settings)))
    capacity, switches = engine.capacity_for(row.max_length), needed_switches([settings])
    state = engine.prefill(params, row, capacity, switches)
    text = engine._run.lower(params, state, np.int32(1)).compile().as_text() or ""
    state, _ = engine.run(params, state, MAX_ROUNDS_PER_VISIT)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            _, infos = engine.run(params, state, MAX_ROUNDS_PER_VISIT)
        seen = read_seen(folder)
    num_rounds = max(len(infos.num_tokens), 1)
    found = count_round(Module(text), Assumptions(drafts, settings.temperature > 0)).figures
    copies = sum(count for name, count in seen.items() if name.lower().startswith(_COPIES))
    return {
        "num_rounds": num_rounds,
        "seen": {"launches_per_round": seen.total() / num_rounds, "copies": copies / num_rounds},
        "compiled": {key: found[key] for key in ("launches_per_round", "copies")},
        "kernels": {name: count / num_rounds for name, count in seen.most_common(20)},
    }
