"""What rounds cost, measured once for a workdir: a resumed run then makes the same choices."""

import json
import pathlib
from collections.abc import Callable

from jspec.common.config_file import write_json
from jspec.common.workdir_errors import WorkdirError
from jspec.generation.costs import RoundCosts

COSTS = "costs.json"  # in the workdir


def recorded_costs(
    path: pathlib.Path, method: str, batch_size: int, measure: Callable[[], RoundCosts | None]
) -> RoundCosts | None:
    """Returns the costs that a workdir has of a way, or measures them and writes them down.

    Other processes must be held off meanwhile.

    Args:
      path: of the file: costs by way, and by batch size.
      method: its label.
      batch_size: rows that run together.
      measure: returns the costs; None where there is nothing to choose.

    Raises:
      WorkdirError: the file is damaged or cannot be written.
    """
    try:
        entries = json.loads(path.read_bytes()) if path.exists() else {}
        known = entries.get(method, {}).get(str(batch_size))
    except (OSError, ValueError, AttributeError) as error:
        raise WorkdirError(f"cannot read {path}: {error}") from None
    if known is not None:
        return RoundCosts.from_json(known)
    costs = measure()
    if costs is not None:
        own = entries.get(method, {}) | {str(batch_size): costs.to_json()}
        write_json(path, entries | {method: own})
    return costs
