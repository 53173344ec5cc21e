"""Compares methods of generating and baselines on the same prompts, in one process.

Every method answers every prompt in turn, repeat after repeat, after a warm-up: a machine that
slows down slows all of them. A time is that of a whole answer, prompt included, or of decoding
alone (`_CLOCKS`), compilation excluded. Drafters on the user's own prompts, of `jspec generate
--compare`, stand beside one another in a smaller table.
"""

import math
import pathlib
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError, prefixed_errors, say
from jspec.common.text_table import NOTHING, format_table, number_cell
from jspec.drafters import DrafterOptions, without_unread
from jspec.generation.generator import Generator
from jspec.generation.options import check_draft_sampling, check_rule_options, settings_read_by
from jspec.generation.request import Request, SamplingParams
from jspec.lab.benchmarking.answers import (
    JSPEC_PLAIN,
    Answers,
    Generated,
    GenerateFn,
    answer_in_turn,
    answer_with,
    columns_by_method,
    format_columns,
    format_summary,
    gives_one_text,
    one_of_each_size,
    summarise,
    time_in_turn,
    timings_of,
    warm_up,
)
from jspec.lab.benchmarking.baselines import (
    LLAMA_PLAIN,
    LlamaCpp,
    TransformersModels,
    transformers_methods,
)
from jspec.lab.benchmarking.measurement import (
    Measurement,
    Outcome,
    check_methods,
    choose_prompts,
    digest_of_prompts,
    parse_methods,
)
from jspec.speculation.acceptance import RuleOptions
from jspec.weights.resolver import LoadedModel

_DRAFTER_COLUMNS = (
    "drafter", "tokens/s", "speed-up", "tokens a target call", "accepted", "same text",
)  # fmt: skip
_REPEATS = 3  # the middle one of three counts
# Of answers with fewer tokens even the middle speed changes by a third from run to run.
_FEW_TOKENS = 64
_CLOCKS = {  # what the times of --decoding are
    "jspec": "from the first token's arrival to the last's: rounds, their drafts and the host",
    "transformers": "from the end of the call that reads the prompt: calls, drafts and sampling",
    "llama.cpp": "as printed, without loading and prompt; plain's is without sampling",
}


def compare(asked: Measurement) -> Iterator[Outcome]:
    """Measures answers of jspec's methods and of baselines; yields after each prompt.

    The first method is what answers are compared with. Answers of a run that was broken off count.

    Raises:
      InputError: the run that was broken off had other prompts.
    """
    prompts, tasks = choose_prompts(asked)
    options = {"acceptance": asked.acceptance, "max_seq_len": asked.max_seq_len}
    target, draft = asked.models()
    generators = asked.generators(target, draft, **options)
    if asked.with_transformers:
        check_vocabularies(target, draft)
    settings, some = asked.settings(), next(iter(generators.values()))
    methods = {
        name: answer_with(generator, settings, decoding=asked.decoding)
        for name, generator in generators.items()
    }
    texts = [prompt.text for prompt in prompts]
    ids = [some.encode_prompt(text) for text in texts]
    digest, begun = digest_of_prompts(asked, ids), asked.begun
    if begun:
        say(f"going on with {asked.output_json}")
    warm_up(methods, one_of_each_size(some.engine, ids, settings.max_new_tokens))
    peak_bytes = _peak_bytes()
    working, left_out = _working_baselines(asked, target, draft, texts, ids)
    methods |= working
    bases = plain_of(list(methods))
    record = {
        "peak_bytes": peak_bytes,
        "plain_of": bases,
        "tasks": list(tasks),
        "left_out": left_out,
        "described": {name: generator.describe() for name, generator in generators.items()},
        "clocks": _CLOCKS if asked.decoding else "whole answers, prompt included",
        "prompts_digest": digest,
    }
    answers: Answers = {}
    known = {
        name: [[Generated(*answer) for answer in row] for row in rows]
        for name, rows in begun.get("answers", {}).items()
    }
    for answers in answer_in_turn(methods, ids, asked.repeats, known, generators.values()):
        yield Outcome(record | {"answers": answers})
    timings = timings_of(answers)
    record |= {
        "answers": answers,
        "timings": {name: timing.to_json() for name, timing in timings.items()},
        "methods": summarise(timings, is_one_text=gives_one_text(settings, asked.acceptance)),
        "spec_bench": columns_by_method(timings, bases, tasks),
    }
    if working and any(tasks):
        record["by_task"] = columns_by_method(timings, dict.fromkeys(bases, JSPEC_PLAIN), tasks)
    yield Outcome(record, format_record(record))


def format_record(record: Mapping[str, Any]) -> str:
    """Returns the tables of a whole record: ratios, Spec-Bench's columns, memory."""
    bases, baselines = record["plain_of"], len(record["plain_of"]) > len(record["described"])
    columns = format_columns(record["spec_bench"], bases)
    over, title = dict.fromkeys(bases, JSPEC_PLAIN), "over jspec plain / mean accepted tokens"
    by_task = format_columns(record["by_task"], over, title) if "by_task" in record else ""
    before = ", before the baselines were loaded" * (baselines or bool(record["left_out"]))
    memory = f"peak memory of jspec{before}: {record['peak_bytes'] / 1e9:.2f} GB"
    return "\n\n".join(filter(None, (format_summary(record["methods"]), columns, by_task, memory)))


def _working_baselines(
    asked: Measurement,
    target: LoadedModel,
    draft: LoadedModel | None,
    texts: Sequence[str],
    prompts: Sequence[list[int]],
) -> tuple[dict[str, GenerateFn], dict[str, str]]:
    """Returns the baselines that are wanted and work here, and why others are left out, by name.

    What torch's compiler needs, for example a C compiler, may be missing: the rest is measured.
    """
    alike, max_new_tokens = transformers_methods(asked.methods), asked.max_new_tokens
    clock = {"temperature": asked.temperature, "decoding": asked.decoding}

    def make_transformers() -> dict[str, GenerateFn]:
        models = TransformersModels(target, transformers_draft(asked, draft), **clock)
        made = {name: models.method(*pair, max_new_tokens) for name, pair in alike.items()}
        if asked.compiled:
            length = max(map(len, prompts)) + max_new_tokens
            made["transformers plain, compiled"] = models.compiled_method(length, max_new_tokens)
        return made

    def make_llama_cpp() -> dict[str, GenerateFn]:
        chats = [[{"role": "user", "content": text}] for text in texts]
        written = map(target.tokenizer.chat_prompt, chats)
        by_ids = dict(zip(map(tuple, prompts), written, strict=True))
        programs = LlamaCpp(pathlib.Path(asked.llama_cpp), by_ids, max_new_tokens, **clock)
        return programs.methods(target, draft, alike)

    makers = [(list(alike), make_transformers)] if asked.with_transformers else []
    if asked.llama_cpp is not None:
        makers.append(([LLAMA_PLAIN], make_llama_cpp))
    working, left_out = {}, {}
    for names, make in makers:
        try:
            made = make()
        except Exception as error:  # whatever another library may raise, here and below
            left_out |= dict.fromkeys(names, _reason(error))
            continue
        for name, generate in made.items():
            try:
                warm_up({name: generate}, prompts[:1])
                working[name] = generate
            except Exception as error:
                left_out[name] = _reason(error)
    for name, reason in left_out.items():
        say(f"note: {name} is left out: {reason}")
    return working, left_out


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def plain_of(names: Sequence[str]) -> dict[str, str]:
    """Returns, for each method, plain decoding by the same program, or else jspec's."""
    bases = {name: f"{name.split()[0]} plain" for name in names}
    return {name: plain if plain in names else JSPEC_PLAIN for name, plain in bases.items()}


def check_vocabularies(target: LoadedModel, draft: LoadedModel | None) -> None:
    """Raises an `InputError` for a draft model that transformers will not draft with."""
    if draft is not None and draft.config.vocab_size != target.config.vocab_size:
        raise InputError(
            f"expected a draft of {target.config.vocab_size} ids for transformers, which wants as "
            f"many as the target has, got {draft.config.vocab_size} ({draft.name}); "
            "--notransformers leaves it out"
        )


def transformers_draft(asked: Measurement, draft: LoadedModel | None) -> LoadedModel | None:
    """Returns the draft model as transformers can load it, which has no integer weights."""
    if draft is None or draft.quantization is None:
        return draft
    note = f"it cannot load jspec's {draft.quantization}"
    say(f"note: transformers drafts with {draft.name} in {asked.dtype}: {note}")
    return asked.load("draft", is_rounded=False)


def _peak_bytes() -> int:
    """Returns the most memory that this process has had; macOS counts bytes, Linux kilobytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def read_methods(
    drafters: Sequence[str],
    num_draft_tokens: str,
    settings: SamplingParams,
    options: DrafterOptions,
    acceptance: str,
    rule_options: RuleOptions,
    *,
    has_draft: bool,
) -> Measurement:
    """Returns what is compared, by the names that the table gives it; no model is loaded before.

    Raises:
      InputError: a drafter that there is not, or an option that none of them reads.
    """
    parsed = parse_methods(drafters, num_draft_tokens)
    methods = dict(zip(drafters, parsed.values(), strict=True))
    check_methods(methods, options, has_draft=has_draft)
    names = [method.drafter for method in methods.values()]
    check_draft_sampling(settings, [(name, without_unread(name, options)) for name in names])
    drafting = [name for name in names if name != "none"]
    check_rule_options(rule_options, acceptance, (*drafting, "none")[0])
    return Measurement(methods=methods, options=options)


def compare_drafters(
    generators: Mapping[str, Generator],
    prompts: Sequence[list[int]],
    settings: SamplingParams,
    options: DrafterOptions,
) -> dict[str, dict[str, Any]]:
    """Lets the Generators answer the prompts, token ids, by turns: prompt k first with seed + k.

    Returns:
      Plain values of each drafter: tokens a second of decoding, that over the first's (`speedup`),
      tokens a target call, the acceptance rate, the tokens that were timed each time, and how many
      answers are the first's, token by token; None where that cannot be said, as of sampled
      answers.

    Raises:
      InputError: a prompt that cannot be answered, before anything is compiled.
    """
    answers: dict[str, GenerateFn] = {}
    for name, generator in generators.items():
        read = settings_read_by(generator.drafter, options, settings)
        for index, prompt in enumerate(prompts):
            with prefixed_errors(f"prompt {index}"):
                generator.check(Request(prompt, read))
        answers[name] = answer_with(generator, read, decoding=True)
    first, *_ = generators
    all_generators, most = list(generators.values()), settings.max_new_tokens
    timings = time_in_turn(answers, all_generators, prompts, _REPEATS, most)
    rule = generators[first].describe()["acceptance"]
    report = summarise(timings, is_one_text=gives_one_text(settings, rule))
    for name, row in report.items():
        row["num_tokens"] = int(timings[name].tokens[-1].sum())
        ratios = row.pop("ratio_to")
        ratio = 1.0 if name == first else ratios[first]["median"]
        row["speedup"] = ratio if math.isfinite(ratio) else None
    return report


def format_comparison(report: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the table of `compare_drafters`."""
    rows = [
        [
            name,
            number_cell(row["tokens_per_second"], ".1f"),
            number_cell(row["speedup"], ".2f"),
            number_cell(row["tokens_per_target_call"], ".2f"),
            number_cell(row["acceptance_rate"], ".1%"),
            _same_cell(row["same_answers"], row["num_prompts"]),
        ]
        for name, row in report.items()
    ]
    table = format_table(_DRAFTER_COLUMNS, rows)
    fewest = min(row["num_tokens"] for row in report.values())
    if fewest >= _FEW_TOKENS:
        return table
    return (
        f"{table}\nnote: too short to compare: {fewest} tokens were timed; give more prompts or "
        f"--max_new_tokens, for {_FEW_TOKENS} or more"
    )


def _same_cell(num_same: int | None, num_prompts: int) -> str:
    if num_same is None:
        return NOTHING
    return f"{num_same} of {num_prompts}" if num_prompts > 1 else ("no", "yes")[num_same]
