"""Times jspec's drafters against jspec plain and transformers, on the same prompts, in one process.

`python -m jspec.benchmark --prompts_file=configs/prompts.jsonl --output_json=results.json`
`python -m jspec.benchmark --target=TARGET --draft=DRAFT --drafters=none,prompt_lookup:5,model:5`
`python -m jspec.benchmark --roofline`
`python -m jspec.benchmark --target=TARGET --draft=DRAFT --synthetic_acceptance=0.6,0.8`

Every method of generating answers every prompt in turn, repeat after repeat, after one round of
warm-up: a machine that slows down slows all of them. Decoding is greedy. A time is that of a whole
answer, prefill included, compilation excluded because everything has been compiled in the warm-up.

transformers decodes plainly, with --compiled by a compiled step as well, with prompt lookup, and
with the draft model (assisted generation), with the same numbers of drafts as jspec. Below the
ratios of all ways stand Spec-Bench's columns by the prompts' `category`; see
`benchmarking.by_task`.
"""

import dataclasses
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from jspec.common import cli
from jspec.common.errors import InputError, check_range
from jspec.common.json_lines import JsonLinesWriter, title_of
from jspec.drafters import DrafterOptions, choose_drafter
from jspec.evaluation.benchmarking.baselines import (
    JSPEC_PLAIN,
    PEER_PLAIN,
    greedy_methods,
    jspec_generators,
    peer_methods,
    working_peers,
)
from jspec.evaluation.benchmarking.by_task import columns_by_method, format_columns, tasks_of
from jspec.evaluation.benchmarking.methods import Method, check_methods, parse_methods
from jspec.evaluation.benchmarking.peers import check_peers, has_transformers
from jspec.evaluation.benchmarking.roofline import FULL, QUICK, format_lines, measure_roofline
from jspec.evaluation.benchmarking.summary import format_summary, summarise
from jspec.evaluation.benchmarking.synthetic import measure_synthetic, parse_rates
from jspec.evaluation.benchmarking.timing import measure, warm_up
from jspec.generation import drafter_flags, generator, provenance
from jspec.generation.drafter_flags import read_options
from jspec.generation.flag_values import QUANTIZATIONS, parse_quantization
from jspec.generation.generator import Generator
from jspec.generation.prompts import read_prompts
from jspec.generation.request import Settings
from jspec.weights.resolver import LoadedModel, load_model

flags.adopt_module_key_flags(drafter_flags)  # so that --help lists them
_TARGET = flags.DEFINE_string("target", generator.DEFAULT_TARGET, "The model.")
_DRAFT = flags.DEFINE_string("draft", None, "A draft model, for the drafter `model`.")
_DRAFTERS = flags.DEFINE_list(
    "drafters",
    None,
    "What to measure; DRAFTER:NUMBER gives one a number of drafts of its own, or auto. Default: "
    "none, prompt_lookup, and what jspec.generate drafts with if nothing is said.",
)
_NUM_DRAFT_TOKENS = flags.DEFINE_string(
    "num_draft_tokens", str(generator.DEFAULT_NUM_DRAFT_TOKENS), "Drafts a round."
)
_PROMPTS_FILE = flags.DEFINE_string(
    "prompts_file", "configs/prompts.jsonl", "JSONL with `prompt` or Spec-Bench's `turns` a line."
)
_NUM_PROMPTS = flags.DEFINE_integer(
    "num_prompts", 13, "Take so many prompts, evenly spaced over the file."
)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Tokens an answer may have.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "How often each answer is timed.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the weights.")
_TARGET_QUANTIZATION = flags.DEFINE_enum(
    "target_quantization", "none", QUANTIZATIONS, "Rounds the target's weights: another model."
)
_DRAFT_QUANTIZATION = flags.DEFINE_enum(
    "draft_quantization", "none", QUANTIZATIONS, "Rounds the draft's weights."
)
_TRANSFORMERS = flags.DEFINE_bool(
    "transformers",
    None,
    "Measure transformers too. Default: if torch is installed and the target is not rounded.",
)
_COMPILED = flags.DEFINE_bool(
    "compiled",
    False,
    "Measure transformers' plain decoding with a static cache and torch.compile too.",
)
_ROOFLINE = flags.DEFINE_bool(
    "roofline",
    False,
    "Measure calls and rounds instead of answers, beside the least time that the machine needs: "
    "some minutes.",
)
_QUICK = flags.DEFINE_bool(
    "quick", False, "Measure fewer calls for the roofline, and each less often."
)
_SYNTHETIC_ACCEPTANCE = flags.DEFINE_list(
    "synthetic_acceptance",
    None,
    "Measure rounds in which every draft is kept with each of these probabilities, whatever the "
    "models say: speed against acceptance where trained models are not at hand. The text means "
    "nothing.",
)
_OUTPUT_JSON = flags.DEFINE_string(
    "output_json", None, "Write everything measured to this file, as it is measured."
)
SaveFn = Callable[[dict[str, Any], bool], None]
"""(record, is_complete) -> written."""


def main() -> None:
    """Reads the flags, measures, prints tables, writes JSON."""
    drafters = _default_drafters() if _DRAFTERS.value is None else _DRAFTERS.value
    own_methods = parse_methods(drafters, _NUM_DRAFT_TOKENS.value)
    drafter_options = read_options()
    _check_flags(own_methods, drafter_options)
    rates = parse_rates(_SYNTHETIC_ACCEPTANCE.value or [])
    with_peers = not _ROOFLINE.value and not rates and _wants_transformers()
    if _COMPILED.value and not with_peers:
        raise InputError(
            "expected --compiled where transformers is measured, whose step it compiles"
        )
    texts, tasks = [], []
    if not _ROOFLINE.value:
        texts, tasks = _read_prompts(_PROMPTS_FILE.value, _NUM_PROMPTS.value)
    inputs = _PROMPTS_FILE.value, drafter_options.draft_table, _TARGET.value, _DRAFT.value
    output = None if _OUTPUT_JSON.value is None else JsonLinesWriter(_OUTPUT_JSON.value, *inputs)
    target = _load(_TARGET.value, _TARGET_QUANTIZATION.value)
    draft = _load(_DRAFT.value, _DRAFT_QUANTIZATION.value) if _DRAFT.value else None
    if with_peers:
        check_peers(target, draft)
    save = _saver(output, drafter_options)
    if rates:
        return _synthetic(target, draft, own_methods, drafter_options, rates, texts, save)
    generators = jspec_generators(target, draft, own_methods, drafter_options)
    if _ROOFLINE.value:
        return _roofline(target, draft, generators, drafter_options, save)
    peers = peer_methods(own_methods) if with_peers else None
    _answers(target, draft, generators, peers, texts, tasks, save)


def _saver(output: JsonLinesWriter | None, drafter_options: DrafterOptions) -> SaveFn:
    """Returns what writes a record of all that has been measured so far, or nothing.

    A program that is killed, or fails, leaves the record of what it had measured by then.
    """
    if output is None:
        return lambda record, is_complete: None
    common = provenance.environment() | {
        "flags": _flag_values(),
        "drafter_options": dataclasses.asdict(drafter_options),
    }
    return lambda record, is_complete: output.rewrite(common | record, is_complete=is_complete)


def _answers(
    target: LoadedModel,
    draft: LoadedModel | None,
    generators: Mapping[str, Generator],
    peers: Mapping[str, tuple[str, int]] | None,
    texts: list[str],
    tasks: list[str | None],
    save: SaveFn,
) -> None:
    """Times answers by jspec, and by transformers in the ways `peers`, if there are any."""
    methods = greedy_methods(generators)
    plain_of = dict.fromkeys(methods, JSPEC_PLAIN)
    prompts = [Generator(target, drafter="none").encode_prompt(text) for text in texts]
    warm_up(methods, prompts, _MAX_NEW_TOKENS.value)
    peak_bytes = _peak_bytes()
    left_out = {}
    if peers is not None:
        longest = max(map(len, prompts)) + _MAX_NEW_TOKENS.value
        working, left_out = working_peers(
            target,
            _peer_draft(draft),
            peers,
            compiled_length=longest if _COMPILED.value else None,
            warm_up=lambda method: warm_up(method, prompts[:2], _MAX_NEW_TOKENS.value),
        )
        methods |= working
        plain_of |= dict.fromkeys(working, PEER_PLAIN if PEER_PLAIN in working else JSPEC_PLAIN)
    record = {"peak_bytes": peak_bytes, "plain_of": plain_of, "tasks": tasks, "left_out": left_out}
    timings = {}
    for timings in measure(methods, prompts, _MAX_NEW_TOKENS.value, _REPEATS.value):
        record |= {"timings": {name: own.to_json() for name, own in timings.items()}}
        save(record, False)
    report = summarise(timings, base=next(iter(methods)))
    columns = columns_by_method(timings, plain_of, tasks)
    print(format_summary(report))
    if table := format_columns(columns, plain_of):
        print(f"\n{table}\n")
    before = ", before transformers was loaded" if peers is not None else ""
    print(f"peak memory of jspec{before}: {peak_bytes / 1e9:.2f} GB")
    if peers is not None and draft is not None and draft.quantization is not None:
        print(
            f"transformers drafts with {draft.name} in {_DTYPE.value}: it cannot load jspec's "
            f"{draft.quantization}, so the two sides' drafts are not the same model"
        )
    by_task = {name: own.to_json() for name, own in columns.items()}
    save(record | {"methods": report, "spec_bench": by_task}, True)


def _roofline(
    target: LoadedModel,
    draft: LoadedModel | None,
    generators: Mapping[str, Generator],
    drafter_options: DrafterOptions,
    save: SaveFn,
) -> None:
    scope = QUICK if _QUICK.value else FULL
    machine, lines, record = None, [], {}
    for machine, lines in measure_roofline(target, draft, generators, drafter_options, scope):
        record = {"machine": machine._asdict(), "lines": [line.to_json() for line in lines]}
        save(record, False)
    assert machine is not None
    print(format_lines(lines, machine))
    save(record, True)


def _synthetic(
    target: LoadedModel,
    draft: LoadedModel | None,
    methods: Mapping[str, Method],
    drafter_options: DrafterOptions,
    rates: list[float],
    texts: list[str],
    save: SaveFn,
) -> None:
    print("every draft is kept with a given probability: the text means nothing")
    lines, record = [], {}
    for lines in measure_synthetic(
        target, draft, methods, drafter_options, rates, texts, _MAX_NEW_TOKENS.value, _REPEATS.value
    ):
        record = {"is_meaningless": True, "lines": [line.to_json() for line in lines]}
        save(record, False)
    for line in lines:
        print(line)
    save(record, True)


def _default_drafters() -> list[str]:
    usual = choose_drafter(None, has_draft=_DRAFT.value is not None, target=_TARGET.value)
    return list(dict.fromkeys(["none", "prompt_lookup", usual]))


def _check_flags(own_methods: Mapping[str, Method], drafter_options: DrafterOptions) -> None:
    """Refuses what can be refused before anything is loaded."""
    if _DRAFT_QUANTIZATION.value != "none" and not _DRAFT.value:
        raise InputError("expected --draft with --draft_quantization")
    check_methods(own_methods, drafter_options, has_draft=bool(_DRAFT.value))
    check_range("repeats", _REPEATS.value, 1, 10**6)
    check_range("num_prompts", _NUM_PROMPTS.value, 1, 10**6)
    Settings(max_new_tokens=_MAX_NEW_TOKENS.value)
    if _ROOFLINE.value and _TRANSFORMERS.value:
        raise InputError("expected --roofline without --transformers: only jspec's calls are timed")
    unread = [flag for flag in (_PROMPTS_FILE, _NUM_PROMPTS, _MAX_NEW_TOKENS, _REPEATS)
              if _ROOFLINE.value and flag.present]  # fmt: skip
    if unread:
        raise InputError(f"expected --roofline without --{unread[0].name}: it answers no prompts")
    if _SYNTHETIC_ACCEPTANCE.present and not _SYNTHETIC_ACCEPTANCE.value:
        raise InputError("expected rates from 0 to 1 in --synthetic_acceptance, got none")
    if _QUICK.value and not _ROOFLINE.value:
        raise InputError("expected --quick with --roofline, which it makes shorter")
    if _SYNTHETIC_ACCEPTANCE.value and (_ROOFLINE.value or _TRANSFORMERS.value):
        raise InputError(
            "expected --synthetic_acceptance without --roofline and --transformers: they are "
            "measurements of their own"
        )


def _wants_transformers() -> bool:
    """Returns whether transformers is to be measured, and refuses it where it cannot be."""
    is_rounded = _TARGET_QUANTIZATION.value != "none"
    if _TRANSFORMERS.value is None:
        if not has_transformers():
            note = "note: transformers is not measured: torch is not installed (pip install torch)"
            print(note, file=sys.stderr, flush=True)
        return has_transformers() and not is_rounded
    if _TRANSFORMERS.value and is_rounded:
        raise InputError(
            "expected --transformers without --target_quantization: it cannot load rounded weights"
        )
    if _TRANSFORMERS.value and not has_transformers():
        raise InputError("expected torch and transformers to be installed, with --transformers")
    return _TRANSFORMERS.value


def _read_prompts(path: str, count: int) -> tuple[list[str], list[str | None]]:
    """Returns texts, evenly spaced over the file, and their tasks."""
    read = list(read_prompts(path))
    if not read:
        raise InputError(f"expected at least one prompt in {title_of(path)}, got none")
    tasks = tasks_of([one.category for one in read])
    places = range(len(read))
    if _NUM_PROMPTS.present and len(read) < count:
        print(f"note: {title_of(path)} has {len(read)} of {count} prompts", file=sys.stderr)
    if len(read) > count:
        places = [index * len(read) // count for index in range(count)]
    return [read[place].text for place in places], [tasks[place] for place in places]


def _load(name: str, quantization: str) -> LoadedModel:
    kind = parse_quantization(quantization)
    return load_model(name, dtype=_DTYPE.value, quantization=kind)


def _peer_draft(draft: LoadedModel | None) -> LoadedModel | None:
    """Returns the draft for transformers, which has no weights of jspec's integer forms."""
    if draft is None or draft.quantization is None:
        return draft
    return _load(draft.name, "none")


def _peak_bytes() -> int:
    """Returns the most memory that this process has had; macOS counts bytes, Linux kilobytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _flag_values() -> dict[str, Any]:
    own = (_TARGET, _TARGET_QUANTIZATION, _DRAFT, _DRAFT_QUANTIZATION, _DRAFTERS,
           _NUM_DRAFT_TOKENS, _PROMPTS_FILE, _NUM_PROMPTS, _MAX_NEW_TOKENS, _REPEATS,
           _DTYPE, _TRANSFORMERS, _COMPILED, _ROOFLINE, _QUICK, _SYNTHETIC_ACCEPTANCE)  # fmt: skip
    return {flag.name: flag.value for flag in own}


if __name__ == "__main__":
    cli.run_main(main)
