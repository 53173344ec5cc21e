"""What the methods of generating are: what each drafter does, and tables of them."""

from collections.abc import Mapping
from typing import Any

from jspec.common.counted import counted
from jspec.evaluation.reports.document import Table
from jspec.evaluation.reports.families import families
from jspec.evaluation.reports.wording import LOSSY_RULES, NOTHING, assignments, code

_UNCHANGED = "unchanged"
_INNER = "prompt_lookup"  # what guesses for the draft model of `hierarchical`, if nothing is given
_COUNTED = "counts over the target's answers to other prompts"
_DRAFTERS = {
    "none": "plain decoding: no drafts",
    "prompt_lookup": "copies what followed the same few tokens where prompt or answer last had "
    "them",
    "ngram": "copies what most often followed the same few tokens in prompt and answer",
    "model": "proposes what {draft} would say",
    "hierarchical": "proposes what {draft} would say, which is itself sped up by {inner}",
    "layer_skip": "proposes what some of the target's own layers would say",
    "unigram": "proposes frequent tokens, by {counts}",
    "bigram": "proposes what often follows the last token, by {counts}",
    "random": "proposes anything: a control, which cannot help",
    "eagle": "proposes what a trained head reads off the target's own features",
    "blockwise": "proposes the most likely tokens of the next places, as trained heads see them",
    "lookahead": "proposes what the target itself says when trained inputs stand for later tokens: "
    "a call more in each round, which tokens per call do not count",
    "medusa": "proposes what trained heads, one for each place, read off the target's last output",
    "pattern": "proposes what a given pattern leaves no choice about",
}


def explain_method(method: Mapping[str, Any], target: str) -> str:
    """Returns what a way's drafter does, in a few words; of a cascade, each of its members.

    Args:
      method: of a config.
      target: name of the model whose answers are wanted.
    """
    options = method.get("options") or {}
    words = {
        "draft": _explain_draft(method, target),
        "inner": code(options.get("inner_drafter") or _INNER),
        "counts": "a given table of counts" if options.get("draft_table") else _COUNTED,
    }
    members = [
        _DRAFTERS[member].format(**words) if member in _DRAFTERS else member
        for member in str(method.get("drafter", "none")).split("+")
    ]
    return "; where that has nothing to say, ".join(members)


def _explain_draft(method: Mapping[str, Any], target: str) -> str:
    if method.get("draft") != target:
        return "a second, cheaper model"
    bits = str(method.get("draft_quantization")).removeprefix("int")
    rounded = f", its weights rounded to {bits} bits," if bits.isdigit() else ""
    return f"the same model{rounded}"


def drafters_table(methods: Mapping[str, Mapping[str, Any]], target: str) -> Table:
    """Returns what the drafter of each way is."""
    rows = [
        (code(label), explain_method(method, target), _extras(method))
        for label, method in methods.items()
    ]
    columns = ("drafter", "what it does", "options")
    return Table("The drafters", columns, tuple(rows), text_columns=(0, 1, 2))


def methods_table(methods: Mapping[str, Mapping[str, Any]], target: str, dtype: str) -> Table:
    """Returns what each way is, a line for those that differ in the number of drafts alone.

    Args:
      methods: of the config, by label.
      target: name of the model whose answers are wanted.
      dtype: of its weights and caches.
    """
    lines: dict[tuple[str, str, str], list[str]] = {}
    for label, method in methods.items():
        kind = explain_method(method, target), _extras(method), _explain_rule(method)
        lines.setdefault(kind, []).append(label)
    has_lossy = any(rule != _UNCHANGED for _, _, rule in lines)
    rows = [
        (
            ", ".join(map(code, labels)),
            drafter,
            ", ".join(str(methods[label].get("num_draft_tokens")) for label in labels)
            if any(methods[label].get("drafter") != "none" for label in labels)
            else NOTHING,
            extras,
            *([rule] if has_lossy else []),
        )
        for (drafter, extras, rule), labels in lines.items()
    ]
    columns = ["method", "what it does", "drafts a round, at most", "options"]
    columns += ["the target's answers"] if has_lossy else []
    return Table(
        "The methods of generating",
        tuple(columns),
        tuple(rows),
        text_columns=tuple(range(len(columns))),
        note=" ".join(filter(None, (*_about_numbers(methods), _about_answers(dtype, has_lossy)))),
    )


def _about_numbers(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns what is to be known of the numbers of drafts."""
    notes = ["The first one is what the others are compared with."]
    if any(method.get("num_draft_tokens") == "auto" for method in methods.values()):
        notes.append("`auto` chooses the number of drafts round by round.")
    if len({tuple(members.values()) for members in families(methods).values()}) > 1:
        notes.append("Drafters were not all timed with the same numbers of drafts.")
    return notes


def _about_answers(dtype: str, has_lossy: bool) -> str:
    """Returns that the answers are kept, and why some differ all the same."""
    if has_lossy:
        return ""
    kept = "All keep the target's answers"
    if dtype == "float32":
        return f"{kept}."
    return (
        f"{kept}, but for ties: where two tokens are almost equally likely, rounding in {dtype} "
        "may let either win, and the text then goes on from there."
    )


def explain_names(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns what the number at the end of ways' names is; "" where they have none."""
    numbered = {
        label: (int(end), method.get("num_draft_tokens"))
        for label, method in methods.items()
        if (end := label.rpartition(":")[2]).isdecimal()
    }
    right = [said for said, count in numbered.values() if said == count]
    if not right:
        return ""
    wrong = [
        f" `{label}` had {count}." for label, (said, count) in numbered.items() if said != count
    ]
    count = right[0]
    return f"`:{count}` behind a name: at most {counted(count, 'draft')} a round.{''.join(wrong)}"


def _extras(method: Mapping[str, Any]) -> str:
    """Returns what else a way's config says: the draft, its weights, the rule, options."""
    own = {"draft": method.get("draft")}
    if method.get("draft_quantization", "none") != "none":
        own["weights"] = method["draft_quantization"]
    if method.get("acceptance", "rejection") != "rejection":
        own["rule"] = method["acceptance"]
    own |= method.get("options") or {}
    return ", ".join(map(code, assignments(own))) or NOTHING


def _explain_rule(method: Mapping[str, Any]) -> str:
    """Returns what a way's acceptance rule does to the answers."""
    rule = method.get("acceptance", "rejection")
    if rule not in LOSSY_RULES:
        return _UNCHANGED
    lenience = f" {method.get('lenience')}" if rule.startswith("lenient") else ""
    return f"changed ({rule}{lenience})"
