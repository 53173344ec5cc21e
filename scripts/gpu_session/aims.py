"""The aims, each beside what was measured; "unknown" where nothing was."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from scripts.gpu_session.products import WITHOUT_CUDA_PRODUCTS
from scripts.gpu_session.session import Session, Work
from scripts.gpu_session.subjects import SIZES

UNKNOWN = "unknown"
_CORRECT = "race", "seeds", "audit"
# Verdicts of the step `seeds` by which the new loops are right.
_RIGHT = "settled", "not reproduced", "old loops unknown"


class Aim(NamedTuple):
    """What is aimed at.

    Attributes:
      title: what is measured.
      aim: as a text.
      measured: from a session's journal to texts, of all that was measured of it.
    """

    title: str
    aim: str
    measured: Callable[[Session], Sequence[str]]


def run(work: Work) -> str:
    """Prints the table of aims, and records it."""
    rows = aim_rows(work.session)
    for title, aim, measured in rows:
        work.record("aim", title=title, aim=aim, measured=measured)
    print("\n| | aim | measured |\n|---|---|---|", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
    known = sum(measured != UNKNOWN for *_, measured in rows)
    return f"{known} of {len(rows)} aims have a figure; what has none is unknown"


def aim_rows(session: Session) -> list[list[str]]:
    """Returns title, aim and what was measured, of each aim."""
    return [[goal.title, goal.aim, ", ".join(goal.measured(session)) or UNKNOWN] for goal in AIMS]


def _correctness(session: Session) -> list[str]:
    outcomes = {name: session.outcome(name) for name in _CORRECT}
    if None in outcomes.values():
        return []
    audits = session.figures("audit", "verdict")
    is_audited = bool(audits) and not audits[-1]["failed"] and not audits[-1]["missing"]
    verdict = session.verdict()
    if verdict in _RIGHT and is_audited:
        return [f"all pass ({verdict})"]
    return [f"rounds: {verdict}; audit: {'passes' if is_audited else 'does not pass'}"]


def _plain(session: Session, is_wanted: Callable[[str], bool]) -> list[str]:
    best: dict[str, dict[str, Any]] = {}
    for figure in session.figures("models", "rounds"):
        if figure["rows"] == 1 and is_wanted(figure["choice"]):
            size = figure["model"]
            if size not in best or figure["share_of_bandwidth"] > best[size]["share_of_bandwidth"]:
                best[size] = figure
    return [f"{size} {figure['share_of_bandwidth']:.0%} by {figure['choice']}"
            for size, figure in sorted(best.items())]  # fmt: skip


def _wide_calls(session: Session) -> list[str]:
    return [
        f"{figure['model']} on {figure['tokens']} {figure['times_first']:.3f} by {figure['choice']}"
        for figure in session.figures("models", "call")
        if figure["rows"] == 1 and figure["tokens"] > 1
    ]


def _drafts(session: Session, begin: str, rates: Sequence[float]) -> list[str]:
    return [
        f"{figure['drafter']} at {figure['rate']:g}: {figure['times_plain']:.2f} "
        f"({figure['times_plain_expected']:.2f} by its cost)"
        for figure in session.figures("drafts", "drafts")
        if figure["drafter"].startswith(begin) and figure["rate"] in rates
    ]


def _rows(session: Session) -> list[str]:
    texts = []
    for size in SIZES:
        lines = [
            figure for figure in session.figures("models", "rounds") if figure["model"] == size
        ]
        alone: dict[str, float] = {}  # by choice
        for figure in lines:
            if figure["rows"] == 1:
                speed = max(alone.get(figure["choice"], 0.0), figure["tokens_a_second"])
                alone[figure["choice"]] = speed
        for figure in lines:
            if figure["rows"] > 1 and (choice := figure["choice"]) in alone:
                ratio = figure["tokens_a_second"] / alone[choice]
                texts.append(f"{size}, {figure['rows']} rows {ratio:.1f} by {choice}")
    return texts


def _host(session: Session) -> list[str]:
    return [f"{figure['model']} {figure['share_of_decoding']:.1%}"
            for figure in session.figures("models", "host")]  # fmt: skip


def _torch(session: Session) -> list[str]:
    return [
        f"{figure['model']} {figure['jspec_times_torch']:.2f}"
        for figure in session.figures("torch", "torch")
        if figure["jspec_times_torch"] is not None
    ]


AIMS = (
    Aim("correctness, with one graph", "all pass", _correctness),
    Aim("plain, of the bandwidth that the machine reaches, XLA's products", "70 %",
        lambda session: _plain(session, lambda choice: choice in WITHOUT_CUDA_PRODUCTS)),
    Aim("the same, CUDA C++", "80 %",
        lambda session: _plain(session, lambda choice: choice not in WITHOUT_CUDA_PRODUCTS)),
    Aim("verify of 6 and of 16 tokens, of one", "1.05", _wide_calls),
    Aim("3B with a quantised 1B, 4 drafts, times plain, at 0.6, 0.75, 0.9", "1.2, 1.6, 2.2",
        lambda session: _drafts(session, "1B", (0.6, 0.75, 0.9))),
    Aim("EAGLE's shape at 0.75, times plain", "2.0",
        lambda session: _drafts(session, "EAGLE", (0.75,))),
    Aim("8 and 32 rows, tokens a second of one row's", "7, 22", _rows),
    Aim("the host, of decoding", "3 %", _host),
    Aim("plain, times a compiled torch step", "1.2", _torch),
)  # fmt: skip
