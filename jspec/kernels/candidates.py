"""Decoder blocks and packed products, each computed by the candidate that a contest has chosen."""

import contextlib
import contextvars
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jspec.common.errors import InputError, describe_error, say
from jspec.kernels import library
from jspec.kernels.backend import CUDA, LAYER, XLA, asked_kernels, backend, has_bfloat16, is_foreign
from jspec.kernels.contest import Candidate, Contest, fastest, race
from jspec.kernels.library import with_derivatives_of
from jspec.kernels.trial import (
    WIDTHS,
    Operands,
    block_operands,
    precise_product,
    product_operands,
)
from jspec.kernels.verdicts import choose, is_trial

# What computes blocks and the products in them, by config; not what trials compute.
_CHOICES: dict[Any, set[str]] = {}
# XLA's errors; a program that has run before raises them as a ValueError, "STATUS: text".
_FAILURES = jax.errors.JaxRuntimeError, ValueError
_HAS_FAILED = threading.Event()  # a kernel, while it ran
_CONFIG: contextvars.ContextVar[Any] = contextvars.ContextVar("config", default=None)


def block_candidates() -> Sequence[Candidate]:
    """Returns those of a decoder block on this kind of device besides XLA; a CPU has none."""
    if not _may_compete():
        return ()
    from jspec.kernels import cuda_block  # here, because other devices need not wait for it

    return cuda_block.CANDIDATES


def product_candidates() -> Sequence[Candidate]:
    """Returns those of a packed product; see `block_candidates`."""
    if not _may_compete():
        return ()
    # Here, because other devices need not wait for it.
    from jspec.kernels.cuda_block import multiply, takes_kernel

    def takes(rows: Array, kernel: Any) -> bool:
        # As many rows as are tried: more of them read the weights several times.
        is_known = rows.shape[0] <= WIDTHS[-1] and takes_kernel(kernel, rows.shape[1])
        return is_known and library.is_cuda_available()  # which builds the library

    return [Candidate(CUDA, takes, multiply, has_equal_widths=True)]


def compute_block(block: Callable[..., Any], config: Any, block_offset: int, *operands: Any) -> Any:
    """Returns what a decoder block of the model returns, computed by the chosen candidate.

    The operands are its parameters, `x`, `rope`, `visible` and `cache`, and for a layer whose
    attention reads something else than `x` that. A candidate has the signature
    `run(config, block_offset, *operands)`, and `takes(config, params, x, cache)` says whether it
    computes these; where the chosen one does not, as a prompt's chunk, the reference does.
    """
    params, x, _, _, cache, *_ = operands

    @functools.wraps(block)
    def reference(*operands: Any) -> Any:
        token = _CONFIG.set(config)  # the products in it are listed with the block's model
        try:
            return block(*operands)
        finally:
            _CONFIG.reset(token)

    everyone = () if _HAS_FAILED.is_set() else block_candidates()
    taking = [c for c in everyone if c.takes(config, params, x, cache)]
    if not taking:
        return reference(*operands)

    def run_by(candidate: Candidate, call: Operands) -> Any:
        if candidate.takes(config, call.weights, call.stream, call.state):
            return candidate.run(config, block_offset, *call.of_block())
        return reference(*call.of_block())

    shapes = _shapes(operands)
    layer = shapes[4].keys[0]
    kind = type(cache).__name__, (layer.dtype, layer.shape[1::2])
    key = "block", config, _describe(shapes[0]), x.shape[0], *kind
    draw = functools.partial(block_operands, shapes, block_offset)
    contest = Contest("a decoder block", _entrants(reference, taking, run_by), draw)
    chosen = _choose(contest, key, everyone, config)
    if chosen is None:
        return reference(*operands)
    run_block = functools.partial(chosen.run, config, block_offset)
    return with_derivatives_of(reference, run_block, *operands)


def compute_product(reference: Callable[..., Array], rows: Array, kernel: Any) -> Array:
    """Returns the product of rows with a packed kernel, computed by the chosen candidate.

    XLA decodes all of the kernel to memory for two rows or more.
    """
    everyone = () if _HAS_FAILED.is_set() else product_candidates()
    taking = [c for c in everyone if c.takes(rows, kernel)]
    if not taking:
        return reference(rows, kernel)

    def run_by(candidate: Candidate, call: Operands) -> Any:
        operands = call.stream[0], call.weights
        run = candidate.run if candidate.takes(*operands) else reference
        return run(*operands)[None], ()

    shapes = _shapes((rows, kernel))
    draw = functools.partial(product_operands, shapes)
    entrants = _entrants(reference, taking, run_by)
    contest = Contest("a packed product", entrants, draw, precise_product)
    key = "product", _describe(shapes[1]), rows.dtype.name
    chosen = _choose(contest, key, everyone, _CONFIG.get())
    if chosen is None:
        return reference(rows, kernel)
    return with_derivatives_of(reference, chosen.run, rows, kernel)


def _entrants(
    reference: Callable[..., Any],
    taking: Sequence[Candidate],
    run_by: Callable[[Candidate, Operands], Any],
) -> list[Candidate]:
    """Returns the reference and the candidates, as they compute a trial's operands."""
    first = Candidate(XLA, lambda *operands: False, reference)
    return [c._replace(run=functools.partial(run_by, c)) for c in (first, *taking)]


def _choose(
    contest: Contest, key: Any, everyone: Sequence[Candidate], config: Any
) -> Candidate | None:
    """Returns the candidate that the user or the contest chooses; None for the reference."""
    names = [XLA, *(candidate.name for candidate in everyone)]
    name = _asked_among(names) or choose(key, names, contest.hold)
    taking = {candidate.name for candidate in contest.candidates}
    chosen = next((c for c in everyone if c.name == name and name in taking), None)
    if not is_trial():
        _CHOICES.setdefault(config, set()).add(XLA if chosen is None else name)
    return chosen


def _asked_among(names: Sequence[str]) -> str | None:
    """Returns what `JSPEC_KERNELS` asks for; what computes whole layers has products, too."""
    asked = asked_kernels()
    is_layer = asked is not None and asked.startswith(LAYER)
    return CUDA if is_layer and asked not in names and CUDA in names else asked


def await_choices(trace: Callable[[], object]) -> None:
    """Has contests held for what `trace` traces, where candidates compete: else nothing is done."""
    if _may_compete():
        trace()


def choose_weights(
    reference: Callable[..., Any], config: Any, make_kinds: Callable[[], Mapping[str, Any]]
) -> str | None:
    """Returns the kind of weights by which a block is computed fastest; None where none is chosen.

    `make_kinds` gives the shapes of a block's operands with each kind of weights. They are other
    numbers, so only their times are compared: the first kind stays unless one is 3 % faster.
    """
    if not _has_choice():
        return None
    kinds = make_kinds()

    def run(call: Operands) -> Any:
        return compute_block(reference, config, 0, *call.of_block())

    def reach() -> dict[str, Any]:
        draws = {kind: functools.partial(block_operands, kinds[kind], 0) for kind in kinds}
        seconds, faults = race({kind: (run, draw) for kind, draw in draws.items()})
        return {"what": "weights", "choice": fastest(seconds), "seconds": seconds, "faults": faults}

    key = "weights", config, asked_kernels(), *(_describe(shapes[0]) for shapes in kinds.values())
    return choose(key, list(kinds), reach)


def chosen_kernels(config: Any) -> str:
    """Returns what has computed a model's blocks in this process, as an answer's settings say it.

    On a CPU there is no choice yet: "cpp" where there is a compiler.
    """
    if backend() == "cpu":
        return "cpp" if library.is_available() else XLA
    return "+".join(sorted(_CHOICES.get(config, {XLA})))


@contextlib.contextmanager
def explained_failures() -> Iterator[None]:
    """Within it, a program that fails while other kernels than XLA's run says what avoids them.

    From then on XLA computes everything in this process.

    Raises:
      InputError: it has failed, but not for want of memory.
    """
    try:
        yield
    except _FAILURES as error:
        if not (problem := _problem(error)):
            raise
        _leave_to_xla()
        raise InputError(
            f"{problem}: XLA computes what comes next; JSPEC_KERNELS={XLA} in the environment "
            "avoids them"
        ) from error


class Fallback:
    """Runs programs, and lets XLA compute one whose kernels fail when it runs first.

    A kernel that cannot run here at all, for want of shared memory say, fails then. Later runs,
    whose state would have to be copied each time, are `explained_failures`.
    """

    def __init__(self) -> None:
        self._has_run: set[Any] = set()

    def run(self, program: Callable[..., Any], params: Any, state: Any, *operands: Any) -> Any:
        """Returns program(params, state, *operands), which takes over the state's memory."""
        if not _may_compete() or jax.process_count() > 1:
            return program(params, state, *operands)
        leaves, structure = jax.tree.flatten((state, operands))
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = program, structure, shapes
        if key in self._has_run:
            return program(params, state, *operands)
        kept = jax.tree.map(np.array, state)  # the device may have no memory for a second one
        try:
            results = jax.block_until_ready(program(params, state, *operands))
        except _FAILURES as error:
            if not (problem := _problem(error)):
                raise
            _leave_to_xla()
            try:
                state = jax.tree.map(
                    lambda leaf, before: jax.device_put(leaf, getattr(before, "sharding", None)),
                    kept,
                    state,
                )
                results = jax.block_until_ready(program(params, state, *operands))
            except _FAILURES as second:  # as after an illegal address, which ends all use of a GPU
                if isinstance(second, InputError) or "RESOURCE_EXHAUSTED" in str(second):
                    raise
                raise InputError(
                    f"{problem}, and then XLA's did, too ({describe_error(second)[:200]}): start "
                    f"again with JSPEC_KERNELS={XLA} in the environment"
                ) from error
            say(f"jspec: {problem}: XLA computes everything from now on")
        self._has_run.add(key)
        return results


def _problem(error: Exception) -> str:
    """Returns what has failed, if it may have been another kernel than XLA's; otherwise nothing."""
    names = sorted(set().union(*_CHOICES.values()) - {XLA})
    status = re.match(r"([A-Z_]+): ", str(error))
    is_of_xla = isinstance(error, jax.errors.JaxRuntimeError) or status is not None
    if not names or isinstance(error, InputError) or not is_of_xla:
        return ""
    if "RESOURCE_EXHAUSTED" in str(error):
        return ""
    return f"a program with the kernels {', '.join(names)} failed ({describe_error(error)[:200]})"


def _leave_to_xla() -> None:
    """From now on XLA computes everything; what was compiled before is forgotten."""
    _HAS_FAILED.set()
    _CHOICES.clear()
    jax.clear_caches()


def _has_choice() -> bool:
    """Returns whether candidates compete on this kind of device."""
    return backend() == "gpu" and has_bfloat16()


def _may_compete() -> bool:
    """Returns whether another candidate than XLA may be chosen; if not, none is even built."""
    asked = asked_kernels()
    is_allowed = asked != XLA and not _HAS_FAILED.is_set()
    return _has_choice() and is_allowed and not (is_foreign() and asked is None)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _describe(shapes: Any) -> Any:
    """Returns the structure and the shapes of operands, whose representation is the same always."""
    leaves, structure = jax.tree.flatten(shapes)
    return str(structure), [(leaf.shape, leaf.dtype.name) for leaf in leaves]
