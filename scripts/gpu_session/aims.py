"""The aims, each beside what was measured; "unknown" where nothing was."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from scripts.gpu_session.products import XLA
from scripts.gpu_session.session import Session, Work
from scripts.gpu_session.subjects import SIZES

UNKNOWN = "unknown"
_CORRECT = "race", "seeds", "audit"
_RIGHT = "settled", "not reproduced"  # verdicts of the step `seeds`


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
    return [[one.title, one.aim, ", ".join(one.measured(session)) or UNKNOWN] for one in AIMS]


def _correctness(session: Session) -> list[str]:
    """Returns how the steps on correctness went; nothing until all of them were run."""
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
    for one in session.figures("models", "rounds"):
        if one["rows"] == 1 and is_wanted(one["choice"]):
            size = one["model"]
            if size not in best or one["share_of_bandwidth"] > best[size]["share_of_bandwidth"]:
                best[size] = one
    return [f"{size} {one['share_of_bandwidth']:.0%} by {one['choice']}"
            for size, one in sorted(best.items())]  # fmt: skip


def _wide_calls(session: Session) -> list[str]:
    return [
        f"{one['model']} on {one['tokens']} {one['times_first']:.3f} by {one['choice']}"
        for one in session.figures("models", "call")
        if one["rows"] == 1 and one["tokens"] > 1
    ]


def _drafts(session: Session, begin: str, rates: Sequence[float]) -> list[str]:
    return [
        f"{one['drafter']} at {one['rate']:g}: {one['times_plain']:.2f} "
        f"({one['times_plain_expected']:.2f} by its cost)"
        for one in session.figures("drafts", "drafts")
        if one["drafter"].startswith(begin) and one["rate"] in rates
    ]


def _rows(session: Session) -> list[str]:
    found = []
    for size in SIZES:
        lines = [one for one in session.figures("models", "rounds") if one["model"] == size]
        alone = [one["tokens_a_second"] for one in lines if one["rows"] == 1]
        for one in lines:
            if alone and one["rows"] > 1:
                ratio = one["tokens_a_second"] / max(alone)
                found.append(f"{size}, {one['rows']} rows {ratio:.1f}")
    return found


def _host(session: Session) -> list[str]:
    return [f"{one['model']} {one['share_of_decoding']:.1%}"
            for one in session.figures("models", "host")]  # fmt: skip


def _torch(session: Session) -> list[str]:
    return [
        f"{one['model']} {one['jspec_times_torch']:.2f}"
        for one in session.figures("torch", "torch")
        if one["jspec_times_torch"] is not None
    ]


AIMS = (
    Aim("correctness, with one graph", "all pass", _correctness),
    Aim("plain, of the bandwidth that the machine reaches, XLA's products", "70 %",
        lambda session: _plain(session, lambda choice: choice in (XLA, "attention"))),
    Aim("the same, CUDA C++", "80 %",
        lambda session: _plain(session, lambda choice: choice not in (XLA, "attention"))),
    Aim("verify of 6 and of 16 tokens, of one", "1.05", _wide_calls),
    Aim("3B with a quantised 1B, 4 drafts, times plain, at 0.6, 0.75, 0.9", "1.2, 1.6, 2.2",
        lambda session: _drafts(session, "1B", (0.6, 0.75, 0.9))),
    Aim("EAGLE's shape at 0.75, times plain", "2.0",
        lambda session: _drafts(session, "EAGLE", (0.75,))),
    Aim("8 and 32 rows, tokens a second of one row's", "7, 22", _rows),
    Aim("the host, of decoding", "3 %", _host),
    Aim("plain, times a compiled torch step", "1.2", _torch),
)  # fmt: skip
