"""Compiles what a timed answer needs before it is timed."""

import itertools
from collections.abc import Sequence

from jspec.generation.batch import needed_switches
from jspec.generation.capacity import capacity_for
from jspec.generation.engine import NARROW_PROMPT
from jspec.generation.generator import Generator
from jspec.generation.request import Request

_VISITS = 2


class WarmUp:
    """Runs the beginning of a request once for every program that it needs."""

    def __init__(self) -> None:
        self._done: set[tuple] = set()

    def prepare(self, generator: Generator, requests: Sequence[Request]) -> None:
        """Runs requests for a few rounds, untimed, unless that has compiled nothing new.

        Args:
          generator: what answers; it is kept by the caller.
          requests: token ids, which are answered together.
        """
        longest = max(
            min(len(one.prompt) + one.settings.max_new_tokens, generator.max_seq_len)
            for one in requests
        )
        needed = (
            id(generator),
            len(requests),
            capacity_for(longest, generator.num_draft_tokens + 1),
            any(len(one.prompt) > NARROW_PROMPT for one in requests),
            needed_switches([one.settings for one in requests]),
        )
        if needed in self._done:
            return
        pieces = generator.run(requests)
        for _ in itertools.islice(pieces, (1 + _VISITS) * len(requests)):
            pass
        self._done.add(needed)
