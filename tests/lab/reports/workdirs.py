"""Folders of experiments with numbers that can be checked by hand.

A step of plain decoding takes 0.1 s, a round with three drafts 0.12 s, with one draft 0.105 s. In
"code" `lookup:3` keeps 3, 3 and 1 of three drafts, 10 tokens in 0.36 s where plain decoding takes
1 s; in "qa" it keeps none, 10 tokens in 1.2 s. Every answer begins with one token more, which
reading the prompt gives in 0.5 s.
"""

import json

PLAIN_STEP = 0.1
CATEGORIES = ("qa", "qa", "qa", "code", "code", "code")
SPEEDS = (1.0, 1.1, 0.9)  # of the machine, repeat by repeat: ways are timed in turn
WAYS = {
    "plain": {"drafter": "none", "num_draft_tokens": 5},
    "lookup:1": {"drafter": "prompt_lookup", "num_draft_tokens": 1},
    "lookup:3": {"drafter": "prompt_lookup", "num_draft_tokens": 3},
    "random:3": {"drafter": "random", "num_draft_tokens": 3},
}
_ROUNDS = {
    ("plain", "qa"): [[0, 0, ""]] * 10,
    ("plain", "code"): [[0, 0, ""]] * 10,
    ("lookup:1", "qa"): [[1, 0, "prompt_lookup"]] * 10,
    ("lookup:1", "code"): [[1, 1, "prompt_lookup"]] * 5,
    ("lookup:3", "qa"): [[3, 0, "prompt_lookup"]] * 10,
    ("lookup:3", "code"): [[3, 3, "prompt_lookup"]] * 2 + [[3, 1, "prompt_lookup"]],
    ("random:3", "qa"): [[3, 0, "random"]] * 10,
    ("random:3", "code"): [[3, 0, "random"]] * 10,
}
_SECONDS = {"plain": PLAIN_STEP, "lookup:1": 0.105, "lookup:3": 0.12, "random:3": 0.15}
_PREFILL = 0.5
RUN = {
    "run": "one",
    "started": "2026-11-22T10:00:00+00:00",
    "argv": ["python", "-m", "jspec.experiment", "--config=configs/smoke.py",
             "--workdir=/home/someone/secret/runs"],
    "environment": {"date": "2026-11-22", "device": "cpu", "processor": "A Processor",
                    "cores": 2, "python": "3.11.2", "versions": {"jax": "0.10.2", "torch": None}},
    "git": {"commit": "0123456789abcdef0123", "is_dirty": True},
}  # fmt: skip


def config(**changes):
    """Returns the config of the experiment."""
    return {
        "kind": "generate",
        "title": "A title with <b>marks</b> & | bars",
        "target": "toy",
        "dtype": "float32",
        "methods": WAYS,
        "settings": {"T=0": {"temperature": 0.0}},
        "max_new_tokens": 11,
    } | changes


def answer(method, prompt, category, *, scale=1.0, rounds=None):
    """Returns the record of one answer."""
    rounds = _ROUNDS[method, category] if rounds is None else rounds
    num_tokens = sum(accepted + 1 for _, accepted, _ in rounds)
    seconds = scale * len(rounds) * _SECONDS[method]
    return {
        "prompt": prompt,
        "turn": 0,
        "category": category,
        "num_prompt_tokens": 7,
        "token_ids": list(range(num_tokens + 1)),
        "text": "<script>alert(1)</script>",
        "finish_reason": "length",
        "num_round_tokens": num_tokens,
        "prefill_seconds": scale * _PREFILL,
        "decode_seconds": seconds,
        "device_seconds": seconds,
        "rounds": rounds,
    }


def cell(method, prompts, *, repeat=0, setting="T=0", seed=0, batch_size=1, rounds=None):
    """Returns a line of results.jsonl."""
    scale = SPEEDS[repeat % len(SPEEDS)]
    answers = [
        answer(method, prompt, CATEGORIES[prompt], scale=scale, rounds=rounds) for prompt in prompts
    ]
    longest = max(one["decode_seconds"] for one in answers)
    return {
        "cell": f"{method}/{setting}/{batch_size}/{prompts}/{seed}/{repeat}",
        "key": {"method": method, "setting": setting, "batch_size": batch_size,
                "prompts": list(prompts), "seed": seed, "repeat": repeat},
        "run": "one",
        "status": "done",
        "error": None,
        "record": {"seconds": longest + sum(one["prefill_seconds"] for one in answers),
                   "answers": answers},
    }  # fmt: skip


def cells(*, repeats=3, setting="T=0"):
    """Returns the cells of every way and prompt."""
    return [
        cell(method, [prompt], repeat=repeat, setting=setting)
        for repeat in range(repeats)
        for prompt in range(len(CATEGORIES))
        for method in WAYS
    ]


def failed_cell(name="lookup:1/T=0/broken"):
    """Returns the line of a cell that failed."""
    return {"cell": name, "key": {}, "run": "one", "status": "failed",
            "error": "ValueError: a `bad` | thing <b>", "record": None}  # fmt: skip


def trace():
    """Returns a trace of three rounds."""
    return {
        "target": "toy",
        "draft": None,
        "drafter": "prompt_lookup",
        "num_draft_tokens": 3,
        "acceptance": "rejection",
        "settings": {"temperature": 0.0, "seed": 0, "max_new_tokens": 9},
        "prompt": "Say <this> & that",
        "first": "A",
        "rounds": [
            {"drafts": [" big", " <red>", " dog"], "num_accepted": 1, "next": " black",
             "begin": 0.0, "draft_seconds": 0.001, "target_seconds": 0.02},
            {"drafts": [], "num_accepted": 0, "next": "\n",
             "begin": 0.021, "draft_seconds": 0.001, "target_seconds": 0.019},
            {"drafts": ["\033[31m", "x"], "num_accepted": 2, "next": None,
             "begin": 0.041, "draft_seconds": 0.001, "target_seconds": 0.02},
        ],
        "finish_reason": "length",
        "plain_seconds": [0.018] * 6,
        "environment": {},
    }  # fmt: skip


def write(folder, lines, *, config_fields=None, runs=(RUN,), tail="", traces=()):
    """Writes a workdir; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = config() if config_fields is None else config_fields
    (folder / "config.json").write_text(json.dumps(plain), encoding="utf-8")
    for name, records in (("runs.jsonl", runs), ("results.jsonl", lines)):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / name).write_text(text + (tail if name == "results.jsonl" else ""))
    for index, one in enumerate(traces):
        (folder / f"trace{index or ''}.json").write_text(json.dumps(one), encoding="utf-8")
    return folder
