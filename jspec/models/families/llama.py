"""Llama (arXiv 2307.09288, 2407.21783), and SmolLM2: what the other families are compared with."""

from jspec.models.families.family import BIASES, Family, GgufForm

LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    keys=BIASES,
    gguf=GgufForm("llama", is_permuted=True),
    required={
        "pretraining_tp": (1, None),
        "rope_interleaved": (False,),
        "is_llama_config": (True,),
    },
)
