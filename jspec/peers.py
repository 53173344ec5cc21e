"""The same model in transformers, to be measured beside jspec."""

import importlib.util
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from jspec.weights.hf import save_hf
from jspec.weights.resolver import LoadedModel

GenerateFn = Callable[[list[int], int], list[int]]


def has_transformers() -> bool:
    """Returns whether transformers can run models here, which takes torch."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def transformers_generators(model: LoadedModel, num_draft_tokens: int) -> dict[str, GenerateFn]:
    """Returns greedy generation by transformers, plain and with prompt lookup.

    Args:
      model: its weights are handed over as a Hugging Face checkpoint, in their own dtype.
      num_draft_tokens: `prompt_lookup_num_tokens`.

    Returns:
      By name, functions of (prompt ids, max_new_tokens) that return the new ids.
    """
    import torch
    import transformers

    dtype = getattr(torch, model.params["embedding"].dtype.name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = pathlib.Path(folder) / "model"
        save_hf(checkpoint, model.config, model.params)
        peer: Any = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    peer = peer.to(device).eval()

    def generate(prompt: list[int], max_new_tokens: int, **options: Any) -> list[int]:
        ids = torch.tensor([prompt], device=device)
        with torch.inference_mode():
            output = peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=list(model.config.eos_ids),
                pad_token_id=model.config.eos_ids[0] if model.config.eos_ids else 0,
                **options,
            )
        return output[0, len(prompt) :].tolist()

    def lookup(prompt: list[int], max_new_tokens: int) -> list[int]:
        return generate(prompt, max_new_tokens, prompt_lookup_num_tokens=num_draft_tokens)

    return {"transformers plain": generate, "transformers prompt_lookup": lookup}
