"""The families of models that jspec can run: one file and one line here for each.

A family's file is imported when a model of it is loaded.
"""

import difflib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jspec.models.families.family import Family, GgufForm


class _Line(NamedTuple):
    """What files of models call a family, and where it is."""

    architecture: str  # in config.json
    model_type: str  # the other name there, and `DecoderConfig.family`
    file: str  # in this folder
    name: str  # in that file
    gguf: str | None = None  # architecture in GGUF files; None if llama.cpp does not write it
    has_experts: bool = False


_LINES = (
    _Line("LlamaForCausalLM", "llama", "llama", "LLAMA", "llama"),
    _Line("Qwen2ForCausalLM", "qwen2", "qwen", "QWEN2", "qwen2"),
    _Line("Qwen3ForCausalLM", "qwen3", "qwen", "QWEN3", "qwen3"),
    _Line("MistralForCausalLM", "mistral", "mistral", "MISTRAL"),
    _Line("Gemma2ForCausalLM", "gemma2", "gemma", "GEMMA2", "gemma2"),
    _Line("Gemma3ForCausalLM", "gemma3_text", "gemma", "GEMMA3", "gemma3"),
    _Line("Phi3ForCausalLM", "phi3", "phi3", "PHI3", "phi3"),
    _Line("Olmo2ForCausalLM", "olmo2", "olmo2", "OLMO2", "olmo2"),
    _Line("SmolLM3ForCausalLM", "smollm3", "smollm3", "SMOLLM3", "smollm3"),
    _Line("GraniteForCausalLM", "granite", "granite", "GRANITE", "granite"),
    _Line("MixtralForCausalLM", "mixtral", "mistral", "MIXTRAL", "llama", has_experts=True),
    _Line("Qwen3MoeForCausalLM", "qwen3_moe", "qwen", "QWEN3_MOE", "qwen3moe", has_experts=True),
    _Line("MiMoForCausalLM", "mimo", "qwen", "MIMO"),
    _Line("T5ForConditionalGeneration", "t5", "t5", "T5"),
    _Line("WhisperForConditionalGeneration", "whisper", "whisper", "WHISPER"),
)


_BY_TYPE = {line.model_type: line for line in _LINES}


class _Families(Mapping[str, Family]):
    """All families by `model_type`; each is imported when it is looked up."""

    def __getitem__(self, model_type: str) -> Family:
        line = _BY_TYPE[model_type]
        return getattr(importlib.import_module(f"jspec.models.families.{line.file}"), line.name)

    def __iter__(self) -> Iterator[str]:
        return iter(_BY_TYPE)

    def __len__(self) -> int:
        return len(_BY_TYPE)


FAMILIES = _Families()


def find_family(architectures: Sequence[str] | None, model_type: str | None) -> Family:
    """Returns the family of a config.json by these two keys; a Llama where it has neither.

    Raises:
      ValueError: it is none of those that jspec knows, or the two keys disagree.
    """
    if not architectures:
        names, types = [model_type or "llama"], {name: name for name in FAMILIES}
    else:
        names = list(architectures)
        types = {line.architecture: line.model_type for line in _LINES}
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
    for line in _LINES:
        if line.gguf is not None and (line.gguf, line.has_experts) == (architecture, has_experts):
            family = FAMILIES[line.model_type]
            assert family.gguf is not None
            return family, family.gguf
    known = sorted({line.gguf for line in _LINES if line.gguf is not None})
    nearest = difflib.get_close_matches(str(architecture), known, 1, 0.0)[0]
    experts = " with experts" if has_experts else " without experts"
    experts = experts if architecture in known else ""
    raise ValueError(
        f"expected an architecture among {', '.join(known)}; got {architecture!r}{experts}, "
        f"to which {nearest} is the nearest"
    )
