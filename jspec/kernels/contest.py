"""Candidates compete: what computes a decoder block or a packed product is chosen by a trial.

XLA is the reference and the first candidate. On first use of a shape on a device each other one
must be right, and then at least 3 % faster, or XLA stays:

- Right: at widths 1, 5 and 16 of the same tokens, several times, bit for bit the same, in memory
  that held NaN. Its distance from a precise computation is at most twice that of XLA. A packed
  product's is the host's, in float64. A block's is XLA's own block in float32: the decoder would
  have to be written a second time for float64, and what float32 rounds is a thousandth of what
  bfloat16 does. A candidate that promises a token the same result at every width must keep that.
- Fast: the same block many times in one program, as rounds run it, with weights that no cache
  holds; candidates take turns, and their medians are compared.

Verdicts are kept in the user's cache. `JSPEC_KERNELS=NAME` in the environment overrides them.
"""

import concurrent.futures
import dataclasses
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jspec.common.errors import describe_error, say
from jspec.common.memory import available_bytes, tree_bytes
from jspec.kernels.backend import run_options
from jspec.kernels.trial import WIDTHS, Draw, Operands, Run, poison_memory, poisoned
from jspec.kernels.verdicts import Verdict

# A candidate rounds where XLA does, and adds in another order. So it has XLA's error but for
# chance, which moves the largest of some dozen vectors by less than half. A slot too many or too
# few, or a scale that is off by 2 %, is several times that.
_MOST_ERRORS = 2.0
_ROUNDING = 1e-5  # is allowed besides: of a float32 model XLA's own error may be none
_RUNS = 3  # the second one makes a graph, and the third may change it
Seconds = dict[str, dict[str, float]]  # of one block, by candidate and width

_TIMED = WIDTHS[:2]
_LEAST_GAIN = 0.03  # medians of a few runs differ by 1 or 2 %
_COLD_BYTES = 256 << 20  # more than a GPU's caches hold; small blocks stay in them
_MOST_BLOCKS = 32  # of a program
_TURNS = 16  # over all blocks, in a run
_WARM_UP = 3  # runs: XLA makes a graph in the second, and may change it in the third
_REPEATS = 7
_COMPILERS = concurrent.futures.ThreadPoolExecutor(os.cpu_count())


class Candidate(NamedTuple):
    """What computes an operation.

    Attributes:
      name: for a person, and for `JSPEC_KERNELS`.
      takes: whether it takes the operands as they are.
      run: computes it.
      has_equal_widths: whether a token's result is the same, bit for bit, however many tokens are
        beside it: then a verify call gives what decoding steps give.
    """

    name: str
    takes: Callable[..., bool]
    run: Callable[..., Any]
    has_equal_widths: bool = False


@dataclasses.dataclass(frozen=True)
class Contest:
    """A reference, and those who would compute the same.

    Attributes:
      what: what is computed, as a user reads it.
      candidates: what computes it, on `Operands`; the reference is the first.
      draw: draws operands of the widest call.
      precise: computes precise results on the host; None: the reference does, in float32.
    """

    what: str
    candidates: Sequence[Candidate]
    draw: Draw
    precise: Callable[[Operands], tuple[Any, Any]] | None = None

    def hold(self) -> Verdict:
        """Returns the choice, the seconds of those that were timed, and why others were not."""
        say(f"jspec: trying the kernels for {self.what} on this device, once")
        reference, *others = self.candidates
        programs = [_Program(candidate.run) for candidate in self.candidates]
        checks, faults = self._checks(programs), dict[str, str]()
        verdict = {"what": self.what, "choice": reference.name, "seconds": {}, "faults": faults}
        for candidate, program in zip(others, programs[1:], strict=True):
            if not (fault := _fault(candidate, program, checks)):
                continue
            faults[candidate.name] = fault
            self._tell_of(candidate.name, fault)
            # An illegal address ends all use of a GPU: what is tried after it is not to blame.
            if problem := _fault(reference, programs[0], checks[:1]):
                return verdict | {"is_lost": problem}
        entrants = {c.name: (c.run, self.draw) for c in self.candidates if c.name not in faults}
        if len(entrants) > 1:
            try:
                seconds, failures = race(entrants)
            except DeviceLost as lost:
                seconds, failures = {}, lost.faults
                verdict["is_lost"] = str(lost)
            for name, fault in failures.items():
                self._tell_of(name, fault)
            faults |= failures
            if seconds:
                verdict |= {"choice": fastest(seconds), "seconds": seconds}
        return verdict

    def _tell_of(self, name: str, fault: str) -> None:
        say(f"jspec: the kernel {name!r} is not used for {self.what}: {fault}")

    def _checks(self, programs: Sequence["_Program"]) -> list["Check"]:
        """Returns calls of every width on the same tokens, with what their results should be.

        All programs are compiled for them; the reference's is the first.
        """
        draw, run = jax.jit(self.draw), programs[0]
        widest = [draw(jnp.int32(seed)) for seed in range(2)]
        calls = [(program, widest[0].first(width)) for program in programs for width in WIDTHS]
        exact = [] if self.precise else [call.precise() for call in widest]
        calls += [(run, call.first(width)) for call in exact[:1] for width in WIDTHS]
        for program, call in calls:
            program.compile(call)
        on_host = [self.precise(call) for call in widest] if self.precise else []
        checks = []
        for width, seed in itertools.product(WIDTHS, range(len(widest))):
            call = widest[seed].first(width)
            if self.precise:
                outputs, state = on_host[seed]
                precise = outputs[:, :width], state
            else:
                precise = run(exact[seed].first(width))
            bounds = _MOST_ERRORS * _errors(call, run(call), precise) + _ROUNDING
            checks.append(Check(seed, call, precise, bounds))
        return checks


class DeviceLost(Exception):
    """The reference fails after another kernel did. It has the kernels' faults by name."""

    def __init__(self, problem: str, faults: dict[str, str]) -> None:
        super().__init__(problem)
        self.faults = faults


class Check(NamedTuple):
    """A call that candidates are tried on: its seed, operands, precise results, allowed errors."""

    seed: int
    call: Operands
    precise: tuple[Any, Any]
    bounds: Array


def _fault(candidate: Candidate, program: "_Program", checks: Sequence[Check]) -> str:
    """Returns why a candidate must not be used; nothing where it is right."""
    try:
        narrower: dict[int, Any] = {}  # results by seed
        for seed, call, precise, bounds in checks:
            width = call.stream.shape[1]
            first, *others = (program(call) for _ in range(_RUNS))
            errors = _errors(call, first, precise)
            if not (errors <= bounds).all():  # nor are they NaN
                pairs = zip(errors.tolist(), bounds.tolist(), strict=True)
                sizes = ", ".join(f"{error:.2g} where {bound:.2g} is" for error, bound in pairs)
                return f"at width {width} it is wrong, by {sizes} allowed"
            if not all(_are_equal(first, result) for result in others):
                return f"at width {width} its runs differ"
            before = narrower.get(seed, first[0])
            is_equal = np.array_equal(first[0][:, : before.shape[1]], before)
            if candidate.has_equal_widths and not is_equal:
                return f"at width {width} a token's result is another than at a smaller width"
            narrower[seed] = first[0]
    except Exception as error:  # of a compiler, a library, the device
        return describe_error(error)[:200]
    return ""


def _are_equal(results: Any, expected: Any) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, results, expected))


def _compile(lower: Callable[[], Any]) -> Future[Any]:
    """Traces a program at once and compiles it in a thread; what either raises is the future's.

    On a GPU nearly all of a contest's time goes into compiling.
    """
    try:
        return _COMPILERS.submit(lower().compile)
    except Exception as error:  # of a candidate
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


class _Program:
    """A candidate, whose results come to lie in memory that held NaN.

    It is called with operands as it has been compiled for; see `compile`.
    """

    def __init__(self, run: Run) -> None:
        """Nothing is traced yet."""
        self._run = run
        self._programs: dict[Any, Future[Any]] = {}  # by the operands' kinds
        self._shapes: dict[Any, jax.ShapeDtypeStruct] = {}  # of the results

    def compile(self, operands: Operands) -> None:
        """Begins to compile the program for operands of these shapes."""

        def on_donated(poison: Array, state: Any, operands: Operands) -> Any:
            return self._run(operands._replace(state=state))

        def trace() -> Any:
            shape = self._shapes[_kind(operands)] = jax.eval_shape(self._run, operands)[0]
            program = jax.jit(
                on_donated, donate_argnums=(0, 1), keep_unused=True, compiler_options=run_options()
            )
            return program.lower(shape, operands.state, operands._replace(state=()))

        self._programs[_kind(operands)] = _compile(trace)

    def __call__(self, operands: Operands) -> Any:
        kind = _kind(operands)
        # What could not be traced has no shape, and says why when it is called.
        poison = poisoned(self._shapes[kind]) if kind in self._shapes else None
        state = jax.tree.map(jnp.copy, operands.state)
        poison_memory()
        program = self._programs[kind].result()
        results = program(poison, state, operands._replace(state=()))
        return jax.block_until_ready(results)


def _kind(operands: Operands) -> Any:
    leaves, structure = jax.tree.flatten(operands)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


@jax.jit
def _errors(operands: Operands, results: Any, precise: Any) -> Float32[Array, "parts"]:
    """Returns the largest relative distances of changes, keys and values."""
    (outputs, state), (expected, expected_state) = results, precise
    pairs = [(outputs, expected)]
    if operands.state != ():  # a block's
        pairs = [(outputs - operands.stream, expected - operands.stream)]
        pairs += zip(
            state.keys + state.values, expected_state.keys + expected_state.values, strict=True
        )
    return jnp.stack([_largest_distance(*pair) for pair in pairs])


def _largest_distance(vectors: Array, expected: Array) -> Float32[Array, ""]:
    vectors, expected = vectors.astype(jnp.float32), expected.astype(jnp.float32)
    sizes = jnp.maximum(jnp.linalg.norm(expected, axis=-1), 1e-6)
    return jnp.max(jnp.linalg.norm(vectors - expected, axis=-1) / sizes)


def race(entrants: Mapping[str, tuple[Run, Draw]]) -> tuple[Seconds, dict[str, str]]:
    """Returns the seconds of each entrant's block by width, and why some have none.

    An entrant is what computes, and what draws its operands. The first one must not fail.

    Raises:
      DeviceLost: it does, after another one has failed.
    """
    draws = list(dict.fromkeys(draw for _, draw in entrants.values()))
    layers = {draw: _draw_layers(draw, len(draws)) for draw in draws}
    first, faults = next(iter(entrants)), {}
    seconds: Seconds = {name: {} for name in entrants}
    programs = {
        (name, width): _compile_layers(run, layers[draw], width)
        for width in _TIMED
        for name, (run, draw) in entrants.items()
    }
    concurrent.futures.wait(programs.values())  # or compilers would disturb what is timed
    for width in _TIMED:
        calls = {}
        for name in seconds:
            operands = layers[entrants[name][1]], np.int32(_TURNS)
            try:
                calls[name] = _warm_up(programs[name, width], operands)
            except Exception as error:  # of a compiler, a library, the device
                if name == first:
                    raise
                faults[name] = describe_error(error)[:200]
                try:
                    calls[first]()
                except Exception as second:
                    raise DeviceLost(describe_error(second)[:200], faults) from error
        seconds = {name: seconds[name] for name in calls}
        for name, median in medians(calls).items():
            num_blocks = len(layers[entrants[name][1]]) * _TURNS
            seconds[name][str(width)] = median / num_blocks
    return seconds, faults


def fastest(seconds: Seconds) -> str:
    """Returns the first entrant's name, or that of the fastest if it is 3 % faster.

    The widths' times are added. A round is made of narrow and of wider calls: neither may be bought
    with the other kernel.
    """
    totals = {name: sum(times.values()) for name, times in seconds.items()}
    first, best = next(iter(totals)), min(totals, key=lambda name: totals[name])
    return best if totals[best] <= (1 - _LEAST_GAIN) * totals[first] else first


def medians(
    calls: Mapping[str, Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Returns the median seconds of each call; they take turns, so that all meet the same load."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_REPEATS):
        for name, call in calls.items():
            begin = clock()
            call()
            times[name].append(clock() - begin)
    return {name: statistics.median(durations) for name, durations in times.items()}


def _draw_layers(draw: Draw, num_draws: int) -> list[Operands]:
    """Returns operands of as many blocks as fill the caches, or as half of the memory holds."""
    shapes = jax.eval_shape(draw, jnp.int32(0))
    count = min(_MOST_BLOCKS, math.ceil(_COLD_BYTES / max(1, tree_bytes(shapes.weights))))
    if (free := available_bytes()) is not None:
        count = min(count, free // (2 * num_draws * tree_bytes(shapes)))
    compiled = jax.jit(draw)
    return [compiled(jnp.int32(2 * number)) for number in range(max(1, count))]


def _compile_layers(run: Run, layers: Sequence[Operands], width: int) -> Future[Any]:
    """Returns a run over the layers, which is being compiled.

    The stream goes through all of them, turn after turn: nothing can be computed ahead.
    """

    def program(layers: Sequence[Operands], turns: Array) -> Array:
        calls = [layer.first(width) for layer in layers]

        def turn(carry: Any) -> Any:
            number, stream, states = carry
            changed = []
            for call, state in zip(calls, states, strict=True):
                # Else what depends on the fixed operands alone would be computed once for all.
                stream, fixed = jax.lax.optimization_barrier((stream, call.fixed))
                result, state = run(Operands(call.weights, stream, fixed, state))
                if result.shape != stream.shape:  # of a product
                    result = stream + 1e-30 * jnp.max(result, axis=-1, keepdims=True)
                stream = result
                changed.append(state)
            size = jnp.sqrt(jnp.mean(jnp.square(stream), axis=-1, keepdims=True))
            return number + 1, stream / (size + 1e-6), changed

        start = jnp.int32(0), calls[0].stream, [call.state for call in calls]
        return jax.lax.while_loop(lambda carry: carry[0] < turns, turn, start)[1]

    compiled = jax.jit(program, compiler_options=run_options())
    return _compile(lambda: compiled.lower(layers, np.int32(_TURNS)))


def _warm_up(program: Future[Any], operands: tuple[Any, ...]) -> Callable[[], object]:
    """Returns a call of a program, once it has run as it will."""

    def call() -> object:
        return program.result()(*operands).block_until_ready()

    for _ in range(_WARM_UP):
        call()
    return call
