"""What one round launches: its computations, walked as many times as they run."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from jspec.lab.accelerators.hlo import Instruction, Module
from jspec.lab.accelerators.traffic import (
    FREE,
    MOVES,
    collective_in,
    joined_bytes,
    launch_bytes,
    movement,
)

# Functions with a `lax.cond` on whether any row samples.
_SAMPLING = "sampling_probs", "gumbel_noise", "judge", "draw_next", "_draft_keys"


_OF_DEVICES = "collectives", "collective_bytes"


class Assumptions(NamedTuple):
    """What decides a round's loops and branches where only the device will know.

    The drafter has read everything, it makes all drafts, and all of them are verified.
    """

    num_drafts: int
    is_random: bool

    def trips(self, function: str, index: int, count: int) -> int:
        """Returns the trips of loop `index` of the `count` that a function has in one place."""
        is_last = index == count - 1
        return {
            "_catch_up": 0,
            "catch_up": 0,  # of a head
            # The first draft may have a loop of its own.
            "draw_chain": self.num_drafts - (count - 1) if is_last else 1,
            "draw_one": int(self.is_random),
            "in_narrowest": int(is_last),  # one loop a width, and the last is the widest
        }.get(function, 1)

    def branch(self, function: str) -> int | None:
        """Returns the branch of a conditional in a function, or None: it depends on other things.

        In the algorithm's own the second one samples.
        """
        return int(self.is_random) if function in _SAMPLING else None


@dataclasses.dataclass
class Round:
    """Counts of one round.

    Attributes:
      figures: the sums over all launches.
      waits: how often the host reads back a condition, where it drives the loops.
      kernels: launches by the line that made them.
      line_bytes: bytes that these launches move.
      loops: place and trips of each loop, and whether XLA knows the trips.
    """

    figures: dict[str, float]
    waits: float = 0.0
    kernels: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    line_bytes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    loops: list[tuple[str, int, bool]] = dataclasses.field(default_factory=list)

    def add(self, module: Module, name: str, assumed: Assumptions, times: float = 1.0) -> None:
        """Adds what a computation launches, run `times` times."""
        computation = module.computations[name]
        trips = _trips(module, name, assumed)
        for own in computation.values():
            if own.op == "while":
                num = trips[own.name]
                is_known = "known_trip_count" in own.attributes
                self.loops.append((module.place(own), num, is_known))
                self.waits += 0 if is_known else times * (num + 1)
                self.add(module, own.called("condition"), assumed, times * (num + 1))
                self.add(module, own.called("body"), assumed, times * num)
            elif own.op == "conditional":
                self.add(module, _branch(module, own, assumed), assumed, times)
            elif own.op in ("call", "async-start"):
                inner = own.called("to_apply") or own.called("calls")
                self.add(module, inner, assumed, times)
            elif own.op not in FREE:
                self._add_launch(module, own, launch_bytes(module, own, computation), times)

    def _add_launch(self, module: Module, own: Instruction, size: float, times: float) -> None:
        if times == 0:
            return
        line, joining = module.place(own), collective_in(module, own)
        self.kernels[line] += times  # type: ignore[assignment]
        self.line_bytes[line] += times * size  # type: ignore[assignment]
        found = {
            "launches_per_round": 1,
            "bytes_moved": size,
            movement(module, own) or "": 1,
            "collectives": joining is not None,
            "collective_bytes": 0.0 if joining is None else joined_bytes(joining),
            "sorts": own.op == "sort" or "Sort" in own.find(r'custom_call_target="([^"]*)"'),
        }
        for figure in self.figures:
            self.figures[figure] += times * found.get(figure, 0)


def count_round(module: Module, assumed: Assumptions | None) -> Round:
    """Returns the counts of one trip of a run's outer loop, or of a program without rounds."""
    names = "launches_per_round", "bytes_moved", *MOVES.values(), *_OF_DEVICES, "sorts"
    found = Round(dict.fromkeys(names, 0.0))
    if assumed is None:
        found.add(module, module.entry, Assumptions(0, False))
        return found
    entry = module.computations[module.entry].values()
    loop = next(_loops(module, module.entry))
    # Before the first round and after the last, as where the loop wants a cache laid out otherwise.
    found.figures["moves_around_rounds"] = sum(movement(module, own) is not None for own in entry)
    found.add(module, loop.called("body"), assumed)
    found.add(module, loop.called("condition"), assumed)
    found.waits += 1
    return found


def _loops(module: Module, name: str) -> Iterator[Instruction]:
    """Yields the outer loops of a computation: a new XLA has them in functions for a CPU."""
    for own in module.computations[name].values():
        if own.op == "while":
            yield own
        elif own.op == "call":
            yield from _loops(module, own.called("to_apply"))


def _branch(module: Module, own: Instruction, assumed: Assumptions) -> str:
    """Returns the computation that a conditional runs: if nothing is known, the most expensive."""

    def cost(name: str) -> float:
        one = Round({"bytes_moved": 0.0})
        one.add(module, name, assumed)
        return one.figures["bytes_moved"]

    index = assumed.branch(module.place(own).rpartition(" ")[2])
    names = own.branches()
    return max(names, key=cost) if index is None else names[index]


def _trips(module: Module, name: str, assumed: Assumptions) -> dict[str, int]:
    """Returns the trips of each loop of a computation, by its name."""
    trips, made = {}, collections.defaultdict[str, list[str]](list)
    for own in module.computations[name].values():
        if own.op == "while":
            trips[own.name] = int(own.find(r'"known_trip_count":\{"n":"(\d+)"') or -1)
            if trips[own.name] < 0:
                made[module.place(own).rpartition(" ")[2]].append(own.name)
    for function, loops in made.items():
        for index, loop in enumerate(loops):
            trips[loop] = assumed.trips(function, index, len(loops))
    return trips
