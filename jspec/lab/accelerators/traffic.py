"""What one launch moves: bytes of the device's memory, and whether moving is all that it does."""

import re

from jspec.lab.accelerators.hlo import (
    ON_CHIP,
    Computation,
    Instruction,
    Module,
    array_bytes,
    array_sizes,
)

_ALIASES = {"bitcast", "reshape"}  # other names of an array
# Nothing is launched: they name arrays, or are the end of what began elsewhere.
FREE = _ALIASES | {
    "parameter", "constant", "get-tuple-element", "tuple", "after-all", "opt-barrier", "copy-done",
    "fusion-done", "async-done", "slice-done", "all-reduce-done", "all-gather-done", "partition-id",
    "replica-id",
}  # fmt: skip
COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that holds what is written
_SLICES = {"dynamic-slice", "gather", "slice"}
# What carries numbers elsewhere and computes nothing, the most telling first.
MOVES = {"convert": "conversions", "transpose": "transposes", "pad": "pads", "copy": "copies"}
_LARGE = 1e6  # bytes: a weight, or one layer's keys of a short context


def launch_bytes(module: Module, own: Instruction, computation: Computation) -> float:
    """Returns the bytes that a launch reads and writes; of a slice, those of the slice."""
    if own.op.startswith("fusion"):
        return _fusion_bytes(module.computations[own.called("calls")])
    if own.op in _UPDATES:
        return 2 * array_bytes(computation[own.operands[_UPDATES[own.op]]].shape)
    if own.op in (*_SLICES, "broadcast", "iota"):
        return 2 * array_bytes(own.shape)
    if is_collective(own):
        return 2 * joined_bytes(own)
    if own.op.endswith("-start"):
        # Its shape names source and goal, one larger than the other if it takes a slice.
        part = sorted(array_sizes(own.shape, on_chip=1))[-2]
        return part if ON_CHIP in own.shape else 2 * part
    # The second result of a product of cuBLAS is scratch memory.
    result = own.shape.split("}")[0] if "__cublas" in own.attributes else own.shape
    operands = [computation[name].shape for name in own.operands if name in computation]
    # What a kernel of ours writes in place is a slot of a cache, not the whole result.
    places = re.findall(r"\{\d*\}: \((\d+), ", own.find(r"output_to_operand_aliasing=(.*)"))
    in_place = sum(array_bytes(operands[int(place)]) for place in places)
    return array_bytes(result) + sum(map(array_bytes, operands)) - in_place


def is_collective(own: Instruction) -> bool:
    """Returns whether an instruction joins what several devices hold."""
    return own.op.removesuffix("-start") in COLLECTIVES


def collective_in(module: Module, own: Instruction) -> Instruction | None:
    """Returns the instruction of a launch that joins what several devices hold, or None.

    XLA for GPUs may write it as a kernel of its own: a fusion around it.
    """
    is_fusion = own.op.startswith("fusion")
    inner = module.computations[own.called("calls")].values() if is_fusion else (own,)
    return next(filter(is_collective, inner), None)


def joined_bytes(own: Instruction) -> float:
    """Returns the bytes of what a collective gives each device."""
    sizes = array_sizes(own.shape, on_chip=1.0)  # which other chips do not share
    # The shape of a gather that only starts names its operand, too.
    return max(sizes) if own.op == "all-gather-start" else sum(sizes)


def _fusion_bytes(inner: Computation) -> float:
    def source(name: str) -> Instruction:
        return source(inner[name].operands[0]) if inner[name].op in _ALIASES else inner[name]

    root = next(own for own in inner.values() if own.is_root)
    total, in_place = 0.0, set[str]()
    for name in root.operands if root.op == "tuple" else (root.name,):
        result = source(name)
        if result.op in _UPDATES and (goal := source(result.operands[0])).op == "parameter":
            in_place.add(goal.name)
            result = inner[result.operands[_UPDATES[result.op]]]
        total += array_bytes(result.shape)
    real = [own for own in inner.values() if own.op not in _ALIASES]
    for own in inner.values():
        if own.op == "parameter":
            users = [u for u in real if own.name in {source(name).name for name in u.operands}]
            if own.name in in_place:
                users = [u for u in users if u.op not in _UPDATES]
            is_whole = any(u.op not in _SLICES for u in users)
            total += sum(array_bytes(one.shape) for one in ([own] if is_whole else users))
    return total


def movement(module: Module, own: Instruction) -> str | None:
    """Returns the figure, of `MOVES`, in which a launch counts that only moves a large array."""
    if own.op.endswith("-start") and ON_CHIP in own.shape:  # as it must come to a TPU's chip
        return None
    ops = {own.op.removesuffix("-start")}
    if own.op.startswith("fusion"):
        ops = {one.op for one in module.computations[own.called("calls")].values()} - FREE
    is_large = sum(array_sizes(own.shape, on_chip=1)) >= _LARGE
    # A slice beside them is the cut to or from a multiple of the tile.
    is_movement = is_large and ops <= {*MOVES, "slice"}
    return next((MOVES[op] for op in MOVES if op in ops and is_movement), None)
