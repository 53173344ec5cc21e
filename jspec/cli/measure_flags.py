"""The flags of `python -m jspec.benchmark`, and which mode of measuring reads which of them."""

import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags

from jspec.cli import answer_flags, mesh_flags
from jspec.cli.program import list_flags
from jspec.common.errors import InputError, check_among, check_range
from jspec.generation.request import SamplingParams
from jspec.lab.benchmarking.baselines import check_programs
from jspec.lab.benchmarking.measurement import SUITES
from jspec.weights.published import MODELS

# Of the programs that answer prompts; their other flags are not read here.
_OF_ANSWERS = (
    "target", "draft", "num_draft_tokens", "dtype", "target_quantization", "draft_quantization",
    "acceptance", "max_new_tokens", "temperature",
)  # fmt: skip
for _name in (*answer_flags.OF_DRAFTERS, *_OF_ANSWERS):  # so that --help lists them
    flags.declare_key_flag(_name)
flags.FLAGS.set_default("max_new_tokens", 128)
flags.FLAGS.set_default("temperature", 0.0)
flags.FLAGS[
    "temperature"
].help = "Temperature of the answers; above 0, prompt k of repeat r has the seed 1000 r + k."
flags.adopt_module_key_flags(mesh_flags)

_MODELS = "draft target_quantization draft_quantization drafters num_draft_tokens"
_PROMPTS = "prompts_file num_prompts max_new_tokens"
_DEVICES = "mesh coordinator num_processes process_id"
_READ_BY = {  # besides those of `_ALWAYS`
    "methods": f"target dtype {_MODELS} {_PROMPTS} per_category repeats temperature acceptance "
    f"max_seq_len decoding transformers compiled llama_cpp {_DEVICES}",
    "suite": f"suite target dtype {_MODELS} {_PROMPTS} per_category repeats temperature "
    "max_seq_len minutes audit_rows",
    "round": f"target dtype {_MODELS} quick trace_folder",
    "operations": f"target dtype {_MODELS} {_PROMPTS} per_category temperature batch_sizes",
    "server": f"url streams {_PROMPTS} per_category repeats temperature",
}
_MEASURE = (
    "What to measure. methods: whole answers of jspec and of other libraries, side by side; round: "
    "calls and rounds beside the least time that this machine needs; operations: a round of each "
    "drafter by its operations, in batches of --batch_sizes; server: a running server, "
    "asked by several clients at once; suite: what --suite names."
)
# What a suite takes where nobody says otherwise: it has many rows.
_SUITE_DEFAULTS = {
    "num_draft_tokens": "3", "max_new_tokens": 64, "repeats": 2, "temperature": 1.0,
}  # fmt: skip
_ALWAYS = "measure", "output_json"
_HOLDERS: list[Any] = [
    *(flags.FLAGS[name] for name in _OF_ANSWERS),
    mesh_flags.MESH,
    *mesh_flags.OF_PROCESSES,
    flags.DEFINE_enum(
        "measure",
        "methods",
        list(_READ_BY),
        _MEASURE,
    ),
    flags.DEFINE_string(
        "suite",
        None,
        f"Measure a whole leaderboard: {', '.join(SUITES)}. By default 3 drafts a round, 64 new "
        "tokens, 2 repeats, and temperature 1 beside 0; --drafters picks some of those that fit.",
    ),
    flags.DEFINE_float(
        "minutes", 60.0, "Minutes after which no further row of a suite is begun; the same command "
        "goes on."
    ),
    flags.DEFINE_integer(
        "audit_rows", 1024, "Rows of the test of the distribution in a suite's audits; 0 audits "
        "nothing, and only looks up earlier audits."
    ),
    flags.DEFINE_list(
        "drafters",
        None,
        "Drafters to measure, separated by commas. DRAFTER:NUMBER sets its number of drafts per "
        "round, DRAFTER:auto adapts it. Default: none, prompt_lookup and the default of "
        "jspec.generate.",
    ),
    flags.DEFINE_string(
        "prompts_file",
        "configs/prompts.jsonl",
        "File with one JSON object per line, with `prompt` or Spec-Bench's `turns`.",
    ),
    flags.DEFINE_integer(
        "num_prompts", None, "Number of prompts, evenly spaced over the file. Default: 13."
    ),
    flags.DEFINE_integer(
        "per_category", None, "Number of prompts of each category, in place of --num_prompts."
    ),
    flags.DEFINE_integer(
        "max_seq_len", None, "Most tokens of prompt and answer together. Default: the model's "
        "context."
    ),
    flags.DEFINE_integer("repeats", 5, "Number of repeats of each measurement."),
    flags.DEFINE_bool("decoding", False, "Time decoding alone, without prefill."),
    flags.DEFINE_bool(
        "transformers",
        None,
        "Measure transformers too. Default: if torch is installed and the target is not rounded.",
    ),
    flags.DEFINE_bool(
        "compiled",
        False,
        "Measure transformers' plain decoding with a static cache and torch.compile too.",
    ),
    flags.DEFINE_string(
        "llama_cpp", None, "Folder with llama.cpp's programs, to measure llama.cpp too, on the "
        "same .gguf files."
    ),
    flags.DEFINE_bool("quick", False, "Measure fewer kinds of calls, and each less often."),
    flags.DEFINE_string(
        "trace_folder", None, "Write a profile of an answer by the last drafter here."
    ),
    flags.DEFINE_string("url", "http://127.0.0.1:8000", "Address of the server."),
    flags.DEFINE_list("streams", ["1", "2", "4", "8"], "Numbers of clients that ask at once."),
    flags.DEFINE_list("batch_sizes", ["1", "4", "8", "16"], "Numbers of rows answered at once."),
    flags.DEFINE_string(
        "output_json", None, "Write everything to this JSON file, as it is measured. The same "
        "command goes on with a run of methods that was broken off."
    ),
]  # fmt: skip
flags.FLAGS["measure"].help = _MEASURE  # absl would list the modes once more

list_flags("Models", "max_seq_len")
list_flags("Prompts", "prompts_file num_prompts per_category max_new_tokens")
list_flags("Drafting", "drafters")
list_flags("Output", "output_json trace_folder")


def read_flags() -> dict[str, Any]:
    """Returns the values of the flags that the mode reads.

    Raises:
      InputError: a flag that it does not read, or a value out of range.
    """
    values = {holder.name: holder.value for holder in _HOLDERS}
    if values["suite"] is not None:
        check_among("suite", values["suite"], SUITES)
        if flags.FLAGS["measure"].present and values["measure"] != "suite":
            raise InputError(f"expected --suite without --measure={values['measure']}")
        values["measure"] = "suite"
        given = {holder.name for holder in _HOLDERS if holder.present}
        values |= {name: v for name, v in _SUITE_DEFAULTS.items() if name not in given}
    mode = values["measure"]
    names = [*_ALWAYS, *_READ_BY[mode].split()]
    for holder in _HOLDERS:
        if holder.present and holder.name not in names:
            readers = [name for name, read in _READ_BY.items() if holder.name in read.split()]
            raise InputError(
                f"expected --{holder.name} with --measure={' or '.join(readers)}, got it with "
                f"{mode}"
            )
    read = {*_OF_ANSWERS, *answer_flags.OF_DRAFTERS, "drafter"}  # the last by `read_options`
    for flag in flags.FLAGS.get_key_flags_for_module(answer_flags):
        if flag.present and flag.name not in read:
            raise InputError(f"expected no --{flag.name}, which no measurement reads")
    _check_values(values)
    for name in {"streams", "batch_sizes"} & {*names}:
        values[name] = _read_counts(name, values[name])
    return {name: values[name] for name in names}


def _read_counts(name: str, texts: Sequence[str]) -> list[int]:
    if not texts or not all(text.isdecimal() for text in texts):
        given = repr(",".join(texts)) if texts else "none"
        raise InputError(f"expected whole numbers in --{name}, got {given}")
    for text in texts:
        check_range(name, int(text), 1, 4096)
    return [int(text) for text in texts]


def _check_suite(values: dict[str, Any]) -> None:
    if values["suite"] is None:
        raise InputError(f"expected --suite, one of {', '.join(SUITES)}, with --measure=suite")
    check_range("minutes", values["minutes"], 0, 10**6)
    check_range("audit_rows", values["audit_rows"], 0, 10**7)
    if values["temperature"] == 0:
        raise InputError("expected --temperature above 0 with --suite, which measures 0 too; got 0")


def _check_values(values: dict[str, Any]) -> None:
    check_range("repeats", values["repeats"], 1, 10**6)
    if values["measure"] == "suite":
        _check_suite(values)
    if values["num_prompts"] is not None:
        check_range("num_prompts", values["num_prompts"], 1, 10**6)
    if values["per_category"] is not None:
        check_range("per_category", values["per_category"], 1, 1000)
    SamplingParams(max_new_tokens=values["max_new_tokens"], temperature=values["temperature"])
    if values["llama_cpp"] is not None:
        if values["coordinator"] is not None:
            raise InputError("expected --llama_cpp without --coordinator: it is one process")
        for name in filter(None, (values["target"], values["draft"])):
            if name not in MODELS and not name.endswith(".gguf"):
                raise InputError(f"expected --llama_cpp with models of .gguf files, got {name}")
        check_programs(pathlib.Path(values["llama_cpp"]))
    if values["draft_quantization"] != "auto" and not values["draft"]:
        raise InputError("expected --draft with --draft_quantization")
