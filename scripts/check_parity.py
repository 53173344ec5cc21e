"""Checks that greedy text is the same, token for token, however it is generated (float32).

`python scripts/check_parity.py --prompts_file=configs/prompts.jsonl`

Plain decoding, prompt lookup, a draft model of tiny random weights (mostly wrong), the target
as its own draft (always right), a batch of several rows, and transformers (if torch is installed).
Exits with status 1 at any difference, and prints where it is.
"""

import dataclasses
import sys

from absl import flags

from jspec import cli
from jspec.generator import DEFAULT_TARGET, Generator
from jspec.models import LlamaConfig
from jspec.peers import has_transformers, transformers_generators
from jspec.prompts import read_prompts
from jspec.request import Request, Settings
from jspec.weights.random_weights import random_params
from jspec.weights.resolver import LoadedModel, load_model

_TARGET = flags.DEFINE_string("target", DEFAULT_TARGET, "The model.")
_PROMPTS_FILE = flags.DEFINE_string("prompts_file", "configs/prompts.jsonl", "JSONL of prompts.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Tokens an answer may have.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Rows of the batched run.")


def main() -> None:
    """Generates every answer in every way and compares."""
    target = load_model(_TARGET.value, dtype="float32")
    plain = Generator(target, drafter="none")
    prompts = [plain.encode_prompt(text) for text in read_prompts(_PROMPTS_FILE.value)]
    expected = answers(plain, prompts, _MAX_NEW_TOKENS.value)
    ways = {
        "prompt_lookup": Generator(target, drafter="prompt_lookup"),
        "prompt_lookup, batched": Generator(target, batch_size=_BATCH_SIZE.value),
        "model, tiny random draft": Generator(target, tiny_draft(target)),
        "model, draft = target": Generator(target, dataclasses.replace(target)),
    }
    num_different = 0
    for name, loaded in ways.items():
        num_different += compare(name, answers(loaded, prompts, _MAX_NEW_TOKENS.value), expected)
    if has_transformers():
        generate = transformers_generators(target, 5)["transformers plain"]
        theirs = [generate(prompt, _MAX_NEW_TOKENS.value) for prompt in prompts]
        num_different += compare("transformers", theirs, expected)
    if num_different:
        sys.exit(1)


def answers(loaded: Generator, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Returns the token ids of every prompt's greedy answer."""
    settings = Settings(max_new_tokens=max_new_tokens)
    results = loaded.generate([Request(prompt, settings) for prompt in prompts])
    return [result.token_ids for result in results]


def tiny_draft(target: LoadedModel) -> LoadedModel:
    """Returns a two-layer model of random weights with the target's vocabulary."""
    config = LlamaConfig(
        vocab_size=target.config.vocab_size, embed_dim=64, hidden_dim=128, num_layers=2,
        num_heads=2, num_kv_heads=1, head_dim=32, max_seq_len=target.config.max_seq_len,
        tie_embeddings=True,
    )  # fmt: skip
    params = random_params(config, 0, "float32")
    return LoadedModel(config, params, target.tokenizer, "tiny random draft", "random")


def compare(name: str, found: list[list[int]], expected: list[list[int]]) -> int:
    """Prints how many answers equal plain decoding's; returns how many do not."""
    different = [
        i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]
    ]
    num_tokens = sum(map(len, expected))
    print(f"{name}: {len(expected) - len(different)} of {len(expected)} answers equal plain "
          f"decoding's ({num_tokens} tokens)", flush=True)  # fmt: skip
    for index in different:
        pairs = zip(found[index], expected[index], strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), "the shorter one's end")
        print(f"  prompt {index}: first difference at token {place}")
    return len(different)


if __name__ == "__main__":
    cli.run_main(main)
