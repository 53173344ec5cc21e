"""Shows one generation round by round: drafts accepted, rejected, and the target's own tokens.

`python scripts/trace.py --prompt="Count to ten." --drafter=prompt_lookup --workdir=DIR`

As Figure 1 of Leviathan et al. (arXiv 2211.17192), in the terminal. With --workdir the trace goes
to DIR/trace.json too, and `python -m jspec.report DIR` puts it, and a timeline of the calls as
in Figure 5, into the report.
"""

import json
import pathlib
import sys

from absl import flags

from jspec.cli import answer_flags
from jspec.cli import program as cli
from jspec.cli.answer_flags import load_models, read_method, read_settings
from jspec.common.errors import InputError
from jspec.common.json_lines import check_output
from jspec.common.work_dir import make_workdir
from jspec.generation.generator import Generator
from jspec.lab.analysis.trace import to_svg, to_terminal
from jspec.lab.benchmarking.tracing import record_trace

flags.adopt_module_key_flags(answer_flags)  # so that --help lists them
flags.FLAGS.set_default("num_draft_tokens", "5")
flags.FLAGS.set_default("max_new_tokens", 48)
_PROMPT = flags.DEFINE_string("prompt", None, "The prompt to answer.")
_CHAT = flags.DEFINE_bool("chat", None, "Use the chat template. Default: if the model has any.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Write the trace to NAME.json here.")
_NAME = flags.DEFINE_string("name", "trace", "NAME of the trace; begins with trace.")
_SVG = flags.DEFINE_string("svg", None, "Write an animated picture to this file.")
_COLOURS = flags.DEFINE_bool("colours", None, "Print colours. Default: on a terminal.")


def main() -> None:
    """Generates, prints the trace, writes JSON."""
    if _PROMPT.value is None:
        raise InputError("expected --prompt, got none")
    if flags.FLAGS.drafter == "none":
        raise InputError("expected a drafter that drafts, got 'none'")
    settings = read_settings()
    method = read_method(settings)
    picture = None if _SVG.value is None else check_output(_SVG.value)
    generator = Generator(*load_models(), method)
    # A misspelled model leaves no folder.
    output = None if _WORKDIR.value is None else _output(_WORKDIR.value, _NAME.value)
    argv = ["python", "scripts/trace.py", *sys.argv[1:]]
    trace = record_trace(generator, _PROMPT.value, settings, chat=_CHAT.value, argv=argv)
    has_colours = sys.stdout.isatty() if _COLOURS.value is None else _COLOURS.value
    print(to_terminal(trace, has_colours=has_colours))
    if picture is not None:
        picture.write_text(to_svg(trace), encoding="utf-8")
    if output is not None:
        output.write_text(json.dumps(trace, ensure_ascii=False, indent=1), encoding="utf-8")


def _output(folder: str, name: str) -> pathlib.Path:
    """Returns the file of the trace, whose folder is made.

    Raises:
      InputError: it cannot be written, or a report would not find it.
    """
    if not name.startswith("trace") or not name.replace("-", "").replace("_", "").isalnum():
        raise InputError(f"expected a name of letters that begins with trace, got {name!r}")
    make_workdir(pathlib.Path(folder))
    return check_output(str(pathlib.Path(folder) / f"{name}.json"))


if __name__ == "__main__":
    cli.run_main(main)
