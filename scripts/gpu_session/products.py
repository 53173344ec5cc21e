"""Products and attention of 1B and 3B by every candidate, and which kernels are best.

A product is timed over as many weights as no cache holds, one after another in one graph. A layer
is timed in a model of a few layers and hardly any vocabulary, with the kernels of each choice of
`JSPEC_KERNELS`; what it takes more with 4,096 tokens before it is attention.
"""

import contextlib
import dataclasses
import functools
import json
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.errors import describe_error
from jspec.common.timing import TurnLoop, least_seconds, seconds_each, timed
from jspec.common.user_cache import cache_dir
from jspec.generation.graph_trial import check_one_graph
from jspec.kernels import library, rms_norm
from jspec.kernels.backend import NAMES, XLA
from jspec.kernels.cuda_block import NOTHING_FUSED, Fused, multiply, multiply_by_xla
from jspec.lab.analysis.call_cost import Machine, measure_machine, product_loop
from jspec.lab.benchmarking.roofline import call_loop
from jspec.models import DecoderConfig
from scripts.gpu_session.correctness import GRAPH, SERIALISED, known
from scripts.gpu_session.session import Session, Work
from scripts.gpu_session.subjects import SIZES, random_model, shape_of

Product = Callable[..., jax.Array]
"""(rows [r i], weights [o i], what is fused with the product) -> [r o or o/2]."""

WITHOUT_CUDA_PRODUCTS = XLA, "attention"  # choices by which XLA multiplies
_TILE = 16  # rows that tensor cores multiply at once
_ROWS = 1, 6, 16
_COLD_BYTES = 1.6e8  # of weights: three times the largest cache
_MOST_WEIGHTS = 12  # of a program
_TURNS, _REPEATS = 8, 7
_FARTHEST = 0.02  # a result from XLA's, as a share of the largest
_EPSILON = 1e-5
_LAYERS, _VOCABULARY = 4, 256  # of the model whose layers are timed
_CALLS = (1, 128), (6, 128), (1, 4096)  # tokens, tokens before them


def run(work: Work) -> str:
    """Times products, then layers by each choice; what matters most comes first."""
    check_one_graph()  # else what is timed outside a Generator would be none
    bandwidth(work)
    shares = _time_layers(work)
    best = sorted(shares, key=lambda name: -shares[name])
    # Where nothing is gained, the simplest stays first.
    if XLA in shares and best[0] != XLA and shares[best[0]] < 1.03 * shares[XLA]:
        best = [XLA, *(name for name in best if name != XLA)]
    work.record("chosen", choices=best)
    _time_products(work)
    _record_verdicts(work)
    listed = ", ".join(f"{name} {shares[name]:.0%}" for name in best)
    return f"layers on one token reach, of the memory's speed, {listed}"


def chosen(session: Session) -> list[str]:
    """Returns the choices of kernels, the best one first; XLA alone before they are known."""
    figures = session.figures("products", "chosen")
    return figures[-1]["choices"] if figures and figures[-1]["choices"] else [XLA]


def candidates() -> dict[str, Product]:
    """Returns what multiplies a few rows by weights of bfloat16, by name."""
    products: dict[str, Product] = {XLA: multiply_unpadded, "xla, 16 rows": multiply_by_xla}
    if library.is_cuda_available():
        products["cuda"] = multiply
        products["cuda, overlapping"] = functools.partial(multiply, overlaps=True)
    return products


def multiply_unpadded(
    rows: jax.Array, weights: jax.Array, fused: Fused = NOTHING_FUSED
) -> jax.Array:
    """Multiplies as many rows as there are; see `multiply_by_xla`, which pads them to a tile."""
    if fused.norm is not None:
        rows = rms_norm(rows[None], fused.norm, jnp.float32(fused.epsilon))[0]
    outputs = jnp.dot(rows.astype(weights.dtype), weights.T, preferred_element_type=jnp.float32)
    if fused.activation is not None:
        gate, value = jnp.split(outputs, 2, axis=1)
        outputs = jax.nn.silu(gate) * value
    return outputs if fused.residual is None else fused.residual + outputs


def bandwidth(work: Work) -> float:
    """Returns the bytes a second that the machine itself reads, measured once in a process."""
    machine = work.session.shared.get("machine")
    if machine is None:
        machine = measure_machine("bfloat16") if not work.is_rehearsal else _quick_machine()
        work.session.shared["machine"] = machine
        work.record("machine", bandwidth=machine.bandwidth, flop_rate=machine.flop_rate)
    return machine.bandwidth


def _quick_machine() -> Machine:
    rows, size = 4, 256
    seconds = least_seconds(product_loop(rows, size, size, "float32"), repeats=1)
    return Machine(4 * size**2 / seconds, 2 * rows * size**2 / seconds)


@contextlib.contextmanager
def kernels_by(choice: str) -> Iterator[None]:
    """Within it programs are made of the kernels of one choice."""
    before = os.environ.get("JSPEC_KERNELS")
    jax.clear_caches()  # what was traced with other kernels is not what is wanted
    os.environ["JSPEC_KERNELS"] = choice
    try:
        yield
    finally:
        os.environ.pop("JSPEC_KERNELS")
        if before is not None:
            os.environ["JSPEC_KERNELS"] = before
        jax.clear_caches()


def _time_layers(work: Work) -> dict[str, float]:
    configs, models = {}, {}
    for size in SIZES:
        full = shape_of(size, is_rehearsal=work.is_rehearsal)
        count = min(_LAYERS, full.num_layers)
        configs[size] = dataclasses.replace(full, num_layers=count, vocab_size=_VOCABULARY)
        models[size] = random_model(configs[size], f"{size}, {count} layers")
    loops: dict[tuple[str, str, int, int], TurnLoop] = {}
    jobs: dict[str, Callable[[], Any]] = {}
    for choice in NAMES[: 2 if work.is_rehearsal else None]:
        with kernels_by(choice):
            for size, (width, context) in ((s, c) for s in SIZES for c in _CALLS):
                key = choice, size, width, context
                loops[key] = loop = call_loop(models[size], width, context)
                # Traced here, where the choice holds; compiled by the threads.
                try:
                    jobs[" ".join(map(str, key))] = loop.trace()
                except Exception as error:  # of a candidate
                    work.record("failed", job=str(key), error=describe_error(error)[:300])
    ready = work.together(jobs)
    shares: dict[str, list[float]] = {}
    for (choice, size, width, context), loop in loops.items():
        if f"{choice} {size} {width} {context}" not in ready:
            continue
        work.check_time()
        seconds = seconds_each(loop) / configs[size].num_layers
        share = _layer_bytes(configs[size], context) / seconds / bandwidth(work)
        work.record(
            "layer", model=size, choice=choice, tokens=width, context=context,
            microseconds=1e6 * seconds, share_of_bandwidth=share,
        )  # fmt: skip
        if (width, context) == _CALLS[0]:
            shares.setdefault(choice, []).append(share)
    return {choice: statistics.fmean(sizes) for choice, sizes in shares.items()}


def _layer_bytes(config: DecoderConfig, context: int) -> float:
    heads = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    weights = config.embed_dim * (heads + 3 * config.hidden_dim)
    return 2 * (weights + 2 * context * config.head_dim * config.num_kv_heads)


def product_shapes(config: DecoderConfig) -> dict[str, tuple[int, int, str]]:
    """Returns outputs, inputs and what comes with the product, of each of a layer's, and the head.

    A norm goes before it, a gate or a residual comes after it.
    """
    size, wide = config.embed_dim, config.hidden_dim
    heads = config.head_dim * config.num_heads
    return {
        "gate, up": (2 * wide, size, "norm silu"),
        "down": (size, wide, "residual"),
        "q, k, v": (heads + 2 * config.head_dim * config.num_kv_heads, size, "norm"),
        "output": (size, heads, "residual"),
        "head": (config.vocab_size, size, ""),
    }


def _time_products(work: Work) -> None:
    options = known(GRAPH | SERIALISED)  # a graph may run at once what does not hang together
    for size in SIZES:
        config = shape_of(size, is_rehearsal=work.is_rehearsal)
        programs, operands = {}, {}
        for name, (outputs, inputs, parts) in product_shapes(config).items():
            drawn = _draw(outputs, inputs, parts, max(_ROWS))
            for rows in _ROWS:
                all_rows, norm, residual, weights = drawn
                residual = None if residual is None else residual[:rows]
                operands[name, rows] = all_rows[:rows], norm, residual, weights
                for by, product in candidates().items():
                    if product is multiply_by_xla and rows % _TILE == 0:
                        continue
                    activation = "silu" if "silu" in parts else None
                    chain = functools.partial(_chain, product, activation)
                    run = jax.jit(chain, compiler_options=options)
                    try:
                        programs[name, rows, by] = run.lower(*operands[name, rows])
                    except Exception as error:  # of a candidate
                        work.record("failed", job=f"{by}: {name}", error=describe_error(error))
        jobs = {str(key): lowered.compile for key, lowered in programs.items()}
        compiled = work.together(jobs)
        for name, rows in operands:
            keys = {by: str((name, rows, by)) for by in candidates()}
            by_candidate = {by: compiled[key] for by, key in keys.items() if key in compiled}
            _time_candidates(work, f"{size} {name}", rows, by_candidate, operands[name, rows])


def _draw(outputs: int, inputs: int, parts: str, rows: int) -> tuple[Any, ...]:
    count = max(1, min(_MOST_WEIGHTS, round(_COLD_BYTES / (2 * outputs * inputs))))
    keys = jax.random.split(jax.random.key(0), 4)
    norm = 1 + jax.random.normal(keys[1], (inputs,), jnp.bfloat16) / 8 if "norm" in parts else None
    residual = jax.random.normal(keys[2], (rows, outputs)) if "residual" in parts else None
    shape = count, outputs, inputs
    weights = jax.random.normal(keys[3], shape, jnp.bfloat16) / inputs**0.5
    return jax.random.normal(keys[0], (rows, inputs)), norm, residual, list(weights)


def _chain(
    product: Product, activation: str | None, rows: Any, norm: Any, residual: Any, weights: Any
) -> list[Any]:
    fused = Fused(norm, _EPSILON, activation=activation, residual=residual)
    return [product(rows, kernel, fused) for kernel in weights]


def _time_candidates(
    work: Work, name: str, rows: int, programs: dict[str, Any], operands: tuple[Any, ...]
) -> None:
    weights = operands[-1]
    reference: np.ndarray | None = None
    for by, program in programs.items():
        work.check_time()
        result = np.asarray(program(*operands)[-1], np.float32)
        if by == XLA:
            reference = result
        distance = None
        if reference is not None:
            distance = float(np.abs(result - reference).max() / np.abs(reference).max())
        turns = functools.partial(_run_turns, program, operands)
        seconds = min(timed(turns)[0] for _ in range(_REPEATS)) / _TURNS / len(weights)
        rate = weights[0].nbytes / seconds
        work.record(
            "product", product=name, rows=rows, by=by, microseconds=1e6 * seconds,
            share_of_bandwidth=rate / bandwidth(work), distance=distance,
            is_right=distance is None or distance <= _FARTHEST,
        )  # fmt: skip


def _run_turns(program: Any, operands: tuple[Any, ...]) -> Any:
    return [program(*operands) for _ in range(_TURNS)][-1]


def _record_verdicts(work: Work) -> None:
    path = cache_dir() / "kernels.json"
    if path.is_file():
        work.record("verdicts", verdicts=json.loads(path.read_text()))
