"""Times methods of generating in turn."""

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from jspec.evaluation.benchmarking.peers import GenerateFn


class Timings(NamedTuple):
    """What one method of generating took.

    Attributes:
      seconds: [repeats, prompts], of whole answers.
      tokens: [repeats, prompts], of whole answers.
      round_tokens: [repeats, prompts]; see `peers.Generated`.
      calls: [repeats, prompts], of the target; see `peers.Generated`.
      token_ids: the answer to each prompt.
    """

    seconds: np.ndarray
    tokens: np.ndarray
    round_tokens: np.ndarray
    calls: np.ndarray
    token_ids: list[list[int]]

    def first(self, repeats: int) -> Self:
        """Returns the timings of the first repeats alone."""
        counts = (leaf[:repeats] for leaf in self[:-1])
        return self._make([*counts, self.token_ids])

    def to_json(self) -> dict[str, Any]:
        """Returns all but the answers as plain values."""
        return {
            "seconds": self.seconds.tolist(),
            "tokens": self.tokens.tolist(),
            "round_tokens": self.round_tokens.tolist(),
            "calls": self.calls.tolist(),
        }


def warm_up(
    methods: Mapping[str, GenerateFn], prompts: list[list[int]], max_new_tokens: int
) -> None:
    """Lets every way answer every prompt once, so that all is compiled."""
    for name, generate in methods.items():
        print(f"warming up {name}", file=sys.stderr, flush=True)
        for prompt in prompts:
            generate(prompt, max_new_tokens)


def measure(
    methods: Mapping[str, GenerateFn], prompts: list[list[int]], max_new_tokens: int, repeats: int
) -> Iterator[dict[str, Timings]]:
    """Times every way on every prompt, alternating; yields after each repeat all up to it."""
    shape = [repeats, len(prompts)]
    timings = {
        name: Timings(*(np.zeros(shape) for _ in range(4)), token_ids=[[] for _ in prompts])
        for name in methods
    }
    for repeat in range(repeats):
        print(f"repeat {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        for index, prompt in enumerate(prompts):
            for name, generate in methods.items():
                begin = time.perf_counter()
                generated = generate(prompt, max_new_tokens)
                seconds, own, place = time.perf_counter() - begin, timings[name], (repeat, index)
                own.seconds[place] = seconds
                own.tokens[place] = len(generated.token_ids)
                own.round_tokens[place] = generated.num_round_tokens
                own.calls[place] = generated.num_calls
                own.token_ids[index] = generated.token_ids
        yield {name: own.first(repeat + 1) for name, own in timings.items()}
