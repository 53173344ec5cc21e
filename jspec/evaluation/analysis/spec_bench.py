"""Spec-Bench (arXiv 2401.07851): how its tasks group the categories of its prompts."""

TASKS = {
    "multi-turn conversation": (
        "writing",
        "roleplay",
        "reasoning",
        "math",
        "coding",
        "extraction",
        "stem",
        "humanities",
    ),
    "translation": ("translation",),
    "summarization": ("summarization",),
    "question answering": ("qa",),
    "mathematical reasoning": ("math_reasoning",),
    "retrieval-augmented generation": ("rag",),
}
