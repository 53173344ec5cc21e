"""Measures how fast jspec is: whole answers, the parts of a round, and the start of a process.

`python -m jspec.benchmark --prompts_file=configs/prompts.jsonl --output_json=results.jsonl`
`python -m jspec.benchmark --target=TARGET --draft=DRAFT --drafters=none,prompt_lookup:5,model:5`
`python -m jspec.benchmark --measure=roofline --quick`
`python -m jspec.benchmark --measure=synthetic --draft=DRAFT --synthetic_acceptance=0.6,0.8`
`python -m jspec.benchmark --draw=RECORD.jsonl` (a figure, or the tables of methods)

Whatever is compared is measured in turn, repeat after repeat, after a warm-up, so that a machine
that slows down slows everything equally. If torch is installed, transformers is measured beside
jspec, and with --llama_cpp llama.cpp, on the same .gguf files: plain decoding, prompt lookup, and
drafts of the draft model, by the fixed numbers of drafts that jspec has. The first table holds all
ratios, those after it the speed-ups by the prompts' `category`. An --output_json of methods that
was broken off is gone on with by the same command.

--output_json gets one JSON object with date, versions, hardware, flags and everything measured.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags

from jspec.cli import measure_flags, mesh_flags
from jspec.cli import program as cli
from jspec.cli.drafter_flags import read_options
from jspec.cli.measure_flags import read_flags
from jspec.common import exchange, processes
from jspec.common.text_table import format_table
from jspec.generation.provenance import Recorder
from jspec.generation.request import Request
from jspec.lab.benchmarking.compare import compare, compare_settings
from jspec.lab.benchmarking.figures import draw_files
from jspec.lab.benchmarking.loops import measure_drafting, measure_quantization
from jspec.lab.benchmarking.measurement import (
    Measurement,
    Outcome,
    begun_record,
    choose_prompts,
    methods_asked_for,
    wants_transformers,
)
from jspec.lab.benchmarking.profile import measure_profile
from jspec.lab.benchmarking.roofline import measure_roofline
from jspec.lab.benchmarking.same_answers import measure_parity
from jspec.lab.benchmarking.start import measure_start
from jspec.lab.benchmarking.synthetic import measure_synthetic
from jspec.lab.experiments.kept_drafts import measure_kept_drafts

_OF_ONE_RUN = "coordinator", "process_id"  # flags that do not say what is measured
flags.adopt_module_key_flags(measure_flags)  # so that --help lists them


def main() -> None:
    """Reads the flags, measures, prints a table, writes the record."""
    values = read_flags()
    if paths := values.pop("draw"):
        return draw_files(paths)
    options = read_options()
    asked = Measurement(
        **values,
        options=options,
        methods=methods_asked_for(values, options),
        with_transformers=wants_transformers(values),
    )
    with mesh_flags.flagged_mesh() if "mesh" in values else contextlib.nullcontext():
        num_unexcused = run(asked, values)
    if num_unexcused:
        sys.exit(1)


def run(asked: Measurement, values: dict[str, Any]) -> int:
    """Measures, in all processes; the first one writes and prints.

    Returns:
      How many methods of --measure=parity have other answers.
    """
    options = asked.options
    recorded = values | {"drafter_options": dataclasses.asdict(options)}
    recorded = {name: recorded[name] for name in recorded if name not in _OF_ONE_RUN}
    asked.begun = exchange.of_first(lambda: begun_record(values, recorded))
    inputs = (values.get("prompts_file"), options.draft_table, values["target"],
              values.get("draft"))  # fmt: skip
    path, outcome = values["output_json"] if processes.is_first() else None, None
    recorder = Recorder(path, recorded, *inputs)
    for outcome in _MODES[values["measure"]](asked):
        recorder.save(outcome.record, is_complete=False)
    assert outcome is not None
    print(outcome.text)
    recorder.save(outcome.record)
    return outcome.record.get("num_unexcused", 0)


def _acceptance(asked: Measurement) -> Iterator[Outcome]:
    requests = [
        Request(prompt.text, dataclasses.replace(asked.settings(), seed=seed))
        for seed, prompt in enumerate(choose_prompts(asked)[0])
    ]
    names = [method.drafter for method in asked.methods.values()]
    report = measure_kept_drafts(requests, asked.models()[0], names, asked.options)
    rows = [
        [name, *("{value:.4f} [{low:.4f}, {high:.4f}]".format(**one[key]) for key in _SHOWN)]
        for name, one in report["drafters"].items()
    ]
    yield Outcome({"acceptance": report}, format_table(["", *_SHOWN.values()], rows))


_SHOWN = {"alpha": "expected", "kept": "observed"}


_MODES: dict[str, Callable[[Measurement], Iterator[Outcome]]] = {
    "methods": compare,
    "roofline": measure_roofline,
    "synthetic": measure_synthetic,
    "start": measure_start,
    "sampling": compare_settings,
    "drafting": measure_drafting,
    "quantization": measure_quantization,
    "acceptance": _acceptance,
    "profile": measure_profile,
    "parity": measure_parity,
}

if __name__ == "__main__":
    cli.run_main(main)
