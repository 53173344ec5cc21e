"""A trace as an animated SVG: one round after the other appears, as in a terminal.

The animation is CSS inside the file: no script, no font and nothing else is loaded.
"""

import html
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.evaluation.analysis.trace import describe, round_tokens, summary, visible

_CHARACTER, _LINE, _MARGIN = 8.4, 20, 16  # pixels: of a monospaced character of 14 px
_SECONDS_A_ROUND = 0.6
_MAX_ROUNDS = 24
_STYLE = """
text { font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #d8dee9;
       white-space: pre }
.accepted { fill: #8fd18a } .rejected { fill: #ff7b72; text-decoration: line-through }
.dropped { fill: #7d8590; text-decoration: line-through } .next { fill: #79b8ff }
.quiet { fill: #9aa4b2 }
g { opacity: 0; animation: appear 0.2s forwards }
@keyframes appear { to { opacity: 1 } }
@media (prefers-reduced-motion: reduce) { g { opacity: 1; animation: none } }
"""


def to_svg(trace: Mapping[str, Any]) -> str:
    """Returns the first rounds of a trace (see `trace`) as an SVG that plays once."""
    lines = [
        [("quiet", f"prompt  {visible(trace['prompt'])}")],
        [("quiet", "        "), ("next", visible(trace["first"]))],
    ]
    for number, a_round in enumerate(trace["rounds"][:_MAX_ROUNDS], 1):
        spans = [(kind, visible(text)) for kind, text in round_tokens(a_round)]
        lines.append([("quiet", f"{number:>6}  "), *spans])
    lines.append([])
    lines += [[("quiet", line)] for line in textwrap.wrap(describe(trace), 88)]
    lines.append([("quiet", "green: accepted, red: rejected, grey: not looked at, blue: target's")])
    lines.append([("next", summary(trace))])
    longest = max(sum(len(text) for _, text in line) for line in lines)
    width, height = longest * _CHARACTER + 2 * _MARGIN, len(lines) * _LINE + 2 * _MARGIN
    body = "\n".join(_draw(index, line) for index, line in enumerate(lines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        f'aria-label="{html.escape(summary(trace))}">\n<style>{_STYLE}</style>\n'
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>\n{body}\n</svg>\n'
    )


def _draw(index: int, spans: Sequence[tuple[str, str]]) -> str:
    """Returns one line of the terminal, which appears after those above it."""
    y = _MARGIN + (index + 0.75) * _LINE
    texts = "".join(
        f'<tspan class="{kind}">{html.escape(text)}</tspan>' for kind, text in spans if text
    )
    delay = index * _SECONDS_A_ROUND
    text = f'<text x="{_MARGIN}" y="{y:.0f}">{texts}</text>'
    return f'<g style="animation-delay: {delay:.1f}s">{text}</g>'
