"""Transcribes speech: `python -m jspec.transcribe FILE.wav --target=openai/whisper-base`.

The file is WAV, one channel of 16-bit samples, 16,000 a second. The transcript goes to standard
output, a line a segment, as soon as a window of 30 s is done; everything else to standard error.
"""

import contextlib
import dataclasses

from absl import flags

from jspec.audio import Transcriber, read_wav
from jspec.audio.transcriber import Window, processors_of
from jspec.cli import answer_flags
from jspec.cli import program as cli
from jspec.cli.answer_flags import load_models, read_method, read_settings
from jspec.cli.program import list_flags
from jspec.common.errors import InputError, say
from jspec.common.json_lines import JsonLinesWriter
from jspec.generation.generator import Generator
from jspec.generation.result import Result

flags.adopt_module_key_flags(answer_flags)  # so that --help lists them
flags.FLAGS.set_default("target", None)
flags.FLAGS["target"].help = (
    "The model that hears, which must be given: a Whisper, as a Hugging Face folder or hub name, "
    "or as a folder of CTranslate2."
)
_LANGUAGE = flags.DEFINE_string(
    "language", None, "What is spoken, such as en. Default: the model says it."
)
_TASK = flags.DEFINE_enum(
    "task",
    "transcribe",
    ["transcribe", "translate"],
    "transcribe writes the language that is spoken, translate writes English.",
)
_TIMESTAMPS = flags.DEFINE_bool("timestamps", True, "Print when each segment begins and ends.")
_OUTPUT_JSON = flags.DEFINE_string(
    "output_json", None, "Write one JSON object per segment to this file, as soon as it is there."
)
_STATS = flags.DEFINE_bool("stats", True, "Print device, memory and statistics on standard error.")
_MAX_NEW_TOKENS = 256  # the default, which is for answers

list_flags("Output", "timestamps output_json stats")
list_flags("Prompts", "language task max_new_tokens")


def main(path: str | None = None) -> None:
    """Reads the file and the flags, loads the models, writes the transcript."""
    if path is None:
        raise InputError("expected a file: jspec transcribe FILE.wav --target=openai/whisper-base")
    samples, settings = read_wav(path), read_settings()
    if not flags.FLAGS["target"].present:
        raise InputError(
            "expected a model that hears, such as --target=openai/whisper-base, got no --target"
        )
    if not flags.FLAGS["max_new_tokens"].present:  # as many as a window may have
        settings = dataclasses.replace(settings, max_new_tokens=_MAX_NEW_TOKENS)
    method = read_method(settings)
    output = None
    if _OUTPUT_JSON.value is not None:
        output = JsonLinesWriter(_OUTPUT_JSON.value, path)
    with output or contextlib.nullcontext():
        target, draft = load_models()
        generator = Generator(
            target, draft, method,
            processors=processors_of(target),
            notify=say if _STATS.value else None,
        )  # fmt: skip
        transcriber = Transcriber(generator, _LANGUAGE.value, _TASK.value)
        windows = list[Window]()
        for window in transcriber.run(samples, settings):
            windows.append(window)
            show(window, output)
            if window.result.finish_reason == "length":
                say(f"note: a window ends after {len(window.result.token_ids)} tokens: "
                    + explain_end(window.result, generator.max_seq_len))  # fmt: skip
    if _STATS.value:
        say(describe(windows, transcriber.language))


def show(window: Window, output: JsonLinesWriter | None) -> None:
    """Prints the segments of a window, and writes them."""
    for segment in window.segments:
        when = f"[{segment.start:.2f} {segment.end:.2f}] " if _TIMESTAMPS.value else ""
        print(when + segment.text.strip(), flush=True)
        if output is not None:
            output.write(dataclasses.asdict(segment))
    if window.result.error is not None:
        raise InputError(window.result.error)


def explain_end(result: Result, context: int) -> str:
    """Returns what ended a transcript that may not be whole."""
    if result.is_cut_by_context:
        return f"the context of {context} tokens is full"
    return f"--max_new_tokens={result.settings.max_new_tokens}"


def describe(windows: list[Window], language: str | None) -> str:
    """Returns what was done, and how fast."""
    stats = [window.result.stats for window in windows]
    rounds = sum(part.num_rounds for part in stats)
    tokens = sum(part.num_round_tokens for part in stats)
    seconds = sum(part.prefill_seconds + part.decode_seconds for part in stats)
    rate = f"{tokens / rounds:.2f} tokens per target call, " if rounds else ""
    spoken = f"{language}, " if language else ""
    return f"{spoken}{len(windows)} windows, {rate}{seconds:.1f} s without compilation"


if __name__ == "__main__":
    cli.run_main(main, max_arguments=1)
