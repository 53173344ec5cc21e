"""A small experiment on a tiny model, as plain values and as a config file."""

import json
import pathlib

from tests.programs import read_lines

TINY_PROMPTS = [
    {"prompt": "one two one two one", "category": "a"},
    {"prompt": "abcabcabc", "category": "a"},
    {"prompt": "z", "category": "b"},
    {"turns": ["the cat and the dog", "and the cow"], "category": "b"},
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)

_CONFIG_FILE = '''"""A config of a test."""

import json

from jspec.lab.experiments.config import (defaults, method, ordered)


def get_config():
    config = defaults()
    for name, value in json.loads({changes!r}).items():
        if name == "methods":
            value = {{label: method(**one) for label, one in value.items()}}
        config[name] = ordered(value) if isinstance(value, dict) else value
    return config
'''


def plain_config(folder, prompts, **changes):
    """Returns a config of two methods and two temperatures, short answers."""
    return {
        "target": str(folder),
        "dtype": "float32",
        "prompts_file": str(prompts),
        "methods": {
            "plain": {"drafter": "none"},
            "lookup": {"drafter": "prompt_lookup", "num_draft_tokens": 3},
        },
        "settings": {"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}},
        "max_new_tokens": 10,
        "max_seq_len": 200,
    } | changes


def write_config(path, plain):
    """Writes a config file that says the same; returns its name."""
    pathlib.Path(path).write_text(_CONFIG_FILE.format(changes=json.dumps(plain)))
    return str(path)


def done_cells(workdir):
    """Returns the records of the finished cells by name, after checking that each was done once."""
    lines = [one for one in read_lines(workdir / "results.jsonl") if one["status"] == "done"]
    records = {one["cell"]: one["record"] for one in lines}
    assert len(records) == len(lines)
    return records


def without_times(records):
    """Returns records without what a clock has measured."""
    if isinstance(records, dict):
        return {
            key: without_times(value)
            for key, value in records.items()
            if not key.endswith("seconds")
        }
    return [without_times(one) for one in records] if isinstance(records, list) else records
