"""The metrics of a run by step: lines of JSON, and the figure drawn from them."""

import importlib.util
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from jspec.common.errors import InputError
from jspec.common.figures import Curves, draw
from jspec.common.journal import Journal, Record
from jspec.training.chain_loss import SCORE

METRICS = "metrics.jsonl"
_CAPTION = (
    "Loss on the texts trained on; tokens per target call at temperature 0 on held-out texts; "
    "and the probability at temperature 1 that each draft of a chain is accepted there, among the "
    "tokens that the drafter can propose."
)


def training_curves(records: Sequence[Record]) -> list[Curves]:
    """Returns the panels for which a log has entries: loss, score, acceptance of each draft."""
    logged = [record for record in records if "loss" in record]
    evaluated = [record for record in records if "held_out" in record]
    scores = [record["held_out"][SCORE] for record in evaluated]
    chains = [np.atleast_1d(record["held_out"].get("acceptance", [])) for record in evaluated]
    drafts = np.transpose(chains).tolist() if chains else []
    panels = [
        (logged, {"loss": [record["loss"] for record in logged]}, "loss"),
        (evaluated, {"tokens per call": scores}, "tokens per call, held-out texts"),
        (evaluated, {f"draft {i}": values for i, values in enumerate(drafts, 1)},
         "acceptance, held-out texts"),
    ]  # fmt: skip
    return [
        Curves([record["step"] for record in points], lines, "step", label)
        for points, lines, label in panels
        if points and lines
    ]


def write_figures(workdir: pathlib.Path) -> None:
    """Draws a run into WORKDIR/figures, as PNG and SVG; a note says so without matplotlib.

    Raises:
      InputError: the files cannot be written.
    """
    panels = training_curves(Journal(workdir / METRICS).read())
    if not panels:
        return
    if importlib.util.find_spec("matplotlib") is None:
        said = 'no figure is drawn without matplotlib: pip install "jspec[report]"'
        print(f"note: {said}", file=sys.stderr, flush=True)
        return
    picture = draw("training", panels, caption=_CAPTION, title=f"Training: {workdir.name}")
    folder = workdir / "figures"
    try:
        folder.mkdir(exist_ok=True)
        (folder / "training.svg").write_text(picture.svg, encoding="utf-8")
        (folder / "training.png").write_bytes(picture.png)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}") from None
