"""What a run looked like: its loss, and how far its drafts would have got."""

import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec.common.errors import InputError
from jspec.common.figures import Curves, draw
from jspec.training.metrics_log import read_metrics
from jspec.training.trainee import SCORE

_FIGURES = "figures"
_NAME = "training"
_CAPTION = (
    "Loss on the texts trained on, tokens a call of the target at temperature 0 and the share of "
    "drafts kept at temperature 1, among the tokens that it can propose, on held-out texts, by "
    "place in the chain."
)


def training_curves(records: Sequence[dict[str, Any]]) -> list[Curves]:
    """Returns the panels that the entries of a log are good for."""
    logged = [record for record in records if "loss" in record]
    looks = [record for record in records if "held_out" in record]
    panels: list[Curves] = []
    lines: dict[str, Sequence[float | None]]
    if logged:
        lines = {"loss": [record["loss"] for record in logged]}
        panels.append(Curves([one["step"] for one in logged], lines, "step", "loss"))
    if looks:
        steps = [one["step"] for one in looks]
        lines = {"tokens a call": [one["held_out"][SCORE] for one in looks]}
        panels.append(Curves(steps, lines, "step", "tokens a call, held-out texts"))
        chains = [np.atleast_1d(one["held_out"].get("acceptance", [])).tolist() for one in looks]
        lines = {f"draft {i + 1}": [chain[i] for chain in chains] for i in range(len(chains[0]))}
        if lines:
            panels.append(Curves(steps, lines, "step", "acceptance, held-out texts"))
    return panels


def write_figures(workdir: pathlib.Path) -> None:
    """Draws a run into WORKDIR/figures, as PNG and SVG; nothing without matplotlib or entries.

    Raises:
      InputError: the files cannot be written.
    """
    panels = training_curves(read_metrics(workdir))
    if not panels or importlib.util.find_spec("matplotlib") is None:
        return
    picture = draw(_NAME, panels, caption=_CAPTION, title=f"Training: {workdir.name}")
    path = workdir / _FIGURES / _NAME
    try:
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".svg").write_text(picture.svg, encoding="utf-8")
        path.with_suffix(".png").write_bytes(picture.png)
    except OSError as error:
        raise InputError(f"cannot write {path.parent}: {error.strerror}") from None
