"""The figures of one setting: speed, cost of a round, drafts kept."""

from jspec.common.figures import Curves, Picture
from jspec.evaluation.analysis.ratios import (
    PromptRounds,
    Ratio,
    acceptance_by_position,
    shares_by_accepted,
)
from jspec.evaluation.reports.origin import View
from jspec.evaluation.reports.scene import SHOWN, Scene

BARS = "Bars: 95 % bootstrap interval over prompts."
TIMED_BARS = "Bars: 95 % bootstrap interval over prompts and repeats."
_FEWEST_ROUNDS = 10  # of a position
_FEWEST = 5  # of a category


def scene_figures(scene: Scene, view: View) -> list[Picture]:
    """Returns the figures that a scene has enough data for."""
    has_numbers = any(len(own) > 1 for own in scene.families.values())
    pictures = [_by_number(scene, view)] if has_numbers else []
    base = scene.baseline
    names = [name for name, own in scene.by_category.items() if own[base].compared[1] >= _FEWEST]
    lines = {m: [scene.by_category[name][m].speedup for name in names] for m in scene.shown}
    if names:
        panel = Curves(names, lines, "", "speed-up", reference=scene.baseline_name)
        caption = f"{TIMED_BARS} {SHOWN}"
        pictures.append(view.draw("by-category", [panel], "Speed-up by category", caption))
    return [*pictures, *_drafts_kept(scene, view)]


def _by_number(scene: Scene, view: View) -> Picture:
    x = sorted({number for own in scene.families.values() for number in own.values()})
    panels = []
    for label, name in (("speed-up", "speedup"), ("cost of a round (plain steps)", "cost")):
        lines: dict[str, list[Ratio | None]] = {}
        for family, own in scene.families.items():
            known = {n: getattr(scene.numbers[method], name) for method, n in own.items()}
            lines[family] = [known.get(number) for number in x]
        panels.append(Curves(x, lines, "drafts a round, at most", label,
                             reference=scene.baseline_name))  # fmt: skip
    return view.draw(
        "by-number", panels, "Speed-up and cost of a round in these answers", TIMED_BARS
    )


def _drafts_kept(scene: Scene, view: View) -> list[Picture]:
    """Draws acceptance by position and drafts kept a round; nothing of a single position.

    Of each drafter the method with the most drafts is shown, and those whose number adapts.
    """
    widest = {name: list(own)[-1] for name, own in scene.families.items()}
    widest |= {m: m for m in scene.others if scene.methods[m].get("num_draft_tokens") == "auto"}
    rounds = {name: scene.numbers[method].rounds for name, method in widest.items()}
    rounds = {name: own for name, own in rounds.items() if any(r[0] for one in own for r in one)}
    most = max(map(_num_positions, rounds.values()), default=0)
    if most < 2:
        return []
    panels = []
    for is_conditional, title in ((False, "kept, of all proposed"),
                                  (True, "kept, if all before it are")):  # fmt: skip
        lines = {
            name: acceptance_by_position(own, is_conditional=is_conditional)[: _num_positions(own)]
            for name, own in rounds.items()
        }
        panels.append(Curves(range(1, most + 1), lines, "position of the draft", "share",
                             title=title))  # fmt: skip
    kept = {name: shares_by_accepted(own, most) for name, own in rounds.items()}
    panels.append(Curves(range(most + 1), kept, "drafts kept in a round", "share",
                         title="rounds that keep this many"))  # fmt: skip
    caption = f"{BARS} Positions that fewer than {_FEWEST_ROUNDS} rounds examined are left out."
    title = "Drafts kept, by position and by round"
    return [view.draw("drafts-kept", panels, title, caption, share_y=True)]


def _num_positions(rounds: PromptRounds) -> int:
    """Returns how many positions were examined often enough."""
    flat = [a_round for own in rounds for a_round in own]
    most = max(proposed for proposed, _, _ in flat)
    counts = [sum(n > place and kept >= place for n, kept, _ in flat) for place in range(most)]
    return sum(count >= _FEWEST_ROUNDS for count in counts)
