"""The baseline of llama.cpp: programs that load GGUF files, answer one prompt, and print times.

Each answer is its own process, so what counts is the time that the program prints: of the
prompt, which may be left out, and of the answer, without loading. Texts are not compared: the
programs print no ids. A model that jspec uses packed is the same file here; of one that jspec has
made floats, `llama-quantize` makes a file in bfloat16.
"""

import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import NamedTuple

from jspec.common.errors import InputError
from jspec.lab.benchmarking.answers import Generated, GenerateFn
from jspec.weights.quantize import PACKED_KINDS
from jspec.weights.resolver import LoadedModel, find_model

LLAMA_PLAIN = "llama.cpp plain"
PROGRAM = "llama-completion"
_SPARE_SLOTS = 64  # for drafts past the end, and for what a program keeps free


def check_programs(folder: pathlib.Path) -> None:
    """Raises an `InputError` unless a folder holds llama.cpp's programs."""
    if not (folder / PROGRAM).is_file():
        raise InputError(f"expected the folder of llama.cpp's programs, got {folder}: no {PROGRAM}")


class LlamaCpp(NamedTuple):
    """llama.cpp's programs, and what they are asked.

    Attributes:
      folder: of the programs; models in bfloat16 are put there, too.
      texts: of each prompt by its ids, as the chat template writes it.
      max_new_tokens: of an answer.
      temperature: of the answers; above 0 without llama.cpp's own filters.
      decoding: count the time of decoding alone; plain decoding's is without the first token.
    """

    folder: pathlib.Path
    texts: Mapping[tuple[int, ...], str]
    max_new_tokens: int
    temperature: float = 0.0
    decoding: bool = False

    def methods(
        self,
        target: LoadedModel,
        draft: LoadedModel | None,
        drafters: Mapping[str, tuple[str, int]],
    ) -> dict[str, GenerateFn]:
        """Returns llama.cpp's methods of generating, each its own program.

        Args:
          target: whose file it reads.
          draft: whose file it drafts with.
          drafters: what stands beside them, names and numbers of drafts (see
            `transformers_methods`). Lookup is there in any case, with the first number.
        """
        files = ["-m", self._file(target)]
        commands = {LLAMA_PLAIN: [PROGRAM, "-no-cnv"]}
        pairs = [pair for pair in drafters.values() if pair[1]]
        lookups = [number for name, number in pairs if name == "prompt_lookup"]
        for number in lookups or [pairs[0][1]]:
            command = ["llama-lookup", "--spec-draft-n-max", number]
            commands[f"llama.cpp lookup:{number}"] = command
        for number in [number for name, number in pairs if name == "model" and draft is not None]:
            assert draft is not None
            drafting = ["-md", self._file(draft, is_draft=True), "--spec-type", "draft-simple"]
            command = ["llama-speculative-simple", *drafting, "--spec-draft-n-max", number]
            commands[f"llama.cpp model:{number}"] = command
        return {
            name: functools.partial(self._answer, [*command, *files])
            for name, command in commands.items()
        }

    def _file(self, model: LoadedModel, *, is_draft: bool = False) -> pathlib.Path:
        """Returns the GGUF file of the weights that jspec uses, or that a draft was rounded from.

        Raises:
          InputError: there is none.
        """
        source = find_model(model.name)
        is_file = source is not None and source.suffix == ".gguf"
        is_rounded = model.quantization not in (None, *PACKED_KINDS)
        if source is None or not is_file or (is_rounded and not is_draft):
            kind = model.quantization or "floats"
            raise InputError(
                f"expected a .gguf file, packed or as floats; got {model.name}, {kind}"
            )
        if model.quantization is not None:
            return source
        made = self.folder / f"{source.stem}.BF16.gguf"
        if not made.exists():
            new = made.with_suffix(".new")
            _run([self.folder / "llama-quantize", "--allow-requantize", source, new, "BF16"])
            new.rename(made)
        return made

    def _answer(self, program: list, prompt: list[int], seed: int) -> Generated:
        num_slots = len(prompt) + self.max_new_tokens + _SPARE_SLOTS
        usual = ["-t", len(os.sched_getaffinity(0)), "--temp", self.temperature, "-s", seed]
        usual += ["-c", num_slots, "-b", num_slots]
        if self.temperature:
            usual += ["--top-k", 0, "--top-p", 1, "--min-p", 0]
        command = [self.folder / program[0], *program[1:], *usual]
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
            file.write(self.texts[tuple(prompt)] + "\n")  # it takes one line's end off
            file.flush()
            printed = _run([*command, "-f", file.name, "-n", self.max_new_tokens])
        answer, num_read = _read_times(printed, command[0], decoding=self.decoding)
        if num_read != len(prompt):
            note = f"note: {program[0]} reads a prompt of {len(prompt)} tokens as {num_read}"
            print(note, file=sys.stderr, flush=True)
        return answer


# What the programs print. Those that speculate tell seconds and all tokens; plain decoding tells
# milliseconds and runs, which come after the first token.
_PLAIN = (
    re.compile(r"prompt eval time = +([\d.]+) ms / +(\d+) tokens"),
    re.compile(r" I .*?(?<!prompt )eval time = +([\d.]+) ms / +(\d+) runs"),
)
_SPECULATIVE = (
    re.compile(r"encoded +(?P<n>\d+) tokens in +(?P<s>[\d.]+) seconds"),
    re.compile(r"decoded +(?P<n>\d+) tokens in +(?P<s>[\d.]+) seconds"),
    re.compile(r"n_drafted += +(?P<n>\d+)"),
    re.compile(r"n_accept += +(?P<n>\d+)"),
)


def _read_times(printed: str, program: pathlib.Path, *, decoding: bool) -> tuple[Generated, int]:
    speculative = [pattern.search(printed) for pattern in _SPECULATIVE]
    plain = [pattern.search(printed) for pattern in _PLAIN]
    if all(speculative):
        num_read, num_tokens, proposed, accepted = (
            int(match["n"]) for match in speculative if match
        )
        reading, seconds = (float(match["s"]) for match in speculative[:2] if match)
        # Lookup draws the first token from the logits of the prompt.
        num_first = int(program.name == "llama-lookup")
        counts = num_tokens - num_first, num_tokens - num_first - accepted, proposed, accepted
    elif all(plain):
        (reading, num_read), (seconds, runs) = (
            (float(match[1]) / 1000, int(match[2])) for match in plain if match
        )
        counts, num_tokens = (runs, runs, 0, 0), runs + 1
    else:
        raise InputError(f"expected times in what {program} prints, got {printed[-200:]!r}")
    if decoding:
        return Generated([], *counts, seconds=seconds, num_tokens=counts[0]), num_read
    return Generated([], *counts, seconds=reading + seconds, num_tokens=num_tokens), num_read


def _run(command: list) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL)
    printed = (done.stderr + done.stdout).decode(errors="replace")
    if done.returncode:
        raise InputError(f"expected {command[0]} to succeed, got status {done.returncode}: "
                         f"{printed.strip().splitlines()[-1:]}")  # fmt: skip
    return printed
