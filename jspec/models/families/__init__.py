"""The families of models that jspec can run: one file and one line here for each."""

import difflib
from collections.abc import Sequence

from jspec.models.families.family import Family
from jspec.models.families.gemma import GEMMA2, GEMMA3
from jspec.models.families.granite import GRANITE
from jspec.models.families.llama import LLAMA
from jspec.models.families.mistral import MISTRAL
from jspec.models.families.olmo2 import OLMO2
from jspec.models.families.phi3 import PHI3
from jspec.models.families.qwen import QWEN2, QWEN3
from jspec.models.families.smollm3 import SMOLLM3

_ALL = (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA2, GEMMA3, PHI3, OLMO2, SMOLLM3, GRANITE)
FAMILIES = {family.model_type: family for family in _ALL}  # by `DecoderConfig.family`


def find_family(architectures: Sequence[str] | None, model_type: str | None) -> Family:
    """Returns the family of a config.json by these two keys; a Llama where it has neither.

    Raises:
      ValueError: it is none of those that jspec knows, or the two keys disagree.
    """
    by_name = {family.architecture: family for family in _ALL}
    if not architectures:
        names, known, found = [model_type or "llama"], list(FAMILIES), FAMILIES
    else:
        names, known, found = list(architectures), list(by_name), by_name
    if len(names) != 1 or names[0] not in known:
        nearest = difflib.get_close_matches(str(names[0]), known, 1, 0.0)[0]
        raise ValueError(
            f"expected an architecture among {', '.join(known)}; got {', '.join(map(str, names))}, "
            f"to which {nearest} is the nearest"
        )
    family = found[names[0]]
    if model_type not in (None, family.model_type):
        expected = f"expected model_type to be {family.model_type!r}"
        raise ValueError(f"{expected}, as {family.architecture} has it; got {model_type!r}")
    return family
