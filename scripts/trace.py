"""Shows one generation round by round: drafts accepted, rejected, and the target's own tokens.

`python scripts/trace.py --prompt="Count to ten." --drafter=prompt_lookup --workdir=DIR`

As Figure 1 of Leviathan et al. (arXiv 2211.17192), in the terminal. With --workdir the trace goes
to DIR/trace.json too, and `python scripts/summarize.py DIR` puts it, and a timeline of the calls as
in Figure 5, into the report.
"""

import json
import pathlib
import sys

from absl import flags

from jspec.common import cli
from jspec.common.errors import InputError
from jspec.common.json_lines import check_output
from jspec.drafters import choose_drafter
from jspec.evaluation.analysis.trace import to_svg, to_terminal
from jspec.evaluation.benchmarking.tracing import record_trace
from jspec.generation import drafter_flags, settings_flags
from jspec.generation.drafter_flags import read_drafter
from jspec.generation.flag_values import (
    QUANTIZATIONS,
    check_prompt_text,
    parse_num_draft_tokens,
    parse_quantization,
)
from jspec.generation.generator import DEFAULT_TARGET
from jspec.generation.programs import Programs
from jspec.generation.settings_flags import read_rule, read_settings
from jspec.generation.validate_options import check_read
from jspec.weights.resolver import load_model

flags.adopt_module_key_flags(drafter_flags)  # so that --help lists them
flags.adopt_module_key_flags(settings_flags)
_TARGET = flags.DEFINE_string("target", DEFAULT_TARGET, "The model whose answer is wanted.")
_DRAFT = flags.DEFINE_string("draft", None, "A draft model.")
_NUM_DRAFT_TOKENS = flags.DEFINE_string("num_draft_tokens", "5", "Drafts a round; or auto.")
_PROMPT = flags.DEFINE_string("prompt", None, "The prompt.")
_CHAT = flags.DEFINE_bool("chat", None, "Use the chat template. Default: if the model has one.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 48, "Tokens the answer may have.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of weights and caches.")
_DRAFT_QUANTIZATION = flags.DEFINE_enum(
    "draft_quantization", "none", QUANTIZATIONS, "Rounds the draft's weights."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Write NAME.json into this folder.")
_NAME = flags.DEFINE_string("name", "trace", "Begins with trace: several may be in a folder.")
_SVG = flags.DEFINE_string("svg", None, "Write an animated picture of it into this file.")
_COLOURS = flags.DEFINE_bool("colours", None, "Default: if standard output is a terminal.")


def main() -> None:
    """Generates, prints the trace, writes JSON."""
    prompt = check_prompt_text(_PROMPT.value)
    settings = read_settings(max_new_tokens=_MAX_NEW_TOKENS.value)
    acceptance, rule_options = read_rule()
    name, options = read_drafter()
    drafter = choose_drafter(
        name, has_draft=_DRAFT.value is not None, target=_TARGET.value, options=options
    )
    if drafter == "none":
        raise InputError("expected a drafter that drafts, got 'none'")
    number = parse_num_draft_tokens(_NUM_DRAFT_TOKENS.value)
    check_read(
        drafter,
        options,
        settings,
        num_draft_tokens=number,
        acceptance=acceptance,
        rule_options=rule_options,
    )
    output = None if _WORKDIR.value is None else _output(_WORKDIR.value, _NAME.value)
    draft = None
    if _DRAFT.value is not None:
        kind = parse_quantization(_DRAFT_QUANTIZATION.value)
        draft = load_model(_DRAFT.value, dtype=_DTYPE.value, quantization=kind)
    programs = Programs(
        load_model(_TARGET.value, dtype=_DTYPE.value),
        draft,
        drafter=drafter,
        num_draft_tokens=number,
        drafter_options=options,
        acceptance=acceptance,
        rule_options=rule_options,
    )
    argv = ["python", "scripts/trace.py", *sys.argv[1:]]
    trace = record_trace(programs, prompt, settings, chat=_CHAT.value, argv=argv)
    has_colours = sys.stdout.isatty() if _COLOURS.value is None else _COLOURS.value
    print(to_terminal(trace, has_colours=has_colours))
    if _SVG.value is not None:
        check_output(_SVG.value).write_text(to_svg(trace), encoding="utf-8")
    if output is not None:
        output.write_text(json.dumps(trace, ensure_ascii=False, indent=1), encoding="utf-8")


def _output(folder: str, name: str) -> pathlib.Path:
    """Returns the file of the trace.

    Raises:
      InputError: it cannot be written, or a report would not find it.
    """
    if not name.startswith("trace") or not name.replace("-", "").replace("_", "").isalnum():
        raise InputError(f"expected a name of letters that begins with trace, got {name!r}")
    return check_output(str(pathlib.Path(folder) / f"{name}.json"))


if __name__ == "__main__":
    cli.run_main(main)
