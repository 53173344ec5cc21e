"""The baseline of transformers: the same models, decoding plainly and with its own drafts."""

import functools
import importlib.util
import inspect
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from jspec.common.errors import InputError
from jspec.common.timing import Instant
from jspec.drafters import needs_draft_model
from jspec.lab.benchmarking.answers import Generated, GenerateFn
from jspec.weights.hf import save_hf
from jspec.weights.quantize import PACKED
from jspec.weights.resolver import LoadedModel, load_model

_NUM_DRAFT_TOKENS = 2  # where jspec's method has no fixed number


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

        Args:
          target: what answers.
          draft: what assists.
          temperature: of the answers.
          decoding: count the time after the call that reads the prompt.

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

        Args:
          drafter: "none", "prompt_lookup", or "model": assisted generation, in which the draft
            proposes this many tokens in every round, however sure it is of them.
          num_draft_tokens: a round; at the end of an answer no more than can be used.
          max_new_tokens: of an answer.
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

        Args:
          max_length: tokens of prompt and answer that the cache holds; a cache of every length
            would be compiled anew.
          max_new_tokens: of an answer.
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
