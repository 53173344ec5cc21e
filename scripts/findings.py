"""Draws the figures of docs/findings.md from what experiments have left.

    python -m scripts.findings --folder=docs/pictures

The predictions are those of configs/paper_walltime.py (`benchmarks/paper_walltime`), the trees
those of configs/trees.py (`benchmarks/results`), the drafts' temperatures those of
configs/draft_temperature.py.
"""

import collections
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from jspec.cli import program as cli
from jspec.common.figures import Curves, Picture, Value, draw
from jspec.lab.reports.computed import alpha
from jspec.lab.reports.costs import predict_by_position, predict_iid
from jspec.lab.reports.scene import answers_by_prompt, make_scenes, parse_cells
from jspec.lab.reports.workdir import read_file, read_workdir

_WALLTIME = "benchmarks/paper_walltime"
_TREES = [
    f"benchmarks/results/2026-11-26-cpu-{name}-tree-counts.jsonl.gz" for name in ("smollm2", "pair")
]
_HEAT = "benchmarks/results/2026-11-27-cpu-draft-temperature"
_FOLDER = flags.DEFINE_string("folder", "docs/pictures", "Where the pictures are written.")


def main() -> None:
    """Writes the pictures as SVG, and prints their numbers."""
    for picture in (predicted(_WALLTIME), trees(_TREES), heat(_HEAT)):
        path = pathlib.Path(_FOLDER.value) / f"{picture.name}.svg"
        path.write_text(picture.svg, encoding="utf-8")
        print(path)


def predicted(folder: str) -> Picture:
    """Draws each method's measured speed-up beside what two theories say."""
    workdir, panels = read_workdir(pathlib.Path(folder)), []
    costs = {method: by_size[1] for method, by_size in workdir.costs.items() if 1 in by_size}
    for scene in make_scenes(workdir.config, parse_cells(workdir.done)):
        names = [name for name in scene.others if name in costs]
        lines: dict[str, list[Value]] = {
            "measured": [], "Theorem 3.8: one alpha, full proposals": [], "by position": []
        }  # fmt: skip
        for name in names:
            seen = [a for group in answers_by_prompt(scene.numbers[name].cells) for a in group]
            figures = (scene.numbers[name].speedup, predict_iid(seen, costs[name])[0],
                       predict_by_position(seen, costs[name]))  # fmt: skip
            for values, figure in zip(lines.values(), figures, strict=True):
                values.append(figure)
            print(scene.name, name, *map(_shown, figures))
        panels.append(Curves(names, lines, "", "speed-up", title=scene.name))
    return draw("predicted", panels, caption="", title="Predicted and measured speed-up",
                subtitle="SmolLM2-135M, two CPU cores", share_y=True)  # fmt: skip


def trees(paths: Sequence[str]) -> Picture:
    """Draws tokens per call of chains and trees, by their number of drafts, at temperature 0."""
    panels = []
    titles = "SmolLM2 and its head (alpha 0.38)", "Qwen2.5-Coder 1.5B and 0.5B (alpha 0.80)"
    for path, title, drafter in zip(paths, titles, ("eagle", "model"), strict=True):
        counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
        for line in read_file(pathlib.Path(path)).splitlines():
            cell = json.loads(line)
            if cell.get("status") == "done" and cell["key"]["setting"] == "T=0":
                for answer in cell["record"].get("answers", [cell["record"]]):
                    total = counts[cell["key"]["method"]]
                    total[0] += answer["num_round_tokens"]
                    total[1] += len(answer["rounds"])
        numbers = 2, 3, 4, 6, 8, 12
        lines = {
            kind: [_per_call(counts, f"{name}:{number}") for number in numbers]
            for kind, name in (("chain", drafter), ("tree", f"{drafter}, tree"))
        }
        print(title, {kind: list(map(_shown, values)) for kind, values in lines.items()})
        panels.append(Curves(numbers, lines, "drafts a call", "tokens a call", title=title))
    return draw("chains-and-trees", panels, caption="", title="Chains and trees, temperature 0",
                share_y=True)  # fmt: skip


def _per_call(counts: Mapping[str, Sequence[int]], method: str) -> float | None:
    tokens, calls = counts.get(method, (0, 0))
    return tokens / calls if calls else None


def heat(folder: str) -> Picture:
    """Draws alpha by the draft's own temperature, a line for each target temperature."""
    workdir = read_workdir(pathlib.Path(folder))
    cells: dict[tuple[str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for cell in workdir.done:
        cells[cell["key"]["method"], cell["key"]["setting"]].append(cell)
    settings = workdir.config["settings"]
    for (method, label), group in cells.items():
        print(method, label, _shown(alpha(group)))
    by_pair = {
        (fields["temperature"], fields["draft_temperature"]): label
        for label, fields in settings.items()
        if fields.get("draft_temperature") is not None
    }
    x = sorted({own for _, own in by_pair})
    panels = [
        Curves(
            x,
            {
                f"target at T={temperature:g}": [
                    alpha(cells[method, by_pair[temperature, own]]) for own in x
                ]
                for temperature in sorted({target for target, _ in by_pair})
            },
            "the draft's own temperature", "alpha", title=method,
        )
        for method in workdir.config["methods"]
    ]  # fmt: skip
    return draw("draft-temperature", panels, caption="", share_y=True,
                title="Acceptance by the draft's own temperature",
                subtitle="SmolLM2-135M; bars: 95 % bootstrap interval over prompts")  # fmt: skip


def _shown(figure: Any) -> str:
    if figure is None:
        return "-"
    return f"{figure[0] if isinstance(figure, tuple) else figure:.2f}"


if __name__ == "__main__":
    cli.run_main(main)
