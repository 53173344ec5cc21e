"""The fields of a config that choose a chain and who guesses; see `measure`."""

import dataclasses

from jspec.common.errors import InputError, check_among, check_count
from jspec.speculation.functions import RULES

_NUM_PIXELS = 64  # of an image of "digits"

GUESSES = {
    "digits": ("small", "table"),
    "metropolis": ("quadratic", "coin"),
    "langevin": ("quadratic", "nothing"),
}


@dataclasses.dataclass(frozen=True)
class FunctionsSpec:
    """A chain, who guesses, and how much is measured.

    Attributes:
      chain: "digits", "metropolis" or "langevin".
      guess: f of the chain, a name of `GUESSES`.
      acceptance: the rule.
      num_drafts: numbers of guesses a round.
      num_steps: of a chain; an image has 64.
      num_chains: independent ones, one after another.
      num_updates: of training the networks of "digits".
    """

    chain: str = "digits"
    guess: str = "small"
    acceptance: str = "rejection"
    num_drafts: tuple[int, ...] = (1, 2, 4, 8)
    num_steps: int = 64
    num_chains: int = 32
    num_updates: int = 1500

    def __post_init__(self) -> None:
        check_among("chain", self.chain, GUESSES)
        check_among("guess", self.guess, GUESSES[self.chain])
        check_among("acceptance", self.acceptance, RULES)
        if not self.num_drafts:
            raise InputError("expected num_drafts to have some, got none")
        for number in self.num_drafts:
            check_count("num_drafts", number, 1, 4096)
        most = _NUM_PIXELS if self.chain == "digits" else 10**6
        check_count("num_steps", self.num_steps, 1, most)
        check_count("num_chains", self.num_chains, 1, 10**5)
        check_count("num_updates", self.num_updates, 1, 10**6)
