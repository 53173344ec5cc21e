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
    recycle,
    suffix,
    tables,
)
from jspec.drafters.cascade import CascadeDrafter, MergedCascadeDrafter
from jspec.drafters.heads.shipped import shipped_head
from jspec.drafters.spec import (
    BuiltDrafter,
    DrafterEntry,
    DrafterSpec,
)
from jspec.drafters.tree_options import LIKELIEST
from jspec.speculation.types import tree_depth


@dataclasses.dataclass(frozen=True)
class DrafterOptions(  # the fields come in the order of --helpfull, the last base's first
    eagle.EagleOptions,
    tables.TableOptions,
    ngram.NgramOptions,
    pattern.PatternOptions,
    hierarchical.HierarchicalOptions,
    layer_skip.LayerSkipOptions,
    suffix.SuffixOptions,
    prompt_lookup.LookupOptions,
):
    """Options of all drafters; each reads its own."""


_NONE = DrafterEntry("none", lambda _: BuiltDrafter(None), "nothing: plain decoding", prior_cost=1)
_ENTRIES = (
    _NONE,
    model.ENTRY,
    prompt_lookup.ENTRY,
    suffix.ENTRY,
    recycle.ENTRY,
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
      InputError: there is another drafter of that name.
    """
    check_type("a drafter's entry", entry, DrafterEntry)
    if REGISTRY.get(entry.name, entry) is not entry:
        raise InputError(
            f"the drafter {entry.name!r} is already registered: choose another name, or register "
            "nothing and give the DrafterEntry itself to Generator"
        )
    REGISTRY[entry.name] = entry


def make_drafter(drafter: str | DrafterEntry, spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter of that name; of several, joined by "+", a cascade in that order.

    Raises:
      InputError: no such drafter, one twice, or one that lacks something.
    """
    if spec.options is None:
        spec = spec._replace(options=_DEFAULTS)
    members = entries_of(drafter)
    if len(members) == 1:
        return _build(members[0], spec)
    # A member may not draft in the target's own cache, where others' blocks may lie.
    spec = spec._replace(is_member=True, is_in_cascade=True)
    built = [_build(member, spec) for member in members]
    # `member_names` has refused "none", so members and parameters stay aligned.
    drafters = tuple(one.drafter for one in built if one.drafter is not None)
    # What is drawn from a distribution has siblings of its own, and is not merged.
    is_drawn = spec.options.tree_draws != LIKELIEST or any(
        "draft_confidence" in member.options_read(spec.options) and not tree_depth(drafter)
        for member, drafter in zip(members, drafters, strict=True)
    )
    is_merged = not is_drawn and any(map(tree_depth, drafters))
    cascade = MergedCascadeDrafter if is_merged else CascadeDrafter
    return BuiltDrafter(cascade(drafters), tuple(one.params for one in built))


def _build(entry: DrafterEntry, spec: DrafterSpec) -> BuiltDrafter:
    built = entry.build(spec)
    check_type(f"what the drafter {entry.name!r} is built as", built, BuiltDrafter)
    return built


def name_of(drafter: str | DrafterEntry) -> str:
    """Returns the name of a drafter that was given by name or as an entry."""
    return drafter.name if isinstance(drafter, DrafterEntry) else drafter


def entries_of(drafter: str | DrafterEntry) -> list[DrafterEntry]:
    """Returns the entries that a name stands for, see `member_names`; or an entry, in a list."""
    if isinstance(drafter, DrafterEntry):
        return [drafter]  # which need not be registered
    return [REGISTRY[name] for name in member_names(drafter)]


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
                where += "; num_draft_tokens='auto' (--num_draft_tokens=auto) chooses their number"
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


def needs_draft_model(drafter: str | DrafterEntry) -> bool:
    """Returns whether a drafter drafts with a second model; see `entries_of`."""
    return any(member.needs == "draft" for member in entries_of(drafter))


def drafters_needing(what: str) -> list[str]:
    """Returns the drafters whose entry's `needs` is this."""
    # From the entries themselves, so that a new drafter needs no second list.
    return [entry.name for entry in REGISTRY.values() if entry.needs == what]


def with_shipped_head(
    drafter: str | DrafterEntry, options: DrafterOptions, target: str
) -> DrafterOptions:
    """Returns the options with the head that comes with jspec, where one is needed and not named.

    `target` is the name by which the target was asked for.
    """
    heads = filter(None, (shipped_head(member.name, target) for member in entries_of(drafter)))
    return dataclasses.replace(options, draft_head=options.draft_head or next(heads, None))


def drafters_table() -> str:
    """Returns the README's table of the drafters, in Markdown."""
    lines = ["| `--drafter` | proposes | needs | a round costs | paper |", "|---|---|---|---|---|"]
    for entry in _ENTRIES:
        needs = f"`--{entry.needs}`" if entry.needs not in ("", "layers", "logits") else ""
        cost = "" if entry.prior_cost is None else f"{entry.prior_cost:.2f}"
        papers = entry.source.split(", ") if entry.source else ()
        links = ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in papers)
        cells = f"`{entry.name}`", entry.proposes, needs, cost, links
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
