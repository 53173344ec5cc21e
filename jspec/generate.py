"""Generates text: `python -m jspec.generate --prompt="Why is the sky blue?"`.

The text goes to standard output, everything else to standard error.
"""

import contextlib
import dataclasses
import sys

from absl import flags

from jspec.common import cli
from jspec.common.cli import list_flags
from jspec.common.errors import InputError
from jspec.common.json_lines import JsonLinesWriter, title_of
from jspec.common.memory import Budget
from jspec.drafters import choose_drafter
from jspec.generation import drafter_flags, generator, settings_flags
from jspec.generation.costs import read_costs
from jspec.generation.drafter_flags import read_drafter
from jspec.generation.flag_values import (
    QUANTIZATIONS,
    check_prompt_text,
    parse_num_draft_tokens,
    parse_quantization,
)
from jspec.generation.generator import Generator
from jspec.generation.monitor import AcceptanceMonitor
from jspec.generation.printer import Printer
from jspec.generation.prompts import Prompt, read_prompts
from jspec.generation.request import MAX_SEED, Request, Settings
from jspec.generation.settings_flags import read_rule, read_settings
from jspec.generation.validate_options import check_read

flags.adopt_module_key_flags(drafter_flags)  # so that --help lists them
flags.adopt_module_key_flags(settings_flags)
_TARGET = flags.DEFINE_string(
    "target",
    generator.DEFAULT_TARGET,
    "The model whose answers are wanted: a Hugging Face folder or hub name, a .gguf file, an Orbax "
    "folder, smollm2-135m-instruct, or random:<preset>.",
)
_DRAFT = flags.DEFINE_string("draft", None, "A cheaper model of the same vocabulary; likewise.")
_NUM_DRAFT_TOKENS = flags.DEFINE_string(
    "num_draft_tokens", str(generator.DEFAULT_NUM_DRAFT_TOKENS), "Drafts a round; auto chooses "
    "them, round by round, from what has been accepted and what rounds cost on this machine."
)  # fmt: skip
_COSTS_FILE = flags.DEFINE_string(
    "costs_file", None, "What rounds cost, for auto, as `settings` of an answer have it under "
    "`costs`. Default: measured on this machine, once."
)  # fmt: skip
_PROMPT = flags.DEFINE_string("prompt", None, "One prompt.")
_PROMPTS_FILE = flags.DEFINE_string(
    "prompts_file", None, "JSONL with `prompt` (or Spec-Bench's `turns`) a line; - for standard "
    "input. Prompt k uses seed + k."
)  # fmt: skip
_CHAT = flags.DEFINE_bool(
    "chat", None, "Put prompts into the chat template. Default: if the model has one."
)
_SYSTEM = flags.DEFINE_string("system", None, "A system message for the chat template.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "Tokens an answer may have.")
_STOP = flags.DEFINE_multi_string("stop", [], "A text that ends the answer. Repeatable.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Prompts answered at a time.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of weights and caches.")
_MAX_SEQ_LEN = flags.DEFINE_integer(
    "max_seq_len", None, "Tokens that prompt and answer may come to. Default: the model's context."
)
_TARGET_QUANTIZATION = flags.DEFINE_enum(
    "target_quantization", "none", QUANTIZATIONS, "Rounds the target's weights: another model."
)
_DRAFT_QUANTIZATION = flags.DEFINE_enum(
    "draft_quantization", "none", QUANTIZATIONS, "Rounds the draft's weights."
)
_STREAM = flags.DEFINE_bool("stream", True, "Print text as it comes (one prompt at a time).")
_OUTPUT_JSON = flags.DEFINE_string(
    "output_json", None, "Write one JSON object a prompt to this file, as each is finished."
)
_STATS = flags.DEFINE_bool(
    "stats", True, "Print statistics on standard error, and at first device and memory."
)

list_flags("Models", "target draft dtype draft_quantization", "target_quantization max_seq_len")
list_flags("Prompts", "prompt prompts_file system max_new_tokens stop batch_size", "chat")
list_flags("Output", "output_json stream stats")


def main() -> None:
    """Reads the flags, loads the models, answers the prompts."""
    settings = read_settings(max_new_tokens=_MAX_NEW_TOKENS.value, stop=tuple(_STOP.value))
    acceptance, rule_options = read_rule()
    drafter, drafter_options = read_drafter()
    drafter = choose_drafter(
        drafter,
        has_draft=_DRAFT.value is not None,
        target=_TARGET.value,
        options=drafter_options,
    )
    num_draft_tokens = parse_num_draft_tokens(_NUM_DRAFT_TOKENS.value)
    check_read(
        drafter,
        drafter_options,
        settings,
        num_draft_tokens=num_draft_tokens,
        acceptance=acceptance,
        rule_options=rule_options,
    )
    texts, problem = read_texts(_PROMPT.value, _PROMPTS_FILE.value)
    requests = make_requests(texts, settings)
    costs = None if _COSTS_FILE.value is None else read_costs(_COSTS_FILE.value)
    monitor = AcceptanceMonitor()
    inputs = (_PROMPTS_FILE.value, _COSTS_FILE.value, drafter_options.draft_table, _TARGET.value,
              _DRAFT.value)  # fmt: skip
    output = None if _OUTPUT_JSON.value is None else JsonLinesWriter(_OUTPUT_JSON.value, *inputs)
    with output or contextlib.nullcontext():
        loaded = Generator.load(
            _TARGET.value,
            _DRAFT.value,
            dtype=_DTYPE.value,
            target_quantization=parse_quantization(_TARGET_QUANTIZATION.value),
            draft_quantization=parse_quantization(_DRAFT_QUANTIZATION.value),
            drafter=drafter,
            drafter_options=drafter_options,
            num_draft_tokens=num_draft_tokens,
            acceptance=acceptance,
            rule_options=rule_options,
            batch_size=_BATCH_SIZE.value,
            max_seq_len=_MAX_SEQ_LEN.value,
            costs=costs,
            on_result=monitor.add,
            on_start=show_budget if _STATS.value else None,
        )
        requests, earlier = split_at_problem(loaded, requests)
        if requests:
            answer(loaded, requests, output)
        has_categories = any(request.category is not None for request in requests)
        if _STATS.value and has_categories and loaded.num_draft_tokens:
            for recommendation in monitor.recommend(loaded.costs):
                print(f"category {recommendation}", file=sys.stderr, flush=True)
    if problem := earlier or problem:
        raise problem


def make_requests(texts: list[Prompt], settings: Settings) -> list[Request]:
    """Returns the requests; prompt k gets seed + k.

    Raises:
      InputError: a seed above the largest.
    """
    last = len(texts) - 1
    if settings.seed + last > MAX_SEED:
        raise InputError(
            f"expected a seed of at most {MAX_SEED - last}, as prompt k uses seed + k and the last "
            f"is prompt {last}; got {settings.seed}"
        )
    return [
        Request(one.text, dataclasses.replace(settings, seed=settings.seed + index), one.category)
        for index, one in enumerate(texts)
    ]


def split_at_problem(
    loaded: Generator, requests: list[Request]
) -> tuple[list[Request], InputError | None]:
    """Returns the requests before the first that cannot be answered, and what is wrong with it."""
    for index, request in enumerate(requests):
        try:
            loaded.check(request, chat=_CHAT.value, system=_SYSTEM.value)
        except InputError as error:
            path = _PROMPTS_FILE.value
            where = "" if path is None else f"prompt {index} of {title_of(path)}: "
            return requests[:index], InputError(f"{where}{error}")
    return requests, None


def answer(loaded: Generator, requests: list[Request], output: JsonLinesWriter | None) -> None:
    """Answers the requests, writes what is finished, and shows what comes."""
    printer = Printer(
        stream=_STREAM.value and _BATCH_SIZE.value == 1,
        stats=_STATS.value,
        notes=list_notes(loaded),
        has_titles=_PROMPTS_FILE.value is not None,
    )
    for piece in loaded.run(requests, chat=_CHAT.value, system=_SYSTEM.value):
        if output is not None and piece.result is not None:
            record = {"index": piece.index, **piece.result.to_json()}
            output.write(record | {"settings": record["settings"] | loaded.describe()})
        printer.show(piece)


def show_budget(budget: Budget) -> None:
    """Prints where answers are computed: JAX without CUDA takes the CPU, and says nothing."""
    print(budget, file=sys.stderr, flush=True)


def list_notes(loaded: Generator) -> list[str]:
    """Returns what a reader of the answers has to know about the distribution they follow."""
    settings = loaded.describe()
    notes = []
    if settings["target_quantization"] is not None:
        notes.append(
            f"the target is quantised to {settings['target_quantization']}: another model than "
            f"{settings['target']}"
        )
    if not settings["is_lossless"]:
        notes.append(f"the acceptance rule {settings['acceptance']!r} is lossy")
    return notes


def read_texts(
    prompt: str | None, prompts_file: str | None
) -> tuple[list[Prompt], InputError | None]:
    """Returns the prompts, and what is wrong with the file after the last of them.

    Raises:
      InputError: no prompt at all, or two sources of them.
    """
    if (prompt is None) == (prompts_file is None):
        given = "neither" if prompt is None else "both"
        raise InputError(f"expected either --prompt or --prompts_file, got {given}")
    if prompts_file is None:
        return [Prompt(check_prompt_text(prompt))], None
    texts: list[Prompt] = []
    problem = None
    try:
        texts.extend(read_prompts(prompts_file))
    except InputError as error:
        problem = error
    if not texts:
        raise problem or InputError(
            f"expected at least one prompt in {title_of(prompts_file)}, got none"
        )
    return texts, problem


if __name__ == "__main__":
    cli.run_main(main)
