"""Other programs on the same models: transformers, and llama.cpp.

transformers gets the weights as Hugging Face checkpoints. llama.cpp's programs load GGUF files,
answer one prompt, and print times. Each answer is its own process, so what counts is the time that
the program prints: of the prompt, which may be left out, and of the answer, without loading. Texts
are not compared: the programs print no ids. A model that jspec uses packed is the same file there;
of one that jspec has made floats, `llama-quantize` makes a file in bfloat16.
"""

import functools
import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

from jspec.common.errors import InputError, say
from jspec.common.timing import Instant
from jspec.drafters import needs_draft_model
from jspec.lab.benchmarking.answers import Generated, GenerateFn
from jspec.weights.hf import save_hf
from jspec.weights.quantize import PACKED, PACKED_KINDS
from jspec.weights.resolver import LoadedModel, find_model, load_model

_NUM_DRAFT_TOKENS = 2  # where jspec's method has no fixed number

LLAMA_PLAIN = "llama.cpp plain"
PROGRAM = "llama-completion"
_SPARE_SLOTS = 64  # for drafts past the end, and for what a program keeps free
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


def transformers_methods(
    methods: Mapping[str, tuple[str, int | str]],
) -> dict[str, tuple[str, int]]:
    """Returns, by name, transformers' drafters and numbers of drafts that stand beside jspec's.

    Prompt lookup and the draft model have the fixed numbers that jspec's methods have. Where jspec
    has none, or nothing drafts, it is 2.
    """
    kinds = [
        ("model" if needs_draft_model(drafter) else drafter, number)
        for drafter, number in methods.values()
    ]
    pairs = []
    for kind in ("model", "prompt_lookup"):
        numbers = [number for name, number in kinds if name == kind]
        fixed = [(kind, number) for number in numbers if isinstance(number, int)]
        pairs += fixed or [(kind, _NUM_DRAFT_TOKENS)] * bool(numbers)
    pairs = pairs or [("prompt_lookup", _NUM_DRAFT_TOKENS)]
    named = {f"transformers {drafter}:{number}": (drafter, number) for drafter, number in pairs}
    return {"transformers plain": ("none", 0)} | named


def has_transformers() -> bool:
    """Returns whether transformers can run models here, which takes torch."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


class TransformersModels:
    """A target, and a draft or none, in transformers."""

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | None = None,
        *,
        temperature: float = 0.0,
        decoding: bool = False,
    ) -> None:
        """Hands the weights over as Hugging Face checkpoints, in their own dtype.

        With `decoding` the time after the call that reads the prompt is counted.

        Raises:
          InputError: weights are quantised, or not those that transformers expects.
        """
        self._eos_ids = list(target.config.eos_ids)
        self._target = _hand_over(target)
        self._draft = None if draft is None else _hand_over(draft)
        self._starts: list[int] = []
        self._read: Instant | None = None  # when the prompt was
        self._temperature, self._decoding = temperature, decoding
        self._target.register_forward_pre_hook(self._note_call, with_kwargs=True)
        self._target.register_forward_hook(self._note_read)

    def _note_call(self, _: Any, __: Any, kwargs: dict[str, Any]) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self._starts.append(kwargs[_cache_name(type(self._target))].get_seq_length())

    def _note_read(self, *_: Any) -> None:
        import torch

        if self._read is None and not torch.compiler.is_compiling():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._read = Instant()

    def method(self, drafter: str, num_draft_tokens: int, max_new_tokens: int) -> GenerateFn:
        """Returns one method of generating.

        The drafter is "none", "prompt_lookup", or "model": assisted generation, in which the draft
        proposes this many tokens in every round, however sure it is of them, but at the end of an
        answer no more than can be used.
        """
        options: dict[str, Any] = {
            "none": {},
            "prompt_lookup": {"prompt_lookup_num_tokens": num_draft_tokens},
            "model": {"assistant_model": self._draft},
        }[drafter]

        def generate(prompt: list[int], seed: int) -> Generated:
            if self._draft is not None:  # transformers reads these options off the draft alone
                self._draft.generation_config.update(
                    num_assistant_tokens=num_draft_tokens,
                    num_assistant_tokens_schedule="constant",
                    assistant_confidence_threshold=0.0,
                )
            answer, seconds = self._answer(prompt, seed, max_new_tokens, **options)
            # The call that reads the prompt checks the first drafts, too, and may thus give several
            # tokens. Neither it nor its tokens count.
            starts, counts = self._starts, (0, 0)
            if len(starts) > 1:
                counts = len(prompt) + len(answer) - 1 - starts[1], len(starts) - 1
            return self._generated(answer, seconds, *counts)

        return generate

    def compiled_method(self, max_length: int, max_new_tokens: int) -> GenerateFn:
        """Returns plain decoding by a compiled step over a static cache.

        The cache holds prompts and answers of `max_length` tokens: one of every length would be
        compiled anew.
        """
        import torch
        import transformers

        # One cache for all answers: a graph of the GPU is recorded for its addresses.
        cache = transformers.StaticCache(self._target.config, max_cache_len=max_length)
        compile_config = transformers.CompileConfig(fullgraph=True)
        setattr(compile_config, "_compile_all_devices", True)  # noqa: B010  # a processor as well
        options = {_cache_name(type(self._target)): cache, "compile_config": compile_config}

        def generate(prompt: list[int], seed: int) -> Generated:
            with torch.inference_mode():
                cache.reset()
            answer, seconds = self._answer(prompt, seed, max_new_tokens, **options)
            return self._generated(answer, seconds, len(answer) - 1, len(answer) - 1)

        return generate

    def _generated(
        self, answer: list[int], seconds: float, num_round_tokens: int, num_calls: int
    ) -> Generated:
        clock = (seconds, num_round_tokens) if self._decoding else (None, None)
        return Generated(answer, num_round_tokens, num_calls, 0, 0, *clock)

    def _answer(
        self, prompt: list[int], seed: int, max_new_tokens: int, **options: Any
    ) -> tuple[list[int], float]:
        import torch

        self._starts.clear()
        self._read = None
        if self._temperature:
            torch.manual_seed(seed)
            # Without its own filters.
            options |= {"temperature": self._temperature, "top_k": 0, "top_p": 1.0}
        ids = torch.tensor([prompt], device=self._target.device)
        with torch.inference_mode():
            output = self._target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=self._temperature > 0,
                eos_token_id=self._eos_ids,
                pad_token_id=self._eos_ids[0] if self._eos_ids else 0,
                **options,
            )
        answer = output[0].tolist()[len(prompt) :]
        return answer, 0.0 if self._read is None else Instant().run_seconds_since(self._read)


@functools.cache
def _cache_name(model: Any) -> str:
    """Returns what a model calls the cache: before 5.24 `past_key_values`, then `cache`."""
    is_new = "cache" in inspect.signature(model.forward).parameters
    return "cache" if is_new else "past_key_values"


def _hand_over(model: LoadedModel) -> Any:
    """Returns the model as transformers has it, on a GPU if torch sees any."""
    import torch
    import transformers

    name = model.params["embedding"].dtype.name
    if model.quantization == PACKED:  # the same weights in floats
        model = load_model(model.name, dtype=name, quantization="none")
    dtype = getattr(torch, name)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = pathlib.Path(folder) / "model"
        save_hf(checkpoint, model.config, model.params)
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        loaded, told = load(checkpoint, dtype=dtype, output_loading_info=True)
    if wrong := sorted({*told["missing_keys"], *told["unexpected_keys"]}):
        raise InputError(
            f"{model.name}: expected transformers' {type(loaded).__name__} to have the same "
            f"tensors, got a difference in {wrong[0]}"
        )
    return loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()


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

        `drafters` are what stands beside them, names and numbers of drafts (see
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
            say(f"note: {program[0]} reads a prompt of {len(prompt)} tokens as {num_read}")
        return answer


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
