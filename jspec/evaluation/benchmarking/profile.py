"""Records where an answer's time goes, for a viewer of JAX's profiler such as XProf."""

import tempfile
from collections.abc import Iterator

import jax

from jspec.evaluation.benchmarking.measurement import Measurement, Outcome
from jspec.generation.request import Request


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
    }
    title = f"{stats.num_rounds} rounds in {stats.decode_seconds:.3f} s, in the profiler"
    yield Outcome(record, f"{title}; `xprof --logdir={folder}` shows them operation by operation")
