"""Candidates compete: what computes a decoder block or a packed product is chosen by a trial.

XLA is the reference and the first candidate. On first use of a shape on a device each other one
must be right, and then at least 3 % faster, or XLA stays:

- Right: at widths 1, 5 and 16 of the same tokens, several times, bit for bit the same, in memory
  that held NaN. Its distance from a precise computation is at most twice XLA's own. A packed
  product's is the host's, in float64. A block's is XLA's own block in float32: the decoder would
  have to be written a second time for float64, and what float32 rounds is a thousandth of what
  bfloat16 does. A candidate that promises a token the same result at every width must keep that.
- Fast: the same block many times in one program, with weights that no cache holds; see `race`.

Verdicts are kept in the user's cache. `JSPEC_KERNELS=NAME` in the environment overrides them.
"""

import concurrent.futures
import contextvars
import dataclasses
import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jspec.common.errors import InputError, describe_error
from jspec.common.kept import note
from jspec.kernels.backend import is_foreign, run_options
from jspec.kernels.race import fastest, race
from jspec.kernels.trial import WIDTHS, Draw, Operands, Run, poison_memory, poisoned
from jspec.kernels.verdicts import Verdict, keep_verdict, kept_where, recall_verdict

XLA = "xla"
NAMES = (XLA, "attention", "cuda", "layer", "layer-pdl")  # of all candidates

# A candidate rounds where XLA does, and adds in another order. So it has XLA's error but for
# chance, which moves the largest of some dozen vectors by less than half. A slot too many or too
# few, or a scale that is off by 2 %, is several times that.
_MOST_ERRORS = 2.0
_ROUNDING = 1e-5  # is allowed besides: of a float32 model XLA's own error may be none
_RUNS = 3  # the second one makes a graph, and the third may change it
_VERDICTS: dict[str, Verdict] = {}
_LOCKS: dict[str, threading.Lock] = {}  # by a verdict's key, so that it is reached once
_IS_TRIAL = contextvars.ContextVar("is a trial", default=False)


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
        note(f"jspec: trying the kernels for {self.what} on this device, once")
        reference, *others = self.candidates
        checks = self._checks(reference)
        faults = {candidate.name: _fault(candidate, checks) for candidate in others}
        entrants = {c.name: (c.run, self.draw) for c in self.candidates if not faults.get(c.name)}
        seconds, failures = race(entrants) if len(entrants) > 1 else ({}, {})
        faults = {name: fault for name, fault in (faults | failures).items() if fault}
        for name, fault in faults.items():
            note(f"jspec: the kernel {name!r} is not used for {self.what}: {fault}")
        choice = fastest(seconds) if seconds else reference.name
        return {"what": self.what, "choice": choice, "seconds": seconds, "faults": faults}

    def _checks(self, reference: Candidate) -> list["Check"]:
        """Returns calls of every width on the same tokens, with what their results should be."""
        draw, run = jax.jit(self.draw), _program(reference.run)
        widest = [draw(jnp.int32(seed)) for seed in range(2)]
        on_host = [self.precise and self.precise(call) for call in widest]
        checks = []
        for width, seed in itertools.product(WIDTHS, range(len(widest))):
            call = widest[seed].first(width)
            if (exact := on_host[seed]) is not None:
                precise = exact[0][:, :width], exact[1]
            else:
                precise = run(call.precise())
            bounds = _MOST_ERRORS * _errors(call, run(call), precise) + _ROUNDING
            checks.append(Check(seed, call, precise, bounds))
        return checks


class Check(NamedTuple):
    """A call that candidates are tried on: its seed, operands, precise results, allowed errors."""

    seed: int
    call: Operands
    precise: tuple[Any, Any]
    bounds: Array


def choose(key: Any, names: Sequence[str], reach: Callable[[], Verdict]) -> str:
    """Returns which of several names a verdict chooses: reached before, kept, or reached now.

    For a device that is not here nothing can be tried, and of several processes each would decide
    by its own clock: there it is the first. The key's representation must say all that matters but
    the options of the program. A trial that ends the process is remembered, and not begun again.
    """
    if is_foreign() or jax.process_count() > 1:
        return names[0]
    return decide(key, names, reach)["choice"]


def decide(key: Any, names: Sequence[str], reach: Callable[[], Verdict]) -> Verdict:
    """Returns the verdict; see `choose`. In a process it is reached once: other threads wait."""
    digest = hashlib.sha256(repr((key, run_options())).encode()).hexdigest()[:32]
    with _LOCKS.setdefault(digest, threading.Lock()):
        if digest not in _VERDICTS:
            verdict = recall_verdict(digest, names)
            if verdict is None:
                verdict = _reach_and_keep(digest, reach, names[0])
            elif verdict.get("is_unfinished"):
                note(f"note: a trial ended its process: {names[0]} is taken; {kept_where()}")
            _VERDICTS[digest] = verdict
        return _VERDICTS[digest]


def is_trial() -> bool:
    """Returns whether what is being computed belongs to a trial, and to no answer."""
    return _IS_TRIAL.get()


def _reach_and_keep(digest: str, reach: Callable[[], Verdict], otherwise: str) -> Verdict:
    """Returns a verdict reached now, and keeps it, unless it has a problem."""
    if not keep_verdict(digest, {"choice": otherwise, "is_unfinished": True}):
        return _reach(reach, otherwise)
    try:
        verdict = _reach(reach, otherwise)
    except BaseException:  # Ctrl-C is no fault of a kernel
        keep_verdict(digest, None)
        raise
    keep_verdict(digest, None if "problem" in verdict else verdict)
    return verdict


def asked_kernels() -> str | None:
    """Returns the candidate that `JSPEC_KERNELS` names; None where a contest decides.

    Raises:
      InputError: there is no such candidate.
    """
    name = os.environ.get("JSPEC_KERNELS") or None
    if name is not None and name not in NAMES:
        raise InputError(f"expected JSPEC_KERNELS among {', '.join(NAMES)}; got {name!r}")
    return name


def _reach(reach: Callable[[], Verdict], otherwise: str) -> Verdict:
    """Reaches a verdict now, although the caller is being traced: a new thread traces nothing.

    Where that fails, for want of memory say, the verdict has the problem in it, and is not kept.
    """

    def reach_in_thread() -> Verdict:
        _IS_TRIAL.set(True)  # in the thread's own context
        return reach()

    try:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(reach_in_thread).result()
    except Exception as error:
        problem = describe_error(error)[:200]
        note(f"jspec: the trial failed ({problem}); {otherwise} is taken")
        return {"choice": otherwise, "problem": problem}


def _fault(candidate: Candidate, checks: Sequence[Check]) -> str:
    """Returns why a candidate must not be used; nothing where it is right."""
    try:
        program, narrower = _program(candidate.run), dict[int, Array]()
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
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    return all(np.array_equal(np.asarray(one), np.asarray(two)) for one, two in pairs)


def _program(run: Run) -> Callable[[Operands], tuple[Array, Any]]:
    """Returns a compiled candidate, whose results come to lie in memory that held NaN."""

    def on_donated(poison: Array, state: Any, operands: Operands) -> Any:
        return run(operands._replace(state=state))

    compiled = jax.jit(
        on_donated, donate_argnums=(0, 1), keep_unused=True, compiler_options=run_options()
    )

    def call(operands: Operands) -> Any:
        poison = poisoned(jax.eval_shape(run, operands)[0])
        state = jax.tree.map(jnp.copy, operands.state)
        poison_memory()
        return jax.block_until_ready(compiled(poison, state, operands._replace(state=())))

    return call


@jax.jit
def _errors(operands: Operands, results: Any, precise: Any) -> Float32[Array, "parts"]:
    """Returns the largest distance of a token's change, a key and a value, as a share of each."""
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
