"""How often what Medusa's heads find likeliest, second and so on is kept: a file beside the heads.

`medusa_rates.json` holds {"rates": [[rank 0, rank 1, ...] of head 0, ...]}: shares of the tokens of
calibration texts (arXiv 2401.10774, section 2.3.3). `scripts/medusa_rates.py` measures them.
"""

import contextlib
import pathlib
from collections.abc import Sequence

import numpy as np

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json, save_json

Rates = tuple[tuple[float, ...], ...]

FILE = "medusa_rates.json"
NUM_RANKS = 16  # the most that `tree_branches` may ask for
# Without a file: what rank 0 of a head is kept, less for each head, and what each rank is of that.
_FIRST, _NEXT_HEAD, _NEXT_RANK = 0.5, 0.7, 0.35


def read_rates(folder: pathlib.Path, num_heads: int) -> Rates:
    """Returns the rates of a folder's heads; assumed ones where it has none.

    Raises:
      InputError: the file holds something else, or rates of another number of heads.
    """
    path = folder / FILE
    if not path.exists():
        first = [_FIRST * _NEXT_HEAD**head for head in range(num_heads)]
        return tuple(tuple(one * _NEXT_RANK**rank for rank in range(NUM_RANKS)) for one in first)
    raw = read_json(path)
    rates: Rates = ()
    with contextlib.suppress(KeyError, TypeError, ValueError):  # which leaves no rates
        rates = tuple(tuple(map(float, of_head)) for of_head in raw["rates"])
    is_good = [of_head and min(of_head) >= 0 and sum(of_head) <= 1.001 for of_head in rates]
    # A later head may never have been right; without the first there is no tree.
    if len(rates) != num_heads or not all(is_good) or not any(next(iter(rates), ())):
        raise InputError(f"{path}: expected rates of {num_heads} heads, of 0 to 1 by rank")
    return rates


def save_rates(folder: pathlib.Path, rates: Sequence[Sequence[float]]) -> pathlib.Path:
    """Writes the rates beside the heads; returns the file.

    Raises:
      InputError: it cannot be written.
    """
    path = folder / FILE
    save_json(path, {"rates": np.round(np.asarray(rates, float), 5).tolist()})
    return path
