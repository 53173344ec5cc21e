"""The same models in transformers, to be measured beside jspec."""

import functools
import importlib.util
import inspect
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

from jspec.common.errors import InputError
from jspec.weights.hf import save_hf
from jspec.weights.resolver import LoadedModel


class Generated(NamedTuple):
    """An answer, and what it took after the prompt had been read.

    Attributes:
      token_ids: new ones.
      num_round_tokens: those given by target calls after the first, which reads the prompt.
      num_calls: how many such calls there were.
    """

    token_ids: list[int]
    num_round_tokens: int
    num_calls: int


GenerateFn = Callable[[list[int], int], Generated]
"""(prompt ids, max_new_tokens) -> the greedy answer."""


def has_transformers() -> bool:
    """Returns whether transformers can run models here, which takes torch."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def check_peers(target: LoadedModel, draft: LoadedModel | None) -> None:
    """Checks that transformers will take the models.

    Raises:
      InputError: it will not; one line.
    """
    if draft is not None and draft.config.vocab_size != target.config.vocab_size:
        raise InputError(
            f"expected a draft of {target.config.vocab_size} ids for transformers, which wants as "
            f"many as the target has, got {draft.config.vocab_size} ({draft.name}); "
            "--notransformers leaves it out"
        )


class Peer:
    """A target, and a draft or none, in transformers."""

    def __init__(self, target: LoadedModel, draft: LoadedModel | None = None) -> None:
        """Hands the weights over as Hugging Face checkpoints, in their own dtype.

        Raises:
          InputError: weights are quantised, or draft and target do not fit; see `check_peers`.
        """
        check_peers(target, draft)
        self._eos_ids = list(target.config.eos_ids)
        self._target = _hand_over(target)
        self._draft = None if draft is None else _hand_over(draft)
        self._starts: list[int] = []
        self._target.register_forward_pre_hook(self._note_call, with_kwargs=True)

    def _note_call(self, _: Any, __: Any, kwargs: dict[str, Any]) -> None:
        """Notes how many tokens the target had read when it was called."""
        import torch

        if not torch.compiler.is_compiling():
            self._starts.append(kwargs[_cache_name()].get_seq_length())

    def method(self, drafter: str, num_draft_tokens: int = 0) -> GenerateFn:
        """Returns one method of generating.

        Args:
          drafter: "none", "prompt_lookup", or "model": assisted generation, in which the draft
            proposes as many tokens in every round, however sure it is of them.
          num_draft_tokens: a round; at the end of an answer no more than can be used.

        Raises:
          InputError: no such drafter, or no draft model for it.
        """
        if drafter == "none":
            return self._generate
        if drafter == "prompt_lookup":
            return lambda prompt, max_new_tokens: self._generate(
                prompt, max_new_tokens, prompt_lookup_num_tokens=num_draft_tokens
            )
        if drafter != "model" or self._draft is None:
            raise InputError(
                f"expected none, prompt_lookup, or model and a draft model; got {drafter!r}"
            )
        return lambda prompt, max_new_tokens: self._assisted(
            prompt, max_new_tokens, num_draft_tokens
        )

    def compiled_method(self, max_length: int) -> GenerateFn:
        """Returns plain decoding by a compiled step over a static cache.

        Args:
          max_length: tokens that the cache holds, prompt and answer; one of every length would be
            compiled anew.
        """
        import torch
        import transformers

        # One cache for all answers: a graph of the GPU is recorded for its addresses.
        cache = transformers.StaticCache(self._target.config, max_cache_len=max_length)
        compile_config = transformers.CompileConfig(fullgraph=True)
        setattr(compile_config, "_compile_all_devices", True)  # noqa: B010  # a processor as well

        def generate(prompt: list[int], max_new_tokens: int) -> Generated:
            with torch.inference_mode():
                cache.reset()
            options = {_cache_name(): cache, "compile_config": compile_config}
            answer = self._generate(prompt, max_new_tokens, **options).token_ids
            return Generated(answer, len(answer) - 1, len(answer) - 1)

        return generate

    def _assisted(self, prompt: list[int], max_new_tokens: int, num_draft_tokens: int) -> Generated:
        """Generates with the draft model; transformers reads these options off the draft alone."""
        assert self._draft is not None
        self._draft.generation_config.num_assistant_tokens = num_draft_tokens
        self._draft.generation_config.num_assistant_tokens_schedule = "constant"
        self._draft.generation_config.assistant_confidence_threshold = 0.0
        return self._generate(prompt, max_new_tokens, assistant_model=self._draft)

    def _generate(self, prompt: list[int], max_new_tokens: int, **options: Any) -> Generated:
        import torch

        self._starts.clear()
        ids = torch.tensor([prompt], device=self._target.device)
        with torch.inference_mode():
            output = self._target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=self._eos_ids,
                pad_token_id=self._eos_ids[0] if self._eos_ids else 0,
                **options,
            )
        return _count(output[0].tolist(), len(prompt), self._starts)


@functools.cache
def _cache_name() -> str:
    """Returns what transformers calls the cache: before 5.24 `past_key_values`, then `cache`."""
    import transformers

    is_new = "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    return "cache" if is_new else "past_key_values"


def _count(text: list[int], prompt_len: int, starts: list[int]) -> Generated:
    """Counts calls and their tokens.

    transformers checks the first drafts in the call that reads the prompt, which may so give
    several tokens. They do not count, neither they nor the call.

    Args:
      text: ids of prompt and answer.
      prompt_len: ids of the prompt.
      starts: tokens read before each call, [calls]: all but the last of the text so far.
    """
    answer = text[prompt_len:]
    if len(starts) == 1:
        return Generated(answer, 0, 0)
    return Generated(answer, len(text) - 1 - starts[1], len(starts) - 1)


def _hand_over(model: LoadedModel) -> Any:
    """Returns the model as transformers has it, on a GPU if torch sees one."""
    import torch
    import transformers

    dtype = getattr(torch, model.params["embedding"].dtype.name)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = pathlib.Path(folder) / "model"
        save_hf(checkpoint, model.config, model.params)
        peer: Any = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    return peer.to("cuda" if torch.cuda.is_available() else "cpu").eval()
