"""Times jspec, transformers and llama.cpp on the same weights and prompts, by turns.

`scripts/compare_cpu.sh --prompts_file=configs/prompts.jsonl --output_json=results.json`

The model is SmolLM2-135M-Instruct in bfloat16; llama.cpp gets it from its own `llama-quantize`, out
of the file that jspec reads. Answers are greedy, of `--max_new_tokens` at most. A repeat asks every
prompt of every way once; what is timed is a whole answer, prompt included, without loading and
compilation: of llama.cpp, whose programs load the model for every answer, what they print. Its
speculation drafts with the same model in Q4_1, for want of a smaller one with this tokenizer.
"""

import pathlib
import sys
import tempfile
from collections.abc import Mapping

import numpy as np
from absl import flags

from jspec.common import cli
from jspec.common.errors import InputError, check_range
from jspec.common.json_lines import JsonLinesWriter
from jspec.drafters import DrafterOptions, choose_drafter
from jspec.evaluation.benchmarking.baselines import (
    JSPEC_PLAIN,
    PEER_PLAIN,
    greedy_methods,
    jspec_generators,
    transformers_generators,
)
from jspec.evaluation.benchmarking.llama_cpp import LlamaFn, llama_methods
from jspec.evaluation.benchmarking.methods import parse_methods
from jspec.evaluation.benchmarking.peers import has_transformers
from jspec.evaluation.benchmarking.summary import summarise
from jspec.evaluation.benchmarking.timing import Timings, measure, warm_up
from jspec.generation import provenance
from jspec.generation.generator import DEFAULT_NUM_DRAFT_TOKENS, DEFAULT_TARGET, Generator
from jspec.generation.prompts import read_prompts
from jspec.weights.resolver import load_model

_LLAMA_CPP = flags.DEFINE_string("llama_cpp", None, "Folder of llama.cpp's programs.")
_PROMPTS_FILE = flags.DEFINE_string(
    "prompts_file", "configs/prompts.jsonl", "JSONL with `prompt` or Spec-Bench's `turns` a line."
)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Tokens an answer may have.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "How often each answer is timed.")
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write everything measured to this file.")

_NUM_DRAFTS = 5  # of prompt lookup, of all sides
_PEER_LOOKUP = f"transformers prompt_lookup:{_NUM_DRAFTS}"


def main() -> None:
    """Measures every way, repeat after repeat, and prints one table."""
    check_range("repeats", _REPEATS.value, 1, 1000)
    check_range("max_new_tokens", _MAX_NEW_TOKENS.value, 1, 4096)
    texts = [prompt.text for prompt in read_prompts(_PROMPTS_FILE.value)]
    if not texts:
        raise InputError(f"expected at least one prompt in {_PROMPTS_FILE.value}, got none")
    output = (
        None
        if _OUTPUT_JSON.value is None
        else JsonLinesWriter(_OUTPUT_JSON.value, _PROMPTS_FILE.value)
    )
    target = load_model(DEFAULT_TARGET, dtype="bfloat16")
    usual = choose_drafter(None, has_draft=False, target=DEFAULT_TARGET)
    own = parse_methods(
        ["none", f"prompt_lookup:{_NUM_DRAFTS}", usual], str(DEFAULT_NUM_DRAFT_TOKENS)
    )
    methods = greedy_methods(jspec_generators(target, None, own, DrafterOptions()))
    encode = Generator(target, drafter="none").encode_prompt
    prompts = [encode(text) for text in texts]
    warm_up(methods, prompts, _MAX_NEW_TOKENS.value)
    if has_transformers():
        pairs = {PEER_PLAIN: ("none", 0), _PEER_LOOKUP: ("prompt_lookup", _NUM_DRAFTS)}
        peers = transformers_generators(target, None, pairs)
        warm_up(peers, prompts[:1], _MAX_NEW_TOKENS.value)
        methods |= peers
    parts = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        files = [folder / f"{index}.txt" for index in range(len(prompts))]
        for file, text in zip(files, texts, strict=True):
            file.write_text(target.tokenizer.chat_prompt([{"role": "user", "content": text}]))
        others = {}
        if _LLAMA_CPP.value is not None:
            others = llama_methods(pathlib.Path(_LLAMA_CPP.value), num_drafts=_NUM_DRAFTS)
        for repeat in range(_REPEATS.value):
            print(f"repeat {repeat + 1} of {_REPEATS.value}", file=sys.stderr, flush=True)
            (own_timings,) = measure(methods, prompts, _MAX_NEW_TOKENS.value, 1)
            parts.append(own_timings | measure_files(others, files))
    timings = {method: join([part[method] for part in parts]) for method in parts[0]}
    report = summarise(timings, base=JSPEC_PLAIN)
    for method in others:
        del report[method]["same_answers"]  # its programs print texts, not ids
    for method, row in report.items():
        ratio = row["ratio_to"].get(JSPEC_PLAIN, {"median": 1.0, "low": 1.0, "high": 1.0})
        interval = "{median:.2f} [{low:.2f}, {high:.2f}]".format(**ratio)
        print(f"{method}: {row['tokens_per_second']:.1f} tokens/s, {interval} times jspec plain")
    if output is not None:
        with output:
            output.write(
                provenance.environment()
                | {
                    "methods": report,
                    "timings": {method: t.to_json() for method, t in timings.items()},
                }
            )


def measure_files(methods: Mapping[str, LlamaFn], files: list[pathlib.Path]) -> dict[str, Timings]:
    """Times every way on every prompt once."""
    timings = {}
    for name, answer in methods.items():
        pairs = [answer(file, _MAX_NEW_TOKENS.value) for file in files]
        seconds, tokens = np.array(pairs).T[:, None]
        nothing = np.zeros_like(tokens)
        timings[name] = Timings(seconds, tokens, nothing, nothing, [[] for _ in files])
    return timings


def join(parts: list[Timings]) -> Timings:
    """Returns the repeats of all parts, in order."""
    arrays = (np.concatenate(leaves) for leaves in zip(*(part[:4] for part in parts), strict=True))
    return Timings(*arrays, token_ids=parts[-1].token_ids)


if __name__ == "__main__":
    cli.run_main(main)
