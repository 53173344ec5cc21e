"""Generates text: `python -m jspec.generate --prompt="Why is the sky blue?"`.

The text goes to standard output, everything else to standard error.
"""

import contextlib
import dataclasses
from collections.abc import Callable

from absl import flags
from jax.sharding import Mesh

from jspec.cli import answer_flags, mesh_flags
from jspec.cli import program as cli
from jspec.cli.answer_flags import load_models, read_method, read_rule, read_settings
from jspec.cli.program import list_flags
from jspec.common import processes
from jspec.common.errors import InputError, say
from jspec.common.json_lines import JsonLinesWriter, title_of
from jspec.common.timing import Instant
from jspec.drafters import DrafterOptions
from jspec.generation.auto import explain_no_drafts
from jspec.generation.costs import read_costs
from jspec.generation.generator import Generator
from jspec.generation.prompts import Prompt, prompts_of
from jspec.generation.request import Request, SamplingParams, nth_seed
from jspec.generation.result import Result, format_stats
from jspec.generation.rows import Row
from jspec.weights.quantize import KINDS, PACKED_A8

flags.adopt_module_key_flags(answer_flags)  # so that --help lists them
flags.adopt_module_key_flags(mesh_flags)
_COSTS_FILE = flags.DEFINE_string(
    "costs_file", None, "JSON file of what rounds cost, for --num_draft_tokens=auto: `costs` as an "
    "answer's `settings` in --output_json hold it. Default: measured once on this machine."
)  # fmt: skip
_COMPARE = flags.DEFINE_list(
    "compare", None, "Drafters to compare on the prompts, separated by commas, such as "
    "none,prompt_lookup,eagle:5 (5 drafts a round), in the place of --drafter: they answer by "
    "turns, three times, and a table says how fast. Texts are not printed."
)  # fmt: skip
_PROMPT = flags.DEFINE_string("prompt", None, "The prompt to answer; for several, --prompts_file.")
_PROMPTS_FILE = flags.DEFINE_string(
    "prompts_file", None, "File with one JSON object per line, with `prompt` (or Spec-Bench's "
    "`turns`); - for standard input. Prompt k uses --seed plus k."
)  # fmt: skip
_CHAT = flags.DEFINE_bool(
    "chat", None, "Put prompts into the model's chat template. Default: if it has any."
)
_SYSTEM = flags.DEFINE_string("system", None, "The system message of the chat template.")
_STOP = flags.DEFINE_multi_string(
    "stop", [], "A text that ends the answer. May be given several times."
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Number of prompts answered together.")
_MAX_SEQ_LEN = flags.DEFINE_integer(
    "max_seq_len", None, "Most tokens of prompt and answer together. Default: the model's context."
)
_STREAM = flags.DEFINE_bool(
    "stream", True, "Print text as it is generated, where prompts are answered one at a time."
)
_OUTPUT_JSON = flags.DEFINE_string(
    "output_json", None, "Write one JSON object per prompt to this file, as soon as it is answered."
)
_STATS = flags.DEFINE_bool("stats", True, "Print device, memory and statistics on standard error.")

list_flags("Prompts", "prompt prompts_file system max_new_tokens stop batch_size", "chat")
list_flags("Output", "output_json stream stats")
list_flags("Drafting", "compare")


def main() -> None:
    """Reads the flags, loads the models, answers the prompts."""
    with mesh_flags.flagged_mesh() as mesh:
        run(mesh)


def run(mesh: Mesh | None) -> None:
    """Runs on the devices of a mesh, or on the default device."""
    settings = read_settings(stop=tuple(_STOP.value))
    if _COMPARE.value is not None:
        return compare(_COMPARE.value, settings, read_texts(), mesh)
    method = read_method(settings)
    requests = make_requests(read_texts(), settings)
    if _COSTS_FILE.value is not None:
        method = dataclasses.replace(method, costs=read_costs(_COSTS_FILE.value))
    output = open_output(method.drafter_options)
    with output or contextlib.nullcontext():
        loaded = Generator(
            *load_models(mesh),
            method,
            batch_size=_BATCH_SIZE.value,
            max_seq_len=_MAX_SEQ_LEN.value,
            # JAX without CUDA takes the CPU, and says nothing: the device is named.
            notify=say if _STATS.value else None,
        )
        rows, problem = make_rows(loaded, requests)
        requests, results = requests[: len(rows)], list[Result]()
        if requests:
            failed = answer(loaded, requests, rows, results.append, output)
            problem = problem or failed
        has_categories = any(request.category is not None for request in requests)
        if _STATS.value and has_categories and loaded.num_draft_tokens:
            from jspec.generation.monitor import AcceptanceMonitor

            monitor = AcceptanceMonitor()
            for result in results:
                monitor.add(result)
            for recommendation in monitor.recommend(loaded.round_costs.known):
                say(f"category {recommendation}")
    if problem is not None:
        raise problem


def read_texts() -> list[Prompt]:
    """Returns the prompts that the flags give."""
    if (count := flags.FLAGS["prompt"].present) > 1:
        raise InputError(f"expected --prompt once, got it {count} times: see --prompts_file")
    return prompts_of(_PROMPT.value, _PROMPTS_FILE.value)


def compare(
    drafters: list[str], settings: SamplingParams, texts: list[Prompt], mesh: Mesh | None
) -> None:
    """Lets several drafters answer the prompts, and prints their table."""
    from jspec.lab.benchmarking import compare as table  # which nothing else here needs

    for flag in (_BATCH_SIZE, _COSTS_FILE, _STREAM):
        if flag.present:
            raise InputError(f"expected --compare without --{flag.name}, which it does not read")
    options, (rule, rule_options) = answer_flags.read_options("--compare"), read_rule()
    number, has_draft = answer_flags.NUM_DRAFT_TOKENS.value, answer_flags.has_draft()
    asked = table.read_methods(
        drafters, number, settings, options, rule, rule_options, has_draft=has_draft
    )
    output = open_output(options)
    generators = asked.generators(
        *load_models(mesh), rule_options=rule_options, acceptance=rule,
        max_seq_len=_MAX_SEQ_LEN.value, notify=say if _STATS.value else None,
    )  # fmt: skip
    encode = next(iter(generators.values())).encode_prompt
    prompts = [encode(prompt.text, _CHAT.value, _SYSTEM.value) for prompt in texts]
    report = table.compare_drafters(generators, prompts, settings, options)
    print(table.format_comparison(report))
    if output is not None:
        with output:
            for name, row in report.items():
                described = dataclasses.asdict(settings) | generators[name].describe()
                output.write({"compared": name, **row, "settings": described})


def open_output(options: DrafterOptions) -> JsonLinesWriter | None:
    """Returns what writes --output_json, which is no file that is read; None if it is not given."""
    if _OUTPUT_JSON.value is None or not processes.is_first():
        return None
    inputs = (_PROMPTS_FILE.value, _COSTS_FILE.value, options.draft_table,
              answer_flags.TARGET.value, answer_flags.DRAFT.value)  # fmt: skip
    return JsonLinesWriter(_OUTPUT_JSON.value, *inputs)


def make_requests(texts: list[Prompt], settings: SamplingParams) -> list[Request]:
    """Returns the requests; prompt k gets seed + k."""
    seeds = [nth_seed(settings.seed, index) for index in range(len(texts))]
    return [
        Request(prompt.text, dataclasses.replace(settings, seed=seed), prompt.category)
        for prompt, seed in zip(texts, seeds, strict=True)
    ]


def make_rows(loaded: Generator, requests: list[Request]) -> tuple[list[Row], InputError | None]:
    """Returns the rows of requests before the first that cannot be answered, and what is wrong."""
    rows = list[Row]()
    for index, request in enumerate(requests):
        try:
            rows.append(loaded.make_row(request, chat=_CHAT.value, system=_SYSTEM.value))
        except InputError as error:
            path = _PROMPTS_FILE.value
            where = "" if path is None else f"prompt {index} of {title_of(path)}: "
            return rows, InputError(f"{where}{error}")
    return rows, None


def answer(
    loaded: Generator,
    requests: list[Request],
    rows: list[Row],
    on_result: Callable[[Result], object],
    output: JsonLinesWriter | None,
) -> InputError | None:
    """Answers the requests, writes what is finished, and shows what comes.

    Returns:
      What was wrong with the first answer that failed, if any did; the others are whole.
    """
    failed = None
    is_stream = _STREAM.value and _BATCH_SIZE.value == 1
    has_titles = _PROMPTS_FILE.value is not None
    notes, begun, number = list_notes(loaded), set[int](), loaded.describe()["num_draft_tokens"]
    target = loaded.target
    if _CHAT.value is None and target.tokenizer.chat_template is None and not target.config.encoder:
        notes.append(f"{target.name} has no chat template: it only continues the prompt")
    longest = max(len(row.prompt) + row.settings.max_new_tokens for row in rows)
    if flags.FLAGS["max_new_tokens"].present and longest > loaded.max_seq_len:
        asked = f"--max_new_tokens={requests[0].settings.max_new_tokens}"
        notes.append(
            f"{asked} is reduced to what the context of {loaded.max_seq_len} tokens leaves after "
            "the prompt"
        )
    start, num_tokens = Instant(), 0
    for chunk in loaded.run(requests, rows=rows):
        while notes:
            say(f"note: {notes.pop(0)}")
        result = chunk.result
        if result is not None:
            on_result(result)
        if output is not None and result is not None:
            record = {"index": chunk.index, **result.to_json()}
            output.write(record | {"settings": record["settings"] | loaded.describe()})
        num_tokens += len(chunk.token_ids)
        if not is_stream and result is None:
            continue
        if has_titles and chunk.index not in begun:
            print(f"--- prompt {chunk.index} ---")
            begun.add(chunk.index)
        print(chunk.text if is_stream or result is None else result.text, end="", flush=True)
        if result is not None:
            print(flush=True)
            title = f"prompt {chunk.index}: " if has_titles else ""
            if result.error is not None:
                failed = failed or InputError(f"{title}{result.error}")
            if _STATS.value:
                say(title + format_stats(result, number, plain_steps(loaded, result)))
                if reason := why_no_drafts(loaded, result):
                    say(title + reason)
            if result.is_cut_by_context:
                context = f"the context of {loaded.max_seq_len} tokens is full"
                say(f"{title}note: {context}: the answer ends there")
    if _STATS.value and len(requests) > 1:
        seconds = Instant().run_seconds_since(start)
        rate = num_tokens / max(seconds, 1e-9)
        say(f"{len(requests)} prompts: {num_tokens} tokens in {seconds:.1f} s without compilation, "
            f"{rate:.1f} tokens/s")  # fmt: skip
    return failed


def plain_steps(loaded: Generator, result: Result) -> float | None:
    """Returns what a round of an answer cost on average, in plain steps; None if not measured."""
    if (costs := loaded.round_costs.known) is None or result.settings.num_beams > 1:
        return None
    return costs.plain_steps(result.stats.rounds, context_of(loaded, result))


def why_no_drafts(loaded: Generator, result: Result) -> str | None:
    """Returns why none of an answer's rounds had drafts, by known costs; None if that is not so."""
    costs, drafter = loaded.round_costs.known, loaded.engine.drafter
    if costs is None or drafter is None or result.settings.num_beams > 1:
        return None
    if result.stats.num_proposed:
        return None
    return explain_no_drafts(result, drafter, costs, context_of(loaded, result))


def context_of(loaded: Generator, result: Result) -> int:
    """Returns the cache slots of an answer's row."""
    length = len(result.prompt_token_ids) + result.settings.max_new_tokens
    return loaded.engine.capacity_for(min(length, loaded.max_seq_len))


def list_notes(loaded: Generator) -> list[str]:
    """Returns what a reader of the answers has to know about the distribution they follow."""
    notes, target = [], loaded.target
    if target.quantization in (*KINDS, PACKED_A8):
        form = f"quantised to {target.quantization}"
        notes.append(f"the target is {form}: another model than {target.name}")
    if not loaded.is_lossless:
        notes.append(f"the acceptance rule {loaded.describe()['acceptance']!r} is lossy")
    return notes


if __name__ == "__main__":
    cli.run_main(main)
