"""Mistral (arXiv 2310.06825): Llama with a sliding window in every layer, or none."""

from jspec.models.families.family import Family, read_window, write_window

MISTRAL = Family("MistralForCausalLM", "mistral", read=read_window, write=write_window)
