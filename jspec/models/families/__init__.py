"""The families of models that jspec can run."""

from jspec.models.families.family import FAMILIES, find_family, find_gguf_family

__all__ = ["FAMILIES", "find_family", "find_gguf_family"]
