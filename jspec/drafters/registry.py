"""All drafters by name: flags, `--help`, the README's table and every check are read from here.

To add a drafter, write its file with an `ENTRY` and name it in `_ENTRIES`; if it has options of its
own, `DrafterOptions` inherits them. An option that the chosen drafter does not read must be at its
default.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from jspec.common.errors import InputError
from jspec.drafters import (
    blockwise,
    dflash,
    eagle,
    hierarchical,
    layer_skip,
    lookahead,
    medusa,
    model,
    mtp,
    ngram,
    pattern,
    prompt_lookup,
    recycle,
    suffix,
    tables,
    translated_model,
)
from jspec.drafters.cascade import build_drafter
from jspec.drafters.head_folder import shipped_head
from jspec.drafters.spec import (
    DRAFTERS,
    REGISTRY,
    BuiltDrafter,
    DrafterEntry,
    DrafterSpec,
    drafters_needing,
    entries_of,
    name_of,
    needs_draft_model,
    option_title,
    options_read,
)


@dataclasses.dataclass(frozen=True)
class DrafterOptions(  # the fields come in the order of --helpfull, the last base's first
    eagle.EagleOptions,
    tables.TableOptions,
    ngram.NgramOptions,
    pattern.PatternOptions,
    hierarchical.HierarchicalOptions,
    translated_model.TranslationOptions,
    layer_skip.LayerSkipOptions,
    suffix.SuffixOptions,
    prompt_lookup.LookupOptions,
):
    """Options of all drafters; each reads its own."""


_NONE = DrafterEntry("none", lambda _: BuiltDrafter(None), "nothing: plain decoding")
_ENTRIES = (
    _NONE,
    model.ENTRY,
    prompt_lookup.ENTRY,
    suffix.ENTRY,
    recycle.ENTRY,
    layer_skip.ENTRY,
    eagle.ENTRY,
    mtp.ENTRY,
    dflash.ENTRY,
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
REGISTRY.update({entry.name: entry for entry in _ENTRIES})
_DEFAULTS = DrafterOptions()
_Given = TypeVar("_Given", bound=str | DrafterEntry)


def make_drafter(drafter: str | DrafterEntry, spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter of that name, see `build_drafter`, by default with default options.

    Raises:
      InputError: no such drafter, one twice, or one that lacks something.
    """
    if spec.options is None:
        spec = spec._replace(options=_DEFAULTS)
    return build_drafter(drafter, spec)


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
    lines = ["| `--drafter` | proposes | needs | paper |", "|---|---|---|---|"]
    for entry in _ENTRIES:
        needs = f"`--{entry.needs}`" if entry.needs not in ("", "layers", "logits") else ""
        papers = entry.source.split(", ") if entry.source else ()
        links = ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in papers)
        cells = f"`{entry.name}`", entry.proposes, needs, links
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draws_from_distribution(drafter: str | DrafterEntry, options: DrafterOptions) -> bool:
    """Returns whether a drafter draws its drafts, at a temperature of its own.

    The drafts of the others follow from the context.
    """
    # Whatever draws reads how sure its distribution is.
    return "draft_confidence" in options_read(drafter, options)


def check_options(drafters: Sequence[str | DrafterEntry], options: DrafterOptions) -> None:
    """Checks that each option which is not at its default is read by one of those drafters.

    Raises:
      InputError: an option that none of them reads.
    """
    read = set[str]().union(*(options_read(drafter, options) for drafter in drafters))
    for field in dataclasses.fields(options):
        # An option at its default may be unread: the user did not ask for it.
        if field.name not in read and getattr(options, field.name) != field.default:
            readers = [name for name in DRAFTERS if field.name in options_read(name, _DEFAULTS)]
            raise InputError(
                f"expected {option_title(field)} with a drafter that reads it "
                f"({', '.join(readers)}), got it with "
                f"{', '.join(repr(name_of(drafter)) for drafter in drafters)}"
            )


def read_options(values: dict[str, Any], options: DrafterOptions = _DEFAULTS) -> DrafterOptions:
    """Takes drafters' options out of a dict, by their own names or their flags'.

    Args:
      values: any; those that name an option are removed.
      options: what the options are that it does not name.

    Raises:
      InputError: a value of another type, or out of its range.
    """
    given = {}
    for field in dataclasses.fields(DrafterOptions):
        for name in {field.name, field.metadata["flag"]} & values.keys():
            value, parse = values.pop(name), field.metadata["parse"]
            # As the flag's text, or as a number like it; else as the option's own value.
            if parse is not None and isinstance(value, str | int):
                value = parse(str(value))
            given[field.name] = value
    return dataclasses.replace(options, **given)


def without_unread(name: str, options: DrafterOptions) -> DrafterOptions:
    """Returns the options with those at their defaults that a drafter of that name ignores."""
    read = options_read(name, options)
    return DrafterOptions(**{key: value for key, value in vars(options).items() if key in read})


def choose_drafter(
    drafter: _Given | None,
    *,
    has_draft: bool,
    target: str = "",
    has_mtp: bool = False,
    options: DrafterOptions = _DEFAULTS,
) -> _Given | str:
    """Returns the drafter, for a target that was asked for by the name `target`.

    None takes "prompt_lookup", as it costs next to nothing, followed by "+model" where there is a
    draft model, else by "+eagle" where a head for the target comes with jspec, else by "+mtp" where
    the target has a layer for it (`has_mtp`).

    Raises:
      InputError: no such drafter, a draft model without a drafter that drafts with it, or the other
        way round, or an option that the drafter does not read.
    """
    chosen: _Given | str = "prompt_lookup+model" if drafter is None else drafter
    if drafter is None and not has_draft:
        has_head = shipped_head("eagle", target) is not None
        own = "+mtp" if has_mtp else ""
        chosen = "prompt_lookup" + ("+eagle" if has_head else own)
    is_needed, name = needs_draft_model(chosen), name_of(chosen)
    if is_needed and not has_draft:
        raise InputError(
            f"the drafter {name!r} expects a draft model (--draft=MODEL, in Python draft), got none"
        )
    if has_draft and not is_needed:
        raise InputError(
            "a draft model (--draft, in Python draft) expects a drafter among "
            f"{', '.join(drafters_needing('draft'))}; got {name!r}"
        )
    check_options([chosen], options)
    return chosen
