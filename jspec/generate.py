"""Generates text: `python -m jspec.generate --prompt="Why is the sky blue?"`.

The text goes to standard output, everything else to standard error.
"""

import collections
import contextlib
import dataclasses
import statistics
import sys

from absl import flags

from jspec.common import cli
from jspec.common.cli import list_flags
from jspec.common.errors import InputError, prefixed_errors
from jspec.common.json_lines import JsonLinesWriter, check_unicode, title_of
from jspec.common.timing import Instant
from jspec.generation import answer_flags, drafter_flags
from jspec.generation.answer_flags import load_models, read_method, read_settings
from jspec.generation.costs import read_costs
from jspec.generation.generator import Generator
from jspec.generation.monitor import AcceptanceMonitor
from jspec.generation.prompts import Prompt, read_prompts
from jspec.generation.request import Request, Settings
from jspec.generation.result import Result
from jspec.generation.stats import by_drafter
from jspec.weights.quantize import KINDS

flags.adopt_module_key_flags(drafter_flags)  # so that --help lists them
flags.adopt_module_key_flags(answer_flags)
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
_STOP = flags.DEFINE_multi_string("stop", [], "A text that ends the answer. Repeatable.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Prompts answered at a time.")
_MAX_SEQ_LEN = flags.DEFINE_integer(
    "max_seq_len", None, "Tokens that prompt and answer may come to. Default: the model's context."
)
_STREAM = flags.DEFINE_bool("stream", True, "Print text as it comes (one prompt at a time).")
_OUTPUT_JSON = flags.DEFINE_string(
    "output_json", None, "Write one JSON object a prompt to this file, as each is finished."
)
_STATS = flags.DEFINE_bool(
    "stats", True, "Print statistics on standard error, and at first device and memory."
)

list_flags("Prompts", "prompt prompts_file system max_new_tokens stop batch_size", "chat")
list_flags("Output", "output_json stream stats")


def main() -> None:
    """Reads the flags, loads the models, answers the prompts."""
    settings = read_settings(stop=tuple(_STOP.value))
    method = read_method(settings)
    requests = make_requests(read_texts(_PROMPT.value, _PROMPTS_FILE.value), settings)
    costs = None if _COSTS_FILE.value is None else read_costs(_COSTS_FILE.value)
    monitor = AcceptanceMonitor()
    inputs = (_PROMPTS_FILE.value, _COSTS_FILE.value, method["drafter_options"].draft_table,
              answer_flags.TARGET.value, answer_flags.DRAFT.value)  # fmt: skip
    output = None if _OUTPUT_JSON.value is None else JsonLinesWriter(_OUTPUT_JSON.value, *inputs)
    with output or contextlib.nullcontext():
        loaded = Generator(
            *load_models(),
            **method,
            batch_size=_BATCH_SIZE.value,
            max_seq_len=_MAX_SEQ_LEN.value,
            costs=costs,
            on_result=monitor.add,
            # JAX without CUDA takes the CPU, and says nothing: the device is named.
            on_start=say if _STATS.value else None,
        )
        requests, problem = split_at_problem(loaded, requests)
        if requests:
            failed = answer(loaded, requests, output)
            problem = problem or failed
        has_categories = any(request.category is not None for request in requests)
        if _STATS.value and has_categories and loaded.num_draft_tokens:
            for recommendation in monitor.recommend(loaded.costs):
                say(f"category {recommendation}")
    if problem is not None:
        raise problem


def read_texts(prompt: str | None, prompts_file: str | None) -> list[Prompt]:
    """Returns the prompts.

    Raises:
      InputError: no prompt at all, two sources of them, an empty or broken text, or a broken
        line anywhere in the file.
    """
    if (prompt is None) == (prompts_file is None):
        given = "neither" if prompt is None else "both"
        raise InputError(f"expected either --prompt or --prompts_file, got {given}")
    if prompts_file is None:
        if not prompt:
            raise InputError("expected a text in --prompt, got an empty one")
        return [Prompt(check_unicode(prompt, "--prompt"))]
    texts = list(read_prompts(prompts_file))
    if not texts:
        raise InputError(f"expected at least one prompt in {title_of(prompts_file)}, got none")
    return texts


def make_requests(texts: list[Prompt], settings: Settings) -> list[Request]:
    """Returns the requests; prompt k gets seed + k.

    Raises:
      InputError: a seed above the largest.
    """
    requests = []
    for index, one in enumerate(texts):
        with prefixed_errors(f"prompt {index} uses seed + {index}"):
            own = dataclasses.replace(settings, seed=settings.seed + index)
        requests.append(Request(one.text, own, one.category))
    return requests


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


def answer(
    loaded: Generator, requests: list[Request], output: JsonLinesWriter | None
) -> InputError | None:
    """Answers the requests, writes what is finished, and shows what comes.

    Returns:
      What was wrong with the first answer that failed, if any did; the others are whole.
    """
    failed = None
    is_stream = _STREAM.value and _BATCH_SIZE.value == 1
    has_titles = _PROMPTS_FILE.value is not None
    notes, begun, number = list_notes(loaded), set[int](), loaded.describe()["num_draft_tokens"]
    start, num_tokens = Instant(), 0
    for piece in loaded.run(requests, chat=_CHAT.value, system=_SYSTEM.value):
        while notes:
            say(f"note: {notes.pop(0)}")
        result = piece.result
        if output is not None and result is not None:
            record = {"index": piece.index, **result.to_json()}
            output.write(record | {"settings": record["settings"] | loaded.describe()})
        if not is_stream and result is None:
            continue
        if has_titles and piece.index not in begun:
            print(f"--- prompt {piece.index} ---")
            begun.add(piece.index)
        num_tokens += len(piece.token_ids)
        print(piece.text if is_stream or result is None else result.text, end="", flush=True)
        if result is not None:
            print(flush=True)
            title = f"prompt {piece.index}: " if has_titles else ""
            if result.error is not None:
                failed = failed or InputError(f"{title}{result.error}")
            if _STATS.value:
                say(title + format_stats(result, number))
    if _STATS.value and len(requests) > 1:
        seconds = Instant().run_seconds_since(start)
        rate = num_tokens / max(seconds, 1e-9)
        say(f"{len(requests)} prompts: {num_tokens} tokens in {seconds:.1f} s without compilation, "
            f"{rate:.1f} tokens/s")  # fmt: skip
    return failed


def say(text: object) -> None:
    """Prints a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def list_notes(loaded: Generator) -> list[str]:
    """Returns what a reader of the answers has to know about the distribution they follow."""
    notes, target = [], loaded.target
    if target.quantization in KINDS:
        form = f"quantised to {target.quantization}"
        notes.append(f"the target is {form}: another model than {target.name}")
    if not loaded.is_lossless:
        notes.append(f"the acceptance rule {loaded.describe()['acceptance']!r} is lossy")
    return notes


def format_stats(result: Result, number: int | str) -> str:
    """Returns an answer's statistics; `number` of drafts a round, or "auto"."""
    stats = result.stats
    rate = "-" if stats.tokens_per_second is None else f"{stats.tokens_per_second:.1f}"
    line = (
        f"{len(result.token_ids)} tokens ({result.finish_reason}), {rate} tokens/s; "
        f"prefill {stats.prefill_seconds:.2f} s, decode {stats.decode_seconds:.2f} s, "
        f"compile {stats.compile_seconds:.2f} s"
    )
    accepted = "no drafts"
    if stats.acceptance_rate is not None:
        members = by_drafter(stats.rounds).items()
        shares = [f"{name} {own['num_accepted']} of {own['num_proposed']}" for name, own in members]
        accepted = f"acceptance {stats.acceptance_rate:.1%} ({', '.join(shares)} drafts)"
    per_call = stats.tokens_per_target_call
    calls = "-" if per_call is None else f"{per_call:.2f}"
    text = f"{line}\n{accepted}, {calls} tokens per target call"
    if isinstance(number, str):  # auto
        chosen = collections.Counter(one.num_proposed for one in stats.rounds)
        counts = ", ".join(f"{drafts} in {times}" for drafts, times in sorted(chosen.items()))
        text += f"\nauto: drafts in rounds: {counts or 'no rounds'}"
    if result.logprobs is not None and result.raw_logprobs is not None:
        mean, raw = (statistics.fmean(own) for own in (result.logprobs, result.raw_logprobs))
        text += f"\nmean log-probability {mean:.4f} as sampled, {raw:.4f} raw"
    return text


if __name__ == "__main__":
    cli.run_main(main)
