"""How fast each way is beside every other, and whether they say the same."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.evaluation.analysis.ratios import speed_ratio
from jspec.evaluation.benchmarking.timing import Timings


def summarise(timings: Mapping[str, Timings], *, base: str) -> dict[str, dict[str, Any]]:
    """Returns, for each way, its median tokens a second, ratios to every other, and agreement.

    Args:
      timings: what was measured.
      base: the way whose tokens the others are compared with.
    """
    report: dict[str, dict[str, Any]] = {}
    for name, own in timings.items():
        speed = own.tokens.sum(axis=1) / own.seconds.sum(axis=1)
        ratios = {
            other: speed_ratio(own.seconds, own.tokens, theirs.seconds, theirs.tokens)._asdict()
            for other, theirs in timings.items()
            if other != name
        }
        pairs = zip(own.token_ids, timings[base].token_ids, strict=True)
        agreeing = [ours == theirs for ours, theirs in pairs]
        report[name] = {
            "tokens_per_second": float(np.median(speed)),
            "same_answers": sum(agreeing),
            "num_prompts": len(agreeing),
            "ratio_to": ratios,
        }
    return report


def format_summary(report: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the summary as a table: a line a way, a column of ratios a way."""
    names = list(report)
    width = max(len(name) for name in names)
    lines = [" " * width + "  tokens/s  same  " + "".join(f"  / {name}" for name in names)]
    for name in names:
        row = report[name]
        line = f"{name:<{width}}  {row['tokens_per_second']:8.1f}  "
        line += f"{row['same_answers']:>2}/{row['num_prompts']:<2} "
        for other in names:
            ratio = row["ratio_to"].get(other)
            cell = "-" if ratio is None else "{median:.2f} [{low:.2f}, {high:.2f}]".format(**ratio)
            line += f"  {cell:>{len(other) + 2}}"
        lines.append(line)
    return "\n".join(lines)
