"""One generation round by round, as Figure 1 of Leviathan et al. (arXiv 2211.17192) shows it.

A trace is plain values:

    {"target", "draft", "drafter", "num_draft_tokens", "acceptance", "settings",   what was run
     "prompt": text, "first": text of the token that reading the prompt gave,
     "rounds": [{"drafts": [texts], "num_accepted": n, "next": text or null,
                 "begin": s, "draft_seconds": s, "target_seconds": s}],
     "finish_reason", "plain_seconds": [of each step of plain decoding], "environment"}

`next` is the target's own token: in the place of the first rejected draft, or after the last one;
null in a round whose end an accepted draft is. Times are seconds since the first round began.
"""

import html
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jspec.common.errors import InputError

Kind = Literal["accepted", "rejected", "dropped", "next"]
_ANSI = {
    "accepted": "\033[32m",
    "rejected": "\033[31;9m",
    "dropped": "\033[90;9m",
    "next": "\033[1;34m",
}
_TAGS = {
    "accepted": ("<i>", "</i>"),
    "rejected": ("<s>", "</s>"),
    "dropped": ('<s class="dropped">', "</s>"),
    "next": ("<b>", "</b>"),
}
_SIGNS = {"accepted": "++", "rejected": "--", "dropped": "~~", "next": "[]"}
_RESET = "\033[0m"
_MEANINGS: Mapping[Kind, str] = {
    "accepted": "a draft that the target kept",
    "rejected": "a draft that it rejected",
    "dropped": "drafts after that one, not looked at any more",
    "next": "the target's own token",
}


class TracedToken(NamedTuple):
    """A token of a round.

    Attributes:
      kind: what became of it.
      text: of the token.
    """

    kind: Kind
    text: str


def check_trace(trace: Any) -> dict[str, Any]:
    """Returns a trace.

    Raises:
      InputError: it is none.
    """
    try:
        for a_round in trace["rounds"]:
            texts = [*a_round["drafts"], a_round["next"] or ""]
            seconds = [a_round[name] for name in ("begin", "draft_seconds", "target_seconds")]
            is_right = 0 <= a_round["num_accepted"] <= len(a_round["drafts"])
            if not is_right or not all(isinstance(text, str) for text in texts):
                raise ValueError(a_round)
            sum(map(float, seconds))
        str.join("", [trace["prompt"], trace["first"]])
        return trace
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"expected a trace, got something else ({error!r})") from None


def round_tokens(a_round: Mapping[str, Any]) -> list[TracedToken]:
    """Returns a round's tokens: kept drafts, rejected ones, the target's own."""
    drafts, num_accepted = a_round["drafts"], a_round["num_accepted"]
    tokens = [TracedToken("accepted", text) for text in drafts[:num_accepted]]
    tokens += [TracedToken("rejected", text) for text in drafts[num_accepted : num_accepted + 1]]
    tokens += [TracedToken("dropped", text) for text in drafts[num_accepted + 1 :]]
    if a_round["next"] is not None:
        tokens.append(TracedToken("next", a_round["next"]))
    return tokens


def answer_tokens(trace: Mapping[str, Any]) -> Iterator[TracedToken]:
    """Yields the tokens that were said."""
    yield TracedToken("next", trace["first"])
    for a_round in trace["rounds"]:
        for token in round_tokens(a_round):
            if token.kind in ("accepted", "next"):
                yield token


def to_terminal(trace: Mapping[str, Any], *, has_colours: bool = True) -> str:
    """Returns the trace for a terminal, a line a round.

    Args:
      trace: the trace.
      has_colours: else +kept|kept+, -rejected-, ~dropped|dropped~ and [the target's own].
    """

    def show(tokens: Sequence[TracedToken]) -> str:
        runs = itertools.groupby(tokens, key=_kind_of)
        return "".join(
            _show_run(kind, [visible(t.text) for t in run], has_colours) for kind, run in runs
        )

    legend = ", ".join(show([TracedToken(kind, text)]) for kind, text in _MEANINGS.items())
    first = show([TracedToken("next", trace["first"])])
    lines = [f"{visible(describe(trace))}", f"prompt: {visible(trace['prompt'])}", legend]
    lines.append(f"{'prompt':>7}  {first}")
    lines += [
        f"{number:>7}  {show(round_tokens(a_round))}"
        for number, a_round in enumerate(trace["rounds"], 1)
    ]
    return "\n".join([*lines, summary(trace)])


def _kind_of(token: TracedToken) -> Kind:
    return token.kind


def _show_run(kind: Kind, texts: Sequence[str], has_colours: bool) -> str:
    """Returns tokens of one kind that follow each other."""
    if has_colours:
        return "".join(f"{_ANSI[kind]}{text}{_RESET}" for text in texts)
    left, right = _SIGNS[kind]
    return f"{left}{'|'.join(texts)}{right}"


def to_html(trace: Mapping[str, Any]) -> str:
    """Returns the trace as HTML: the answer, then a line a round; its classes are the page's."""
    legend = ", ".join(
        f"{_TAGS[kind][0]}{html.escape(text)}{_TAGS[kind][1]}" for kind, text in _MEANINGS.items()
    )
    answer = "".join(map(_tag, answer_tokens(trace)))
    rounds = "".join(
        f"<li>{''.join(map(_tag, round_tokens(a_round)))}</li>" for a_round in trace["rounds"]
    )
    return (
        f"<p>{html.escape(describe(trace))}</p>"
        f"<p><strong>Prompt:</strong> {html.escape(trace['prompt'])}</p>"
        f'<p class="trace">{legend}</p>'
        f'<p><strong>The answer:</strong></p><p class="trace">{answer}</p>'
        f"<p><strong>Round by round:</strong></p>"
        f'<ol class="trace">{rounds}</ol><p>{html.escape(summary(trace))}</p>'
    )


def _tag(token: TracedToken) -> str:
    opening, closing = _TAGS[token.kind]
    text = html.escape(visible(token.text))
    end = "\n" if "\n" in token.text and token.kind in ("accepted", "next") else ""
    return f"{opening}{text}{closing}{end}"


def visible(text: str) -> str:
    """Returns a text on one line, in which a reader sees every character and none is a command."""
    known = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
    return "".join(
        known.get(character) or (character if character.isprintable() else "\ufffd")
        for character in text
    )


def describe(trace: Mapping[str, Any]) -> str:
    """Returns what was run, in a line."""
    draft = f" ({trace['draft']})" if trace.get("draft") else ""
    return (
        f"Target {trace.get('target')}, drafter {trace.get('drafter')}{draft}, at most "
        f"{trace.get('num_draft_tokens')} drafts a round, rule {trace.get('acceptance')}, "
        f"temperature {trace.get('settings', {}).get('temperature', 0.0):g}."
    )


def drafting_share(trace: Mapping[str, Any]) -> float | None:
    """Returns the share of the rounds' time in which the drafter worked."""
    drafting = sum(a_round["draft_seconds"] for a_round in trace["rounds"])
    total = drafting + sum(a_round["target_seconds"] for a_round in trace["rounds"])
    return drafting / total if total else None


def summary(trace: Mapping[str, Any]) -> str:
    """Returns the counts, in a line."""
    rounds = trace["rounds"]
    num_tokens = sum(1 for _ in answer_tokens(trace)) - 1
    num_drafts = sum(len(a_round["drafts"]) for a_round in rounds)
    num_kept = sum(a_round["num_accepted"] for a_round in rounds)
    return (
        f"{num_tokens} tokens from {len(rounds)} calls of the target; {num_kept} of {num_drafts} "
        "drafts kept."
    )
