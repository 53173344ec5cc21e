"""The flags of `python -m jspec.benchmark`, and which mode of measuring reads which of them."""

from typing import Any

from absl import flags

from jspec.common.errors import InputError, check_range
from jspec.drafters import DEFAULT_NUM_DRAFT_TOKENS
from jspec.generation import drafter_flags
from jspec.generation.flag_values import QUANTIZATION_FLAG
from jspec.generation.generator import DEFAULT_TARGET
from jspec.generation.request import Settings
from jspec.weights import smollm2

for _flag in flags.FLAGS.get_key_flags_for_module(drafter_flags):  # so that --help lists them
    if _flag.name != "drafter":  # --drafters stands here for it
        flags.declare_key_flag(_flag.name)

_MODELS = "draft target_quantization draft_quantization drafters num_draft_tokens"
_PROMPTS = "prompts_file num_prompts max_new_tokens"
_READ_BY = {  # besides those of `_ALWAYS`
    "methods": f"{_MODELS} {_PROMPTS} per_category repeats temperature acceptance max_seq_len "
    "decoding transformers compiled llama_cpp",
    "roofline": f"{_MODELS} quick",
    "synthetic": f"{_MODELS} {_PROMPTS} repeats synthetic_acceptance",
    "start": "drafters max_new_tokens repeats",
    "sampling": f"{_MODELS} max_new_tokens repeats",
    "drafting": "num_draft_tokens context repeats",
    "quantization": "context repeats",
    "acceptance": f"drafters {_PROMPTS} temperature",
    "profile": f"{_MODELS} context max_new_tokens temperature trace_folder",
    "parity": f"{_MODELS} {_PROMPTS} batch_size",
}
_ALWAYS = ("measure", "draw", "target", "dtype", "output_json")
_HOLDERS = [
    flags.DEFINE_enum(
        "measure",
        "methods",
        list(_READ_BY),
        "What is measured: methods of generating and baselines, by their answers; roofline: calls "
        "and rounds beside the least time that the machine needs; synthetic: speed against given "
        "rates of acceptance; start: a process up to its first answer; sampling: filters and "
        "processors; drafting: drafters that look back, alone; quantization: bytes and steps of "
        "rounded weights; acceptance: kept drafts in theory and in fact; profile: a trace of an "
        "answer; parity: whether all greedy answers are plain decoding's.",
    ),
    flags.DEFINE_list(
        "draw", None, "Draw these records of rooflines or synthetic rates, beside them, instead."
    ),
    flags.DEFINE_string("target", DEFAULT_TARGET, "The model."),
    flags.DEFINE_string("draft", None, "A draft model, for the drafters model and hierarchical."),
    flags.DEFINE_list(
        "drafters",
        None,
        "What to measure; DRAFTER:NUMBER gives one a number of drafts of its own, or auto, except "
        "with start and acceptance. One for start, sampling and profile. Default: none, "
        "prompt_lookup, and what jspec.generate drafts with if nothing is said, or what fits the "
        "mode.",
    ),
    flags.DEFINE_string("num_draft_tokens", str(DEFAULT_NUM_DRAFT_TOKENS), "Drafts a round."),
    flags.DEFINE_string(
        "prompts_file",
        "configs/prompts.jsonl",
        "JSONL with `prompt` or Spec-Bench's `turns` a line.",
    ),
    flags.DEFINE_integer("num_prompts", 13, "Take this many prompts, evenly spaced over the file."),
    flags.DEFINE_integer("per_category", None, "Or the first prompts of each category."),
    flags.DEFINE_integer("max_new_tokens", 128, "Tokens an answer may have."),
    flags.DEFINE_integer("max_seq_len", None, "Tokens of prompt and answer. Default: the model's."),
    flags.DEFINE_integer("repeats", 5, "Repeats of each measurement."),
    flags.DEFINE_float("temperature", 0.0, "Of answers; methods give prompt k of repeat r the "
        "seed 1000 r + k."),
    flags.DEFINE_string("acceptance", "rejection", "The acceptance rule."),
    flags.DEFINE_bool("decoding", False, "Time decoding alone, without the prompt; of jspec only."),
    flags.DEFINE_enum(
        "dtype", None, ["bfloat16", "float32"], "Of weights. Default: bfloat16, parity float32."
    ),
    flags.DEFINE_enum(
        "target_quantization", "auto", QUANTIZATION_FLAG, "int8 and int4 round the target's "
        "weights: another model. packed leaves a .gguf file's as they are, none makes them floats."
    ),
    flags.DEFINE_enum(
        "draft_quantization", "auto", QUANTIZATION_FLAG, "The same for the draft's weights."
    ),
    flags.DEFINE_bool(
        "transformers",
        None,
        "Measure transformers too. Default: if torch is installed, answers are greedy and timed "
        "with their prompts, and the target is not rounded.",
    ),
    flags.DEFINE_bool(
        "compiled",
        False,
        "Measure transformers' plain decoding with a static cache and torch.compile too.",
    ),
    flags.DEFINE_string(
        "llama_cpp", None, "Measure llama.cpp too, whose programs are in this folder."
    ),
    flags.DEFINE_bool("quick", False, "Measure fewer calls, and each less often."),
    flags.DEFINE_list(
        "synthetic_acceptance",
        ["0.6", "0.7", "0.8", "0.9"],
        "Probabilities with which every draft is kept, whatever the models say: speed against "
        "acceptance where trained models are not at hand. The text means nothing.",
    ),
    flags.DEFINE_multi_integer(
        "context", None, "Tokens before what is timed, several for drafting. Default: 512 to 8192, "
        "quantization 256, profile 128."
    ),
    flags.DEFINE_integer("batch_size", 8, "Rows of batches."),
    flags.DEFINE_string("trace_folder", None, "Put the profiler's trace here."),
    flags.DEFINE_string(
        "output_json", None, "Write everything measured to this file, as it is measured."
    ),
]  # fmt: skip


def read_flags() -> dict[str, Any]:
    """Returns the values of the flags that the mode reads.

    Raises:
      InputError: a flag that it does not read, or a value out of range.
    """
    values = {holder.name: holder.value for holder in _HOLDERS}
    mode = values["measure"]
    names = [*_ALWAYS, *_READ_BY[mode].split()]
    for holder in _HOLDERS:
        if holder.present and holder.name not in names:
            readers = [name for name, read in _READ_BY.items() if holder.name in read.split()]
            raise InputError(
                f"expected --{holder.name} with --measure={' or '.join(readers)}, got it with "
                f"{mode}"
            )
    if values["dtype"] is None:
        values["dtype"] = "float32" if mode == "parity" else "bfloat16"
    _check_values(values)
    return {name: values[name] for name in names}


def _check_values(values: dict[str, Any]) -> None:
    check_range("repeats", values["repeats"], 1, 10**6)
    check_range("num_prompts", values["num_prompts"], 1, 10**6)
    check_range("batch_size", values["batch_size"], 1, 4096)
    if values["per_category"] is not None:
        check_range("per_category", values["per_category"], 1, 1000)
    for context in values["context"] or ():
        check_range("context", context, 1, 2**20)
    Settings(max_new_tokens=values["max_new_tokens"], temperature=values["temperature"])
    if values["llama_cpp"] is not None and values["target"] != smollm2.NAME:
        raise InputError(
            f"expected --llama_cpp with the target {smollm2.NAME}, got {values['target']}"
        )
    if values["draft_quantization"] != "auto" and not values["draft"]:
        raise InputError("expected --draft with --draft_quantization")
