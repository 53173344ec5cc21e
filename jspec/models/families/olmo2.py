"""OLMo 2 (arXiv 2501.00656): norms after attention and feed-forward, and of all query heads."""

from jspec.models.families.family import ATTENTION_BIAS, Family, GgufForm

OLMO2 = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    keys=ATTENTION_BIAS,
    gguf=GgufForm("olmo2"),
    defaults={"rms_norm_eps": 1e-5},
    fixed={"norms": "post", "qk_norm": "full"},
)
