"""The families of models that jspec can run: a new one is a file here, and a line in the list."""

import difflib
from collections.abc import Mapping, Sequence

from jspec.models.families.family import Family, GgufForm
from jspec.models.families.gemma import GEMMA2, GEMMA3
from jspec.models.families.llama import GRANITE, LLAMA, MISTRAL, MIXTRAL, OLMO2, PHI3, SMOLLM3
from jspec.models.families.qwen import MIMO, QWEN2, QWEN3, QWEN3_MOE
from jspec.models.families.t5 import T5
from jspec.models.families.whisper import WHISPER

__all__ = ["FAMILIES", "find_family", "find_gguf_family"]

_FAMILIES = (
    LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA2, GEMMA3, PHI3, OLMO2, SMOLLM3, GRANITE, MIXTRAL, QWEN3_MOE,
    MIMO, T5, WHISPER,
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _FAMILIES}


def find_family(architectures: Sequence[str] | None, model_type: str | None) -> Family:
    """Returns the family of a config.json by these two keys; a Llama where it has neither.

    Raises:
      ValueError: it is none of those that jspec knows, or the two keys disagree.
    """
    if not architectures:
        names, types = [model_type or "llama"], {name: name for name in FAMILIES}
    else:
        names = list(architectures)
        types = {family.architecture: family.model_type for family in FAMILIES.values()}
    if len(names) != 1 or names[0] not in types:
        nearest = difflib.get_close_matches(str(names[0]), types, 1, 0.0)[0]
        raise ValueError(
            f"expected an architecture among {', '.join(types)}; got {', '.join(map(str, names))}, "
            f"to which {nearest} is the nearest"
        )
    family = FAMILIES[types[names[0]]]
    if model_type not in (None, family.model_type):
        expected = f"expected model_type to be {family.model_type!r}"
        raise ValueError(f"{expected}, as {family.architecture} has it; got {model_type!r}")
    return family


def find_gguf_family(architecture: object, has_experts: bool) -> tuple[Family, GgufForm]:
    """Returns the family of a GGUF file, and how llama.cpp writes it.

    Raises:
      ValueError: an architecture that jspec does not know.
    """
    forms = [(family, family.gguf) for family in FAMILIES.values() if family.gguf is not None]
    for family, form in forms:
        if (form.architecture, form.has_experts) == (architecture, has_experts):
            return family, form
    known = sorted({form.architecture for _, form in forms})
    nearest = difflib.get_close_matches(str(architecture), known, 1, 0.0)[0]
    experts = " with experts" if has_experts else " without experts"
    experts = experts if architecture in known else ""
    raise ValueError(
        f"expected an architecture among {', '.join(known)}; got {architecture!r}{experts}, "
        f"to which {nearest} is the nearest"
    )
