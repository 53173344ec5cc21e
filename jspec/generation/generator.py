"""The Python API: load models once, then generate."""

import collections
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Self, overload

from jspec.common.errors import InputError, prefixed_errors
from jspec.generation.answer import Answer
from jspec.generation.batch import Batch
from jspec.generation.draft_weights import with_fast_weights
from jspec.generation.programs import Programs
from jspec.generation.prompts import encode_prompt
from jspec.generation.request import Request, SamplingParams, make_requests
from jspec.generation.result import Chunk, Result, check_answered
from jspec.generation.validate_options import gather_options
from jspec.weights.published import SMOLLM2
from jspec.weights.resolver import load_model, model_name

_DEFAULTS = SamplingParams()


class Generator(Programs):
    """A target model, a drafter, and the compiled programs that run them.

    Up to `batch_size` requests are answered together; when an answer ends, the next request takes
    its row. An answer depends on its own prompt and settings alone, never on the other rows.

    Example:
      >>> import jspec
      >>> generator = jspec.Generator.load("smollm2-135m-instruct")
      >>> params = jspec.SamplingParams(max_new_tokens=64)
      >>> result = generator.generate("Why is the sky blue?", params)
      >>> print(result.text)

    Args:
      target: the model whose answers are wanted.
      draft: a cheaper model, for the drafters "model" and "hierarchical".
      drafter: a name from `jspec.drafters.DRAFTERS`, or several joined by "+", of which the first
        that has a proposal makes it. None means "model" with a draft model and "prompt_lookup"
        without, plus "+eagle" if jspec ships a head for the target. Or your own `DrafterEntry`.
      num_draft_tokens: number of drafts a round; "auto" chooses it in every round.
      costs: costs of rounds, for "auto"; None measures them once on this machine.
      acceptance: the acceptance rule. "rejection", "block", "k_seq" and "coupled" keep the target's
        distribution, and so does "greedy", for temperature 0; "lenient", "lenient_argmax" and
        "typical" do not. Or an `AcceptanceRule` of your own.
      rule_options: options of the last three rules.
      drafter_options: options of the drafters.
      batch_size: maximum number of requests answered together.
      max_seq_len: maximum number of tokens of prompt and answer together; None takes the model's
        context.
      rounds_per_visit: number of rounds on the device before the host reads their tokens.
      processors: your own logits processors, applied after jspec's and before the temperature.
      on_result: called with every result, for instance `AcceptanceMonitor.add`.
      on_start: called before each run with the device and the memory that the run takes.
      on_compile: called with a line, for instance `print`, before programs are compiled anew.

    Attributes:
      target: the target model.
      drafter: name of the drafter.
      num_draft_tokens: maximum number of drafts a round; 0 for plain decoding.
      max_seq_len: maximum number of tokens of prompt and answer together.

    Raises:
      InputError: a value out of range, a draft model that does not fit, an option that is not read.
    """

    @classmethod
    def load(
        cls,
        target: str | os.PathLike[str] = SMOLLM2,
        draft: str | os.PathLike[str] | None = None,
        *,
        dtype: str = "bfloat16",
        target_quantization: str | None = None,
        draft_quantization: str | None = None,
        **options: Any,
    ) -> Self:
        """Loads models by name and returns a Generator.

        Args:
          target: a Hugging Face folder or hub name, a .gguf file, an Orbax folder, a preset such as
            "smollm2-135m-instruct", or "random:" followed by a preset's name.
          draft: the draft model, named in the same way, or None.
          dtype: "bfloat16" or "float32", for weights and caches.
          target_quantization: "int8", "int4" or "q4_0" rounds the target's weights, which makes it
            another model; "packed" leaves a .gguf file's as they are; "packed_a8" does, and rounds
            the inputs of products to 8 bits, which is faster, and another model, too; "none" makes
            them floats. None or "auto": "packed" for a .gguf file where that is fast, else "none".
          draft_quantization: the same for the draft model, which changes no answer's distribution;
            on a GPU None or "auto" also takes "int8" where the draft's blocks are faster with it.
          **options: keyword arguments of the constructor; and options of drafters and rules by the
            names of their flags, such as `draft_layers=20` or `lenience=0.3`.

        Raises:
          InputError: if a model cannot be loaded, or an option is out of range.
        """
        if draft is None and draft_quantization not in (None, "auto"):
            raise InputError(f"draft_quantization {draft_quantization!r} expects a draft model")
        target = model_name(target)
        options = gather_options(cls, options, target, has_draft=draft is not None)
        load = functools.partial(load_model, dtype=dtype)
        loaded = load(target, quantization=target_quantization)
        loaded_draft = None if draft is None else load(draft, quantization=draft_quantization)
        if draft is not None and loaded_draft is not None and draft_quantization in (None, "auto"):
            rule = options.get("acceptance", "rejection")
            loaded_draft = with_fast_weights(loaded_draft, rule, functools.partial(load, draft))
        return cls(loaded, loaded_draft, **options)

    def __repr__(self) -> str:
        number, rule = (self.describe()[key] for key in ("num_draft_tokens", "acceptance"))
        unit = "draft" if number == 1 else "drafts"
        return f"<Generator of {self.target.name}: {self.drafter}, {number} {unit}, {rule}>"

    @overload
    def generate(
        self, prompts: str | Request, settings: SamplingParams = ..., *, chat: bool | None = ...,
        system: str | None = ...,
    ) -> Result: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Sequence[str | Request], settings: SamplingParams = ..., *,
        chat: bool | None = ..., system: str | None = ...,
    ) -> list[Result]: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: str | Request | Sequence[str | Request], settings: SamplingParams = ..., *,
        chat: bool | None = ..., system: str | None = ..., num_samples: int,
    ) -> list[Result]: ...  # fmt: skip

    def generate(
        self,
        prompts: str | Request | Sequence[str | Request],
        settings: SamplingParams = _DEFAULTS,
        *,
        chat: bool | None = None,
        system: str | None = None,
        num_samples: int | None = None,
    ) -> Result | list[Result]:
        """Returns the whole answer to one prompt, or a list of those to several, in their order.

        Example:
          >>> generator.generate("Why is the sky blue?", SamplingParams(max_new_tokens=32)).text
          >>> [result.text for result in generator.generate(["One?", "Two?"])]

        Args:
          prompts: one prompt, or a list of them. A `Request` carries its own settings.
          settings: of prompts that are texts, with one seed: `[prompt] * 2` gives equal answers.
          chat: whether to put texts into the model's chat template; None does so if it has one.
          system: a system message for the template.
          num_samples: number of answers to each prompt, with the seeds `seed`, `seed + 1` and so
            on, in one list: all answers to the first prompt, then those to the second.

        Raises:
          InputError: a prompt is empty or longer than the context, a token id or setting does not
            fit the model, memory is short, or the answer to one prompt fails. Of several answers, a
            failed one says so in `Result.error`.
        """
        is_one = isinstance(prompts, str | Request) or not isinstance(prompts, Iterable)
        requests = make_requests([prompts] if is_one else prompts, settings, num_samples)
        chunks = self.run(requests, chat=chat, system=system)
        results = {chunk.index: chunk.result for chunk in chunks if chunk.result is not None}
        if is_one and num_samples is None:
            check_answered([results[0]])
            return results[0]
        return [results[index] for index in range(len(requests))]

    def stream(
        self,
        prompt: str | Request,
        settings: SamplingParams = _DEFAULTS,
        *,
        chat: bool | None = None,
        system: str | None = None,
    ) -> Iterator[Chunk]:
        """Answers one prompt in chunks; see `generate` for arguments and errors.

        Example:
          >>> for chunk in generator.stream("Tell me a story."):
          ...     print(chunk.text, end="", flush=True)
        """
        return self.run(make_requests([prompt], settings), chat=chat, system=system)

    def run(
        self, requests: Sequence[Request], *, chat: bool | None = None, system: str | None = None
    ) -> Iterator[Chunk]:
        """Answers many requests, `batch_size` at a time, in chunks as tokens come.

        `Chunk.index` is a request's number. The last chunk of each answer carries its result.

        Raises:
          InputError: before the first chunk, if any of the requests cannot be answered.
        """
        requests, rows = make_requests(requests, _DEFAULTS), []
        for index, request in enumerate(requests):
            with prefixed_errors(f"prompt {index}") if len(requests) > 1 else nullcontext():
                rows.append(self.make_row(request, chat=chat, system=system))
        if any(row.settings.num_beams > 1 for row in rows):
            from jspec.generation.beam_search import search_beams  # few requests need it

            yield from search_beams(self, requests, rows, self._on_start, self._on_result)
        waiting = collections.deque(i for i, row in enumerate(rows) if row.settings.num_beams == 1)
        if not waiting:
            return
        own = {index: self.with_costs(rows[index]) for index in waiting}
        batch = Batch.for_requests(self, [*own.values()])
        if self._on_start is not None:
            self._on_start(self.budget(batch.room))
        models = self.target, self.num_draft_tokens
        answers: dict[int, Answer] = {}  # by row
        while waiting or answers:
            for row in batch.rows:
                # An answer that its first token completes leaves the row free for the next one.
                while waiting and row not in answers:
                    index = waiting.popleft()
                    answers[row] = Answer(index, requests[index], own[index], *models)
                    answers[row].add_first(batch.fill(row, own[index]))
                    yield self._take_chunk(row, answers, batch)
            seconds = batch.run(self._rounds_per_visit) if answers else 0.0
            for row in list(answers):
                answers[row].add_visit(seconds, batch.rounds(row))
                yield self._take_chunk(row, answers, batch)

    def check(
        self, request: Request, *, chat: bool | None = None, system: str | None = None
    ) -> None:
        """Checks that a request can be answered, without answering it.

        Raises:
          InputError: if it cannot be answered.
        """
        self.make_row(request, chat=chat, system=system)

    def encode_prompt(
        self, prompt: str | Sequence[int], chat: bool | None = None, system: str | None = None
    ) -> list[int]:
        """Returns the token ids that the model is given for a prompt; see `generate`.

        Raises:
          InputError: if the prompt is empty, or a needed chat template is missing.
        """
        return encode_prompt(self.target, prompt, chat=chat, system=system)

    def _take_chunk(self, row: int, answers: dict[int, Answer], batch: Batch) -> Chunk:
        """Returns the next chunk of a row's answer; a row whose answer has ended becomes free."""
        if answers[row].finish_reason is not None:
            batch.finish(row)
        chunk = answers[row].take_chunk()
        if chunk.result is not None:
            del answers[row]
            if self._on_result is not None:
                self._on_result(chunk.result)
        return chunk
