"""Measures how fast jspec is: whole answers, the parts of a round, or a server under load.

`python -m jspec.benchmark --prompts_file=configs/prompts.jsonl --output_json=results.jsonl`
`python -m jspec.benchmark --target=TARGET --draft=DRAFT --drafters=none,prompt_lookup:5,model:5`
`python -m jspec.benchmark --suite=open --target=TARGET --draft=DRAFT --output_json=board.jsonl`
`python -m jspec.benchmark --measure=round --quick`
`python -m jspec.benchmark --measure=server --url=http://127.0.0.1:8000 --streams=1,2,4,8`

methods: what is compared is measured in turn, repeat after repeat, after a warm-up, so that a
machine that slows down slows everything equally. If torch is installed, transformers is measured
beside jspec, and with --llama_cpp llama.cpp, on the same .gguf files: plain decoding, prompt
lookup, and drafts of the draft model, by the fixed numbers of drafts that jspec has. The first
table holds all ratios, those after it the speed-ups by the prompts' `category`. An --output_json of
methods that was broken off is gone on with by the same command.

suite (--suite=open): a leaderboard of every drafter that fits the models, by every lossless rule,
at temperature 0 and at --temperature, by the prompts' categories; memory, and what audits prove on
this machine. With --output_json=board.jsonl, the page board.md is written beside the record. It
stops after --minutes, and the same command goes on.

round: calls of the models beside the least time that this machine needs, drafting, the choice of
tokens and the host. server: any running server with OpenAI's interface.

--output_json gets one JSON object with date, versions, hardware, flags and everything measured.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags

from jspec.cli import measure_flags, mesh_flags
from jspec.cli import program as cli
from jspec.cli.answer_flags import read_options
from jspec.cli.measure_flags import read_flags
from jspec.common import processes
from jspec.generation.provenance import Recorder
from jspec.lab.benchmarking.compare import compare
from jspec.lab.benchmarking.measurement import (
    Measurement,
    Outcome,
    begun_record,
    methods_asked_for,
    wants_transformers,
)
from jspec.lab.benchmarking.operations import measure_operations
from jspec.lab.benchmarking.roofline import measure_roofline
from jspec.lab.benchmarking.server import measure_server
from jspec.lab.benchmarking.suite import measure_suite
from jspec.lab.reports.leaderboard import write_leaderboard

# Flags that do not say what is measured; a suite's audits say by themselves how many rows they had.
_OF_ONE_RUN = "coordinator", "process_id", "minutes", "audit_rows"
flags.adopt_module_key_flags(measure_flags)  # so that --help lists them


def main() -> None:
    """Reads the flags, measures, prints a table, writes the record."""
    values = read_flags()
    options = read_options()
    asked = Measurement(
        **values,
        options=options,
        methods=methods_asked_for(values, options),
        with_transformers=wants_transformers(values),
    )
    with mesh_flags.flagged_mesh() if "mesh" in values else contextlib.nullcontext():
        run(asked, values)


def run(asked: Measurement, values: dict[str, Any]) -> None:
    """Measures, in all processes; the first one writes and prints."""
    options = asked.options
    recorded = values | {"drafter_options": dataclasses.asdict(options)}
    recorded = {name: recorded[name] for name in recorded if name not in _OF_ONE_RUN}
    asked.begun = processes.of_first(lambda: begun_record(values, recorded))
    inputs = (values.get("prompts_file"), options.draft_table, values.get("target"),
              values.get("draft"))  # fmt: skip
    path, outcome = values["output_json"] if processes.is_first() else None, None
    recorder = Recorder(path, recorded, *inputs)
    for outcome in _MODES[values["measure"]](asked):
        recorder.save(outcome.record, is_complete=False)
    assert outcome is not None
    print(outcome.text)
    recorded_all = recorder.save(outcome.record, is_complete=outcome.is_complete)
    if values["measure"] == "suite" and path is not None:
        print(write_leaderboard(recorded_all, path))


_MODES: dict[str, Callable[[Measurement], Iterator[Outcome]]] = {
    "methods": compare,
    "suite": measure_suite,
    "round": measure_roofline,
    "operations": measure_operations,
    "server": measure_server,
}

if __name__ == "__main__":
    cli.run_main(main)
