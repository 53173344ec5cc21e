"""T5-XXL with its smaller sisters as drafts, as in Table 2 of Leviathan et al. (arXiv 2211.17192).

    python -m jspec.experiment --config=configs/paper_t5.py --workdir=runs/t5 \\
      --config.target=TARGET --config.methods.small:7.draft=SMALL ... --config.prompts_file=FILE
    python -m jspec.report runs/t5

The paper fine-tunes T5 1.1 on each of two tasks, English to German (WMT) and summaries (CNN/DM),
and does not publish these weights; those below, of its hub names, were only pre-trained. Each
line of FILE has a prompt of the task, such as "translate English to German: ...". The paper
measures at temperatures 0 and 1.

XXL takes 22 GB in bfloat16. Not run yet: no machine so far had these weights. A small pair for any
machine, on a toy translation, is trained first (see the script):

    python -m scripts.train_toy_t5 --output=runs/toy
    python -m jspec.experiment --config=configs/paper_t5.py:runs/toy --workdir=runs/toy/measured
    python -m jspec.report runs/toy/measured
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, method, ordered

_HUB = "google/t5-v1_1"
# Drafts a round.
_NUMBERS = {"small": (5, 7), "base": (3, 5, 7), "large": (3, 7)}


def get_config(folder: str = "") -> ConfigDict:
    """Returns the config; with a folder, that of the pair and the prompts of the toy task there."""
    config = defaults()
    config.title = "T5-XXL with a smaller T5 as draft"
    config.target = f"{_HUB}-xxl"
    drafts = {size: (f"{_HUB}-{size}", numbers) for size, numbers in _NUMBERS.items()}
    config.max_seq_len, config.max_new_tokens = 512, 128
    if folder:
        config.title = "A toy T5 with a smaller one as draft"
        config.target, config.dtype = f"{folder}/target", "float32"
        config.prompts_file = f"{folder}/prompts.jsonl"
        drafts = {"draft": (f"{folder}/draft", (1, 3, 5, 7))}
        config.repeats = 3
        # Every translation ends before.
        config.max_seq_len, config.max_new_tokens = 64, 16
    methods = {"plain": method("none")}
    for size, (draft, numbers) in drafts.items():
        methods |= {f"{size}:{n}": method("model", n, draft=draft) for n in numbers}
    config.methods = ordered(methods)
    config.settings = ordered({"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}})
    config.measure_costs = True
    return config
