"""All drafters by name: flags, `--help`, the README's table and every check are read from here.

A drafter is built by its own file, which is imported when it is asked for. A new drafter needs a
file with a function `build`, and an entry here; its options, if any, are in `options.py`. An option
that the chosen drafter does not read must be at its default.
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jspec.common.errors import InputError, check_type
from jspec.drafters import options as of
from jspec.drafters.options import DrafterOptions, option_title
from jspec.drafters.spec import BuiltDrafter, DrafterEntry, DrafterSpec, shipped_head


def _lazily(module: str, function: str = "build") -> Callable[[Any], Any]:
    """Returns a function of a drafter's file, which is imported when it is called."""

    def call(argument: Any) -> Any:
        return getattr(importlib.import_module(f"jspec.drafters.{module}"), function)(argument)

    return call


def _entry(
    name: str, *about: Any, build: Callable[[Any], Any] | None = None, **more: Any
) -> DrafterEntry:
    """Returns an entry, by default of what the drafter's file of that name builds."""
    return DrafterEntry(name, build or _lazily(name), *about, **more)


_ENTRIES = (
    DrafterEntry("none", lambda _: BuiltDrafter(None), "nothing: plain decoding"),
    _entry(
        "model",
        "what a second, cheaper model draws (after lookups, the default with `--draft`)",
        "2211.17192, 2302.01318, 2502.05202",
        of.TREE | of.DRAFT_MODEL | {"draft_translation"},
        "draft",
        takes_any_tokenizer=True,
    ),
    _entry(
        "prompt_lookup",
        "what followed the last time the text ended like this",
        "2304.04487",
        of.TREE_SIZE | of.named("lookup_"),
    ),
    _entry(
        "suffix",
        "what most often followed text that ended like this",
        "2411.04975",
        of.TREE_SIZE | of.named("suffix_") | {"draft_corpus", "draft_memory"},
    ),
    _entry(
        "recycle",
        "what the target found likeliest when it last read the newest token",
        "2408.08696",
        of.TREE_SIZE,
        "logits",
    ),
    _entry(
        "layer_skip",
        "what some of the target's own layers draw (`--draft_layers`)",
        "2404.16710, 2309.08168",
        of.CONFIDENCE | {"draft_layers"},
        "layers",
    ),
    _entry(
        "eagle",
        "what a trained head draws from the target's hidden states; "
        "jspec has one for `smollm2-135m-instruct`",
        "2503.01840",
        of.TREE | of.CONFIDENCE | {"draft_head"},
        "draft_head",
    ),
    _entry(
        "mtp",
        "what the target's own multi-token layer draws (MiMo)",
        "2505.07608",
        of.TREE | of.CONFIDENCE,
        "layers",
    ),
    _entry(
        "dflash",
        "a block, drawn in one pass by a trained decoder",
        "2602.06036",
        of.TREE | of.CONFIDENCE | {"draft_head"},
        "draft_head",
    ),
    _entry(
        "medusa",
        "what trained heads, one a position, draw from the target's last hidden state",
        "2401.10774",
        of.TREE_SIZE | of.CONFIDENCE | {"draft_head"},
        "draft_head",
    ),
    _entry(
        "blockwise",
        "the most likely tokens, by smaller heads that share the target's vocabulary matrix",
        "1811.03115",
        {"draft_head"},
        "draft_head",
    ),
    _entry(
        "lookahead",
        "what the target itself draws at trained embeddings of unknown tokens",
        "2311.13581",
        of.CONFIDENCE | {"draft_head"},
        "draft_head",
    ),
    _entry(
        "hierarchical",
        "the drafts of `model`, itself decoded speculatively by `--inner_drafter`",
        "2211.17192",
        of.DRAFT_MODEL | of.named("inner_"),
        "draft",
        read=_lazily("hierarchical", "options_of_inner"),
    ),
    _entry(
        "pattern",
        "what a regular expression (`--draft_pattern`) or a JSON skeleton (`--draft_json`) forces",
        "2307.09702",
        {"pattern", "json_skeleton"},
    ),
    _entry(
        "ngram",
        "what followed most often, by 4-, 3- and 2-grams of the last 512 tokens",
        "2211.17192",
        of.named("ngram_"),
        # The most frequent token follows from the text and is never unsure.
        read=lambda options: of.CONFIDENCE if options.ngram_probs == "sampled" else frozenset(),
    ),
    _entry(
        "unigram",
        "what a table of token counts draws",
        "2211.17192",
        of.CONFIDENCE | {"draft_table"},
        "draft_table",
        build=_lazily("tables", "build_unigram"),
    ),
    _entry(
        "bigram",
        "what a table of counts draws after the newest token",
        "2211.17192",
        of.CONFIDENCE | {"draft_table"},
        "draft_table",
        build=_lazily("tables", "build_bigram"),
    ),
    _entry(
        "random",
        "any token, each equally likely",
        "2211.17192",
        of.CONFIDENCE,
        build=_lazily("tables", "build_random"),
    ),
)
REGISTRY: dict[str, DrafterEntry] = {entry.name: entry for entry in _ENTRIES}
DRAFTERS = REGISTRY.keys()  # grows with the registry
_DEFAULTS = DrafterOptions()
_Given = TypeVar("_Given", bound=str | DrafterEntry)


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


def name_of(drafter: str | DrafterEntry) -> str:
    """Returns the name of a drafter that was given by name or as an entry."""
    return drafter.name if isinstance(drafter, DrafterEntry) else drafter


def entries_of(drafter: str | DrafterEntry) -> list[DrafterEntry]:
    """Returns the entries that a name stands for, see `member_names`; or an entry, in a list."""
    if isinstance(drafter, DrafterEntry):
        return [drafter]  # which need not be registered
    return [REGISTRY[name] for name in member_names(drafter)]


def member_names(name: str) -> list[str]:
    """Returns the drafters that a name stands for, those of a cascade in their order.

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


def options_read(drafter: str | DrafterEntry, options: Any) -> set[str]:
    """Returns which of the options a drafter reads, members and inner one included.

    Raises:
      InputError: see `member_names`; or a drafter that is not allowed as an inner drafter.
    """
    return set[str]().union(*(member.options_read(options) for member in entries_of(drafter)))


def make_drafter(drafter: str | DrafterEntry, spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter of that name; of several, joined by "+", a cascade in that order.

    Without options in the spec they are the default ones.

    Raises:
      InputError: no such drafter, one twice, or one that lacks something.
    """
    if spec.options is None:
        spec = spec._replace(options=_DEFAULTS)
    members = entries_of(drafter)
    if len(members) == 1:
        return _build(members[0], spec)
    from jspec.drafters.cascade import join_members

    # A member may not draft in the target's own cache, where others' blocks may lie.
    spec = spec._replace(is_member=True, is_in_cascade=True)
    built = [_build(member, spec) for member in members]
    read = [member.options_read(spec.options) for member in members]
    draws = ["draft_confidence" in names for names in read]
    return join_members(built, draws, spec.options.tree_draws)


def _build(entry: DrafterEntry, spec: DrafterSpec) -> BuiltDrafter:
    built = entry.build(spec)
    check_type(f"what the drafter {entry.name!r} is built as", built, BuiltDrafter)
    return built


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
    """Returns whether a drafter draws its drafts, at its own temperature.

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
        mtp = "+mtp" if has_mtp else ""
        chosen = "prompt_lookup" + ("+eagle" if has_head else mtp)
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
