"""One generation round by round, as Figure 1 of Leviathan et al. (arXiv 2211.17192) shows it.

A trace is plain values:

    {"target", "draft", "drafter", "num_draft_tokens", "acceptance", "settings",   what was run
     "prompt": text, "first": text of the token that reading the prompt gave,
     "rounds": [{"drafts": [texts], "num_accepted": n, "next": text or null,
                 "begin": s, "draft_seconds": s, "target_seconds": s,
                 "parents": [of a tree: the draft before a draft, or -1], "kept": [drafts]}],
     "finish_reason", "plain_seconds": [of each step of plain decoding], "environment"}

`next` is the target's own token: it replaces the first rejected draft, or follows the last one; it
is null in a round that an accepted draft ends. Times are seconds since the first round began.
"""

import html
import itertools
import operator
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jspec.common.errors import InputError
from jspec.common.figures import INK, Picture, add_legend, new_figure, to_picture

Kind = Literal["accepted", "rejected", "dropped", "next"]
MEANINGS: Mapping[Kind, str] = {
    "accepted": "a draft that the target accepted",
    "rejected": "a draft that it rejected",
    "dropped": "drafts after the rejected one, never looked at",
    "next": "the target's own token",
}
_ANSI = {"accepted": "32", "rejected": "31;9", "dropped": "90;9", "next": "1;34"}
_INDENT = "  "  # of a branch, for each draft of the path that it leaves
_BRANCHES = "lines without a number: a tree's other branches, indented by the drafts above them"
_SIGNS = {"accepted": "++", "rejected": "--", "dropped": "~~", "next": "[]"}
_MOST_ROUNDS = 16  # of a timeline
_LANES = ("drafter", "target", "plain decoding")
_FACES = ("#f2c891", "#c9d8ef", "#dcdcdc")
_LABELS = ("proposal, a box a draft", "call of the target, with the tokens that it gave",
           "step of plain decoding")  # fmt: skip
_VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
_CHARACTER, _LINE, _MARGIN = 8.4, 20, 16  # pixels: of a monospaced character of 14 px
_SECONDS_A_ROUND, _SVG_ROUNDS = 0.6, 24
_SVG_STYLE = """
text { font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #d8dee9;
       white-space: pre }
.accepted { fill: #8fd18a } .rejected { fill: #ff7b72; text-decoration: line-through }
.dropped { fill: #7d8590; text-decoration: line-through } .next { fill: #79b8ff }
.quiet { fill: #9aa4b2 }
g { opacity: 0; animation: appear 0.2s forwards }
@keyframes appear { to { opacity: 1 } }
@media (prefers-reduced-motion: reduce) { g { opacity: 1; animation: none } }
"""


class TracedToken(NamedTuple):
    """A token of a round: its kind, such as accepted or rejected, and its text."""

    kind: Kind
    text: str


def check_trace(trace: Any) -> dict[str, Any]:
    """Returns a trace; raises an `InputError` for anything else."""
    try:
        for a_round in trace["rounds"]:
            "".join([*a_round["drafts"], a_round["next"] or ""])  # all of them are texts
            float(a_round["begin"] + a_round["draft_seconds"] + a_round["target_seconds"])
            if not 0 <= a_round["num_accepted"] <= len(a_round["drafts"]):
                raise ValueError(a_round)
        "".join([trace["prompt"], trace["first"]])
        return trace
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"expected a trace, got something else ({error!r})") from None


def round_lines(a_round: Mapping[str, Any]) -> list[tuple[int, list[TracedToken]]]:
    """Returns a round's branches: where each leaves an earlier branch, and its tokens.

    The first has accepted and rejected drafts and the target's token; a chain has only that.
    """
    drafts = a_round["drafts"]
    parents = a_round.get("parents") or range(-1, len(drafts) - 1)
    kept = {-1, *(a_round.get("kept") or range(a_round["num_accepted"]))}
    lines, begins = list[tuple[int, list[TracedToken]]](), [(0, -1)]
    while begins:
        depth, node = begins.pop(0)
        lines.append((depth, []))
        while True:  # down the kept drafts, or the first ones
            if node >= 0:
                # Below a draft that was not kept nothing was looked at.
                lost: Kind = "rejected" if parents[node] in kept else "dropped"
                lines[-1][1].append(TracedToken("accepted" if node in kept else lost, drafts[node]))
                depth += 1
            below = [child for child, parent in enumerate(parents) if parent == node]
            if not below:
                break
            node, *others = sorted(below, key=lambda child: child not in kept)
            begins += [(depth, other) for other in others]
    if a_round["next"] is not None:
        lines[0][1].append(TracedToken("next", a_round["next"]))
    return lines


def round_tokens(a_round: Mapping[str, Any]) -> list[TracedToken]:
    """Returns a round's tokens, branch after branch."""
    return [token for _, line in round_lines(a_round) for token in line]


def answer_tokens(trace: Mapping[str, Any]) -> Iterator[TracedToken]:
    """Yields the tokens of the answer."""
    yield TracedToken("next", trace["first"])
    for one in trace["rounds"]:
        yield from (token for token in round_tokens(one) if token.kind in ("accepted", "next"))


def to_terminal(trace: Mapping[str, Any], *, has_colours: bool = True) -> str:
    """Returns the trace for a terminal, a line a round and a line each further branch of a tree.

    Without colours: +accepted|accepted+, -rejected-, ~dropped|dropped~ and [the target's own].
    """

    def show(tokens: Sequence[TracedToken]) -> str:
        if has_colours:
            return "".join(coloured(kind, visible(text)) for kind, text in tokens)
        shown = ""
        for kind, run in itertools.groupby(tokens, key=operator.attrgetter("kind")):
            left, right = _SIGNS[kind]
            shown += f"{left}{'|'.join(visible(token.text) for token in run)}{right}"
        return shown

    legend = ", ".join(show([TracedToken(*pair)]) for pair in MEANINGS.items())
    legend += ", | between two tokens" * (not has_colours)
    legend += f"\n{_BRANCHES}" * any(a_round.get("parents") for a_round in trace["rounds"])
    lines = [visible(describe(trace)), f"prompt: {visible(trace['prompt'])}", legend]
    lines.append(f"{'prompt':>7}  {show([TracedToken('next', trace['first'])])}")
    for number, a_round in enumerate(trace["rounds"], 1):
        (_, branch), *others = round_lines(a_round)
        lines.append(f"{number:>7}  {show(branch)}")
        lines += [f"{'':>9}{_INDENT * depth}{show(other)}" for depth, other in others]
    return "\n".join([*lines, summary(trace)])


def coloured(kind: Kind, text: str) -> str:
    """Returns a text in the colour of its token's kind, for a terminal."""
    return f"\033[{_ANSI[kind]}m{text}\033[0m"


def visible(text: str) -> str:
    """Returns a text on one line in which every character is seen and none is a command."""
    return "".join(
        _VISIBLE.get(character) or (character if character.isprintable() else "\ufffd")
        for character in text
    )


def describe(trace: Mapping[str, Any]) -> str:
    """Returns what was run, in a line."""
    draft = f" ({trace['draft']})" if trace.get("draft") else ""
    most = trace.get("num_draft_tokens")
    drafts = "as many drafts as pay" if most == "auto" else f"at most {most} drafts a round"
    return (
        f"Target {trace.get('target')}, drafter {trace.get('drafter')}{draft}, {drafts}, "
        f"rule {trace.get('acceptance')}, {_temperature(trace)}."
    )


def _temperature(trace: Mapping[str, Any]) -> str:
    return f"temperature {trace.get('settings', {}).get('temperature', 0.0):g}"


def summary(trace: Mapping[str, Any]) -> str:
    """Returns the counts, in a line."""
    rounds = trace["rounds"]
    num_tokens = sum(1 for _ in answer_tokens(trace)) - 1
    num_drafts = sum(len(a_round["drafts"]) for a_round in rounds)
    num_accepted = sum(a_round["num_accepted"] for a_round in rounds)
    return (
        f"{num_tokens} tokens from {len(rounds)} calls of the target; {num_accepted} of "
        f"{num_drafts} drafts accepted."
    )


def to_svg(trace: Mapping[str, Any]) -> str:
    """Returns the first rounds of a trace as an SVG that plays once, round after round.

    The animation is CSS inside the file: no script, no font and nothing else is loaded.
    """
    lines = [
        [("quiet", f"prompt  {visible(trace['prompt'])}")],
        [("quiet", "        "), ("next", visible(trace["first"]))],
    ]
    for number, a_round in enumerate(trace["rounds"][:_SVG_ROUNDS], 1):
        for place, (depth, branch) in enumerate(round_lines(a_round)):
            begin = f"{'' if place else number:>6}  {_INDENT * depth}"
            lines.append([("quiet", begin), *((kind, visible(text)) for kind, text in branch)])
    lines += [[], *([("quiet", line)] for line in textwrap.wrap(describe(trace), 88))]
    lines.append([("quiet", "green: accepted, red: rejected, grey: not looked at, blue: target's")])
    lines.append([("next", summary(trace))])
    longest = max(sum(len(text) for _, text in line) for line in lines)
    width, height = longest * _CHARACTER + 2 * _MARGIN, len(lines) * _LINE + 2 * _MARGIN
    body = "\n".join(_svg_line(index, line) for index, line in enumerate(lines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        f'aria-label="{html.escape(summary(trace))}">\n<style>{_SVG_STYLE}</style>\n'
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>\n{body}\n</svg>\n'
    )


def _svg_line(index: int, spans: Sequence[tuple[str, str]]) -> str:
    y = _MARGIN + (index + 0.75) * _LINE
    texts = "".join(
        f'<tspan class="{kind}">{html.escape(text)}</tspan>' for kind, text in spans if text
    )
    text = f'<text x="{_MARGIN}" y="{y:.0f}">{texts}</text>'
    return f'<g style="animation-delay: {index * _SECONDS_A_ROUND:.1f}s">{text}</g>'


def timeline(trace: Mapping[str, Any], name: str) -> Picture:
    """Returns when drafter and target worked, as Figure 5 of arXiv 2211.17192 shows it.

    The third lane is plain decoding, if it was timed. There must be a round; `name` is the files'.
    """
    rounds = trace["rounds"][:_MOST_ROUNDS]
    gave = [one["num_accepted"] + (one["next"] is not None) for one in rounds]
    boxes: list[tuple[int, float, float]] = []  # lane, begin and width in ms
    for a_round in rounds:
        begin, drafting = 1000 * a_round["begin"], 1000 * a_round["draft_seconds"]
        number = max(len(a_round["drafts"]), 1)
        width = drafting / number
        boxes += [(0, begin + i * width, width) for i in range(number)]
        boxes.append((1, begin + drafting, 1000 * a_round["target_seconds"]))
    plain = [1000 * seconds for seconds in (trace.get("plain_seconds") or ())[: sum(gave)]]
    boxes += [(2, sum(plain[:index]), width) for index, width in enumerate(plain)]
    lanes, made_on = (3 if plain else 2), trace.get("environment") or {}
    parts = (trace.get("target"), f"drafter {trace.get('drafter')}", _temperature(trace),
             made_on.get("processor"), made_on.get("date"))  # fmt: skip
    figure, (axes,) = new_figure(
        title=f"Drafter and target in the first {len(rounds)} rounds",
        subtitle=" · ".join(map(str, filter(None, parts))),
        height=1.4 + 0.45 * lanes,
    )
    for lane, begin, width in boxes:
        axes.barh(lane, width, left=begin, height=0.6, color=_FACES[lane], edgecolor=INK,
                  linewidth=0.5, label=_LABELS[lane])  # fmt: skip
    for (_, begin, width), count in zip((one for one in boxes if one[0] == 1), gave, strict=True):
        axes.text(begin + width / 2, 1, str(count), ha="center", va="center")
    axes.set_yticks(range(lanes), _LANES[:lanes])
    axes.set(xlim=(0, None), xlabel="ms", ylim=(lanes - 0.5, -0.5))
    axes.grid(visible=False)
    add_legend(figure)
    described = f"{len(rounds)} calls of the target gave {', '.join(map(str, gave))} tokens"
    caption = "Timed call by call, which takes a little longer than running whole rounds."
    return to_picture(figure, name, caption=caption, description=described)
