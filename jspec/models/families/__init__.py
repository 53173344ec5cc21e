"""The families of models that jspec can run: a new one is a file here, and a line in the list."""

from collections.abc import Mapping

from jspec.models.families.encoder_decoders import T5, WHISPER
from jspec.models.families.family import Family
from jspec.models.families.gemma import GEMMA2, GEMMA3
from jspec.models.families.llama import GRANITE, LLAMA, MISTRAL, MIXTRAL, OLMO2, PHI3, SMOLLM3
from jspec.models.families.qwen import MIMO, QWEN2, QWEN3, QWEN3_MOE

__all__ = ["FAMILIES"]

_FAMILIES = (
    LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA2, GEMMA3, PHI3, OLMO2, SMOLLM3, GRANITE, MIXTRAL, QWEN3_MOE,
    MIMO, T5, WHISPER,
)  # fmt: skip
FAMILIES: Mapping[str, Family] = dict((family.model_type, family) for family in _FAMILIES)
