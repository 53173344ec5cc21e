"""All drafters by name: flags, `--help`, the README's table and every check are read from here.

To add a drafter, write its file with an `ENTRY` and name it in `_ENTRIES`; if it has options of its
own, `DrafterOptions` inherits them.
"""

import dataclasses

from jspec.common.errors import InputError, check_type
from jspec.drafters import (
    blockwise,
    eagle,
    hierarchical,
    layer_skip,
    lookahead,
    medusa,
    model,
    ngram,
    pattern,
    prompt_lookup,
    tables,
)
from jspec.drafters.cascade import CascadeDrafter
from jspec.drafters.heads.shipped import shipped_head
from jspec.drafters.spec import (
    BuiltDrafter,
    DrafterEntry,
    DrafterSpec,
    DrawnHeadOptions,
)


@dataclasses.dataclass(frozen=True)
class DrafterOptions(  # the fields come in the order of --helpfull, the last base's first
    DrawnHeadOptions,
    tables.TableOptions,
    ngram.NgramOptions,
    pattern.PatternOptions,
    hierarchical.HierarchicalOptions,
    layer_skip.LayerSkipOptions,
    prompt_lookup.LookupOptions,
):
    """Options of all drafters; each reads its own."""


_NONE = DrafterEntry("none", lambda _: BuiltDrafter(None), "nothing: plain decoding", prior_cost=1)
_ENTRIES = (
    _NONE,
    model.ENTRY,
    prompt_lookup.ENTRY,
    layer_skip.ENTRY,
    eagle.ENTRY,
    medusa.ENTRY,
    blockwise.ENTRY,
    lookahead.ENTRY,
    hierarchical.ENTRY,
    pattern.ENTRY,
    ngram.ENTRY,
    tables.UNIGRAM,
    tables.BIGRAM,
    tables.RANDOM,
)
REGISTRY = {entry.name: entry for entry in _ENTRIES}
DRAFTERS = REGISTRY.keys()  # grows with the registry
_DEFAULTS = DrafterOptions()


def register_drafter(entry: DrafterEntry) -> None:
    """Makes a drafter of your own known by its entry's name, to every program and to `Generator`.

    Example:
      >>> jspec.register_drafter(jspec.DrafterEntry("mine", build, "what I think comes next"))

    Raises:
      InputError: there is another drafter of that name, or the name has a "+".
    """
    check_type("a drafter's entry", entry, DrafterEntry)
    if "+" in entry.name or REGISTRY.get(entry.name, entry) is not entry:
        raise InputError(f"expected a new name without '+' for a drafter, got {entry.name!r}")
    REGISTRY[entry.name] = entry


def make_drafter(name: str, spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter of that name; of several, joined by "+", a cascade in that order.

    Raises:
      InputError: no such drafter, one twice, or one that lacks something.
    """
    if spec.options is None:
        spec = spec._replace(options=_DEFAULTS)
    names = member_names(name)
    if len(names) == 1:
        return REGISTRY[name].build(spec)
    # A member may not draft in the target's own cache, where others' blocks may lie.
    spec = spec._replace(is_member=True, is_in_cascade=True)
    built = [REGISTRY[member].build(spec) for member in names]
    # `member_names` has refused "none", so members and parameters stay aligned.
    drafters = tuple(one.drafter for one in built if one.drafter is not None)
    return BuiltDrafter(CascadeDrafter(drafters), tuple(one.params for one in built))


def member_names(name: str) -> list[str]:
    """Returns the drafters that a name stands for: one, or those of a cascade in their order.

    Raises:
      InputError: no such drafter, or a cascade with one of them twice, with two that are trained
        heads, with "none", or with an empty name.
    """
    names = name.split("+")
    if len(names) > 1 and "" in names:
        raise InputError(f"expected a drafter's name on both sides of every '+', got {name!r}")
    for member in names:
        if member not in DRAFTERS:
            where = "" if member == name else f" in {name!r}"
            if member == "auto":  # of another flag
                where += "; --num_draft_tokens=auto chooses the number of drafts"
            raise InputError(
                f"expected a drafter among {', '.join(DRAFTERS)}, or several joined by '+'; "
                f"got {member!r}{where}"
            )
    if len(names) > 1 and "none" in names:
        raise InputError(f"expected 'none' alone, as it drafts nothing; got {name!r}")
    if len(set(names)) < len(names):
        raise InputError(f"expected each drafter of a cascade once, got {name!r}")
    # There is one --draft_head.
    with_head = drafters_needing("draft_head")
    if len(set(names).intersection(with_head)) > 1:
        raise InputError(
            f"expected at most one of {', '.join(with_head)} in a cascade, as draft_head is one "
            f"folder; got {name!r}"
        )
    return names


def needs_draft_model(name: str) -> bool:
    """Returns whether a drafter of that name drafts with a second model; see `member_names`."""
    return any(REGISTRY[member].needs == "draft" for member in member_names(name))


def drafters_needing(what: str) -> list[str]:
    """Returns the drafters whose entry's `needs` is this."""
    # From the entries themselves, so that a new drafter needs no second list.
    return [entry.name for entry in REGISTRY.values() if entry.needs == what]


def with_shipped_head(name: str, options: DrafterOptions, target: str) -> DrafterOptions:
    """Returns the options with the head that comes with jspec, where one is needed and not named.

    `target` is the name by which the target was asked for.
    """
    heads = filter(None, (shipped_head(member, target) for member in member_names(name)))
    return dataclasses.replace(options, draft_head=options.draft_head or next(heads, None))


def drafters_table() -> str:
    """Returns the README's table of the drafters, in Markdown."""
    lines = ["| `--drafter` | proposes | needs | a round costs | paper |", "|---|---|---|---|---|"]
    for entry in _ENTRIES:
        needs = f"`--{entry.needs}`" if entry.needs not in ("", "layers") else ""
        cost = "" if entry.prior_cost is None else f"{entry.prior_cost:.2f}"
        papers = entry.source.split(", ") if entry.source else ()
        links = ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in papers)
        cells = f"`{entry.name}`", entry.proposes, needs, cost, links
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
