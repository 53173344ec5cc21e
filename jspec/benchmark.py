"""Measures jspec: its methods of generating, the parts of a round, starts, and what speeds them up.

`python -m jspec.benchmark --prompts_file=configs/prompts.jsonl --output_json=results.jsonl`
`python -m jspec.benchmark --target=TARGET --draft=DRAFT --drafters=none,prompt_lookup:5,model:5`
`python -m jspec.benchmark --measure=roofline --quick`
`python -m jspec.benchmark --measure=synthetic --draft=DRAFT --synthetic_acceptance=0.6,0.8`
`python -m jspec.benchmark --draw=RECORD.jsonl` (a figure of a roofline or of synthetic rates)

What is compared takes turns, repeat after repeat, after a warm-up: a machine that slows down slows
everything. Beside jspec's methods stand those of transformers, if torch is installed, and with
--llama_cpp those of llama.cpp: plain decoding, prompt lookup and assisted generation with the same
numbers of drafts. After the table of all ratios come Spec-Bench's columns by the prompts'
`category`; see `evaluation.benchmarking.by_task`.

The record is one JSON line with date, versions, hardware, flags and all that was measured; it is
written as measuring goes on.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator

from absl import flags

from jspec.common import cli
from jspec.common.errors import check_range
from jspec.common.text_table import format_table
from jspec.evaluation.benchmarking import measure_flags
from jspec.evaluation.benchmarking.baselines import Wanted
from jspec.evaluation.benchmarking.compare import compare
from jspec.evaluation.benchmarking.drafting import NUM_ROUNDS, measure_drafting
from jspec.evaluation.benchmarking.figures import draw_files
from jspec.evaluation.benchmarking.measure_flags import read_flags
from jspec.evaluation.benchmarking.measurement import (
    Measurement,
    choose_prompts,
    methods_asked_for,
    wants_transformers,
)
from jspec.evaluation.benchmarking.methods import make_generators
from jspec.evaluation.benchmarking.outcome import Outcome
from jspec.evaluation.benchmarking.profile import measure_profile
from jspec.evaluation.benchmarking.quantization import measure_quantization
from jspec.evaluation.benchmarking.roofline import FULL, QUICK, measure_roofline
from jspec.evaluation.benchmarking.same_answers import measure_parity
from jspec.evaluation.benchmarking.sampling import measure_sampling
from jspec.evaluation.benchmarking.start import measure_start
from jspec.evaluation.benchmarking.synthetic import measure_synthetic, parse_rates
from jspec.evaluation.benchmarking.transformers_baseline import check_transformers
from jspec.evaluation.experiments.kept_drafts import measure_kept_drafts
from jspec.generation.drafter_flags import read_options
from jspec.generation.generator import Generator
from jspec.generation.prompts import encode_prompt
from jspec.generation.provenance import Recorder
from jspec.generation.request import Request, Settings
from jspec.weights.resolver import check_device

flags.adopt_module_key_flags(measure_flags)  # so that --help lists them


def main() -> None:
    """Reads the flags, measures, prints a table, writes the record."""
    values = read_flags()
    if paths := values.pop("draw"):
        return draw_files(paths)
    options = read_options()
    asked = Measurement(
        values, options, methods_asked_for(values, options), wants_transformers(values)
    )
    recorded = values | {"drafter_options": dataclasses.asdict(options)}
    inputs = (values.get("prompts_file"), options.draft_table, values["target"],
              values.get("draft"))  # fmt: skip
    recorder, outcome = Recorder(values["output_json"], recorded, *inputs), None
    for outcome in _MODES[values["measure"]](asked):
        recorder.save(outcome.record, is_complete=False)
    assert outcome is not None
    print(outcome.text)
    recorder.save(outcome.record)
    if outcome.record.get("num_unexcused"):
        sys.exit(1)


def _methods(asked: Measurement) -> Iterator[Outcome]:
    prompts, tasks = choose_prompts(asked)
    own = {"acceptance": asked.acceptance, "max_seq_len": asked.max_seq_len}
    target, draft, generators = asked.generators(**own)
    wanted = None
    if asked.with_transformers or asked.llama_cpp is not None:
        wanted = Wanted.beside(
            asked.methods, transformers=asked.with_transformers, compiled=asked.compiled,
            llama_cpp=asked.llama_cpp,
        )  # fmt: skip
    other = draft  # transformers has no weights of jspec's integer forms
    if asked.with_transformers:
        check_transformers(target, draft)
        if draft is not None and draft.quantization is not None:
            other = asked.load("draft", is_rounded=False)
            note = f"it cannot load jspec's {draft.quantization}"
            print(f"note: transformers drafts with {draft.name} in {asked.dtype}: {note}",
                  file=sys.stderr)  # fmt: skip
    return compare(
        generators, prompts, tasks, max_new_tokens=asked.max_new_tokens, repeats=asked.repeats,
        temperature=asked.temperature, decoding=asked.decoding, wanted=wanted,
        baseline_draft=other,
    )  # fmt: skip


def _roofline(asked: Measurement) -> Iterator[Outcome]:
    target, draft, generators = asked.generators()
    scope = QUICK if asked.quick else FULL
    return measure_roofline(target, draft, generators, scope)


def _synthetic(asked: Measurement) -> Iterator[Outcome]:
    rates = parse_rates(asked.synthetic_acceptance)
    texts = [prompt.text for prompt in choose_prompts(asked)[0]]
    return measure_synthetic(
        asked.target_model(), asked.load("draft"), asked.methods, asked.options, rates, texts,
        asked.max_new_tokens, asked.repeats,
    )  # fmt: skip


def _start(asked: Measurement) -> Iterator[Outcome]:
    (method,) = asked.methods.values()
    return measure_start(asked.target, method.drafter, asked.max_new_tokens, asked.repeats)


def _sampling(asked: Measurement) -> Iterator[Outcome]:
    (generator,) = asked.generators()[2].values()
    return measure_sampling(generator, asked.max_new_tokens, asked.repeats)


def _drafting(asked: Measurement) -> Iterator[Outcome]:
    contexts, number = asked.contexts(), int(asked.num_draft_tokens)
    for context in contexts:
        check_range("context", context, NUM_ROUNDS + 2, 2**20)
    return measure_drafting(asked.target_model(), number, contexts, asked.repeats)


def _quantization(asked: Measurement) -> Iterator[Outcome]:
    check_device()
    return measure_quantization(asked.target, asked.dtype, asked.contexts()[0], asked.repeats)


def _acceptance(asked: Measurement) -> Iterator[Outcome]:
    settings = Settings(max_new_tokens=asked.max_new_tokens, temperature=asked.temperature)
    requests = [
        Request(prompt.text, dataclasses.replace(settings, seed=seed))
        for seed, prompt in enumerate(choose_prompts(asked)[0])
    ]
    names = [method.drafter for method in asked.methods.values()]
    report = measure_kept_drafts(
        requests, asked.target_model(), None, names, asked.options, num_draft_tokens=1, batch_size=1
    )
    rows = [
        [name, *("{value:.4f} [{low:.4f}, {high:.4f}]".format(**one[key]) for key in _SHOWN)]
        for name, one in report["drafters"].items()
    ]
    yield Outcome({"acceptance": report}, format_table(["", *_SHOWN.values()], rows))


_SHOWN = {"alpha": "expected", "kept": "observed"}


def _profile(asked: Measurement) -> Iterator[Outcome]:
    (generator,) = asked.generators()[2].values()
    settings = Settings(max_new_tokens=asked.max_new_tokens, temperature=asked.temperature)
    return measure_profile(generator, asked.contexts()[0], settings, asked.trace_folder)


def _parity(asked: Measurement) -> Iterator[Outcome]:
    texts = [prompt.text for prompt in choose_prompts(asked)[0]]
    settings = Settings(max_new_tokens=asked.max_new_tokens)
    target, draft = asked.target_model(), asked.load("draft")
    prompts = [encode_prompt(target, text, chat=None, system=None) for text in texts]

    def make(name: str, batch_size: int) -> Generator:
        methods = {name: asked.methods[name]}
        return make_generators(target, draft, methods, asked.options, batch_size=batch_size)[name]

    return measure_parity(target, list(asked.methods), make, prompts, settings, asked.batch_size)


_MODES: dict[str, Callable[[Measurement], Iterator[Outcome]]] = {
    "methods": _methods,
    "roofline": _roofline,
    "synthetic": _synthetic,
    "start": _start,
    "sampling": _sampling,
    "drafting": _drafting,
    "quantization": _quantization,
    "acceptance": _acceptance,
    "profile": _profile,
    "parity": _parity,
}

if __name__ == "__main__":
    cli.run_main(main)
