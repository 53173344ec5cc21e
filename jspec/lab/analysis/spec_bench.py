"""Spec-Bench (arXiv 2401.07851): how its tasks group the categories of its prompts.

Its columns, as evaluation/speed.py of github.com/hemingkx/Spec-Bench defines them:

    speed of a prompt       tokens of all its turns / time of all its turns, prompts read
    speed-up                mean speed of the prompts / mean speed of the baseline's
    mean accepted tokens    mean over all rounds of the tokens that a round gives

by task and over all prompts, which weigh alike however long their answers are; the speed-ups of
several runs are averaged. It counts the baseline's tokens by encoding its text anew, we those that
were generated.
"""

TASKS = {
    "multi-turn conversation": ("writing", "roleplay", "reasoning", "math", "coding", "extraction",
                                "stem", "humanities"),
    "translation": ("translation",),
    "summarization": ("summarization",),
    "question answering": ("qa",),
    "mathematical reasoning": ("math_reasoning",),
    "retrieval-augmented generation": ("rag",),
}  # fmt: skip
