"""The Python API: load models once, then generate."""

import collections
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Self, overload

import jax

from jspec import kernels
from jspec.common.errors import InputError, check_count, check_type, prefixed_errors, whole_number
from jspec.common.memory import (
    Budget,
    CacheSize,
    give_back_after_compiling,
    give_back_freed,
    tree_bytes,
)
from jspec.common.user_cache import use_compile_cache
from jspec.drafters import DrafterEntry, entries_of, make_drafter, name_of
from jspec.generation.answer import Answer
from jspec.generation.auto import AUTO, MOST_DRAFT_TOKENS, KnownCosts, numbers_of
from jspec.generation.batch import Batch, check_processor, needed_switches
from jspec.generation.costs import RoundCosts
from jspec.generation.engine import MAX_ROUNDS_PER_VISIT, CompileNotice, Engine, VisitLength
from jspec.generation.options import (
    Method,
    check_beams,
    check_draft_sampling,
    check_temperature,
    choose_method,
    make_spec,
)
from jspec.generation.prompts import encode_text, read_prompt
from jspec.generation.request import Request, SamplingParams, make_requests
from jspec.generation.result import Chunk, Result, check_answered
from jspec.generation.rows import Row, make_row
from jspec.sampling.settings import Processor, Switches
from jspec.speculation.acceptance import BUILT_IN
from jspec.speculation.types import ModelParams
from jspec.weights.published import SMOLLM2
from jspec.weights.resolver import LoadedModel, load_model, model_name

_DEFAULTS = SamplingParams()
_ROUNDS_PER_VISIT = 8  # at least


class Generator:
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
      method: the drafter and the acceptance rule; None makes them of `options`.
      batch_size: maximum number of requests answered together.
      max_seq_len: maximum number of tokens of prompt and answer together; None takes the model's
        context.
      rounds_per_visit: number of rounds on the device before the host reads their tokens; None:
        as many as take 40 ms, from 8 on; 8 while a request waits for a row.
      processors: your own logits processors, applied after jspec's and before the temperature.
      notify: called with a line, for instance `print`, that names the device and the memory of a
        run, where it has changed, or says what programs are compiled for.
      **options: the fields of `Method`, such as `drafter="prompt_lookup"` or `num_draft_tokens=5`;
        and options of drafters and rules by the names of their flags, such as `draft_layers=20` or
        `lenience=0.3`. Without a drafter it is "prompt_lookup", plus "+model" with
        a draft model, else plus "+eagle" if jspec ships a head for the target.

    Attributes:
      target: the target model.
      drafter: name of the drafter.
      num_draft_tokens: maximum number of drafts a round; 0 for plain decoding.
      max_seq_len: maximum number of tokens of prompt and answer together.
      method: the drafter and the rule, with all their options.
      rule: the acceptance rule.
      engine: the compiled programs.
      compile_notice: says when programs are compiled.
      round_costs: what rounds cost on this machine, by which "auto" chooses.

    Raises:
      InputError: a value out of range, a draft model that does not fit, an option that is not read;
        or JAX has 64-bit types (jax_enable_x64).
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | None = None,
        method: Method | None = None,
        *,
        batch_size: int = 1,
        max_seq_len: int | None = None,
        rounds_per_visit: int | None = None,
        processors: Sequence[Processor] = (),
        notify: Callable[[str], object] | None = None,
        **options: Any,
    ) -> None:
        """Prepares the models; nothing is compiled yet."""
        _check_number_types()
        use_compile_cache()
        if kernels.awaits_graph_trial():
            from jspec.generation.graph_trial import check_one_graph  # once for a GPU

            check_one_graph()
        if isinstance(processors, Processor) or not isinstance(processors, Sequence):
            raise InputError(f"expected processors as a list, such as [mine], got {processors!r}")
        for processor in processors:
            check_type("each of processors", processor, Processor)
        if method is None:
            method = choose_method(options, target, has_draft=draft is not None, known=_keywords())
        elif options:
            raise InputError(f"expected either a method or options, got both: {', '.join(options)}")
        context = target.config.max_seq_len
        self.max_seq_len = context if max_seq_len is None else max_seq_len
        check_count("max_seq_len", self.max_seq_len, 2, context)
        check_count("batch_size", batch_size, 1, 4096)
        if rounds_per_visit is not None:
            check_count("rounds_per_visit", rounds_per_visit, 1, MAX_ROUNDS_PER_VISIT)
        self.target, self._draft, self.batch_size = target, draft, batch_size
        self.drafter, self.rule = name_of(method.drafter), method.rule
        self._visit_length = VisitLength(
            rounds_per_visit or _ROUNDS_PER_VISIT,
            is_fixed=rounds_per_visit is not None or jax.process_count() > 1,
        )
        self._processors = tuple(processors)
        self.compile_notice, self._notify = CompileNotice(notify), notify
        self._announced = ""  # the last line about memory

        number = self._num_wanted(method)
        spec = make_spec(target, draft, method.drafter, method.drafter_options, number)
        self.method = dataclasses.replace(method, drafter_options=spec.options)
        built = make_drafter(method.drafter, spec)
        entries = entries_of(method.drafter)
        if _has_user_code(entries) or method.rule_name not in BUILT_IN:
            from jspec.generation.own_code import check_own_code  # few runs have any

            check_own_code(entries, built, method.rule_name, self.rule, target)
        auto = built.drafter if method.num_draft_tokens == AUTO else None
        numbers = () if auto is None else numbers_of(auto)
        self.engine = Engine(target, built.drafter, self.rule, numbers, built.params)
        self.num_draft_tokens = self.engine.num_draft_tokens
        params = ModelParams(target.params, self.engine.layout.place(built.params))
        # Not a method: a Generator that nobody needs is freed at once.
        make_key = functools.partial(_key_of_costs, target, draft, self.method, self.engine)
        sizes = batch_size, self.max_seq_len
        self.round_costs = KnownCosts(
            self.engine, target, params, make_key, *sizes, given=method.costs
        )
        give_back_after_compiling()
        give_back_freed()  # what loading models and heads has taken in addition

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
            None or "auto" takes "q4_0" for "packed", and on a GPU "int8" where the draft's
            blocks are faster with it.
          **options: keyword arguments of the constructor; and options of drafters and rules by the
            names of their flags, such as `draft_layers=20` or `lenience=0.3`.

        Raises:
          InputError: if a model cannot be loaded, or an option is out of range.
        """
        _check_number_types()
        if draft is None and draft_quantization not in (None, "auto"):
            raise InputError(f"draft_quantization {draft_quantization!r} expects a draft model")
        target = model_name(target)
        sizes = {name: options.pop(name) for name in _keywords() & options.keys()}
        method = sizes.pop("method", None) or choose_method(
            options, target, has_draft=draft is not None, known=_keywords()
        )
        load = functools.partial(load_model, dtype=dtype)
        loaded = load(target, quantization=target_quantization)
        loaded_draft = None if draft is None else load(draft, quantization=draft_quantization)
        if draft is not None and loaded_draft is not None and draft_quantization in (None, "auto"):
            from jspec.generation.draft_weights import with_fast_weights

            load_draft = functools.partial(load, draft)
            loaded_draft = with_fast_weights(loaded_draft, method.acceptance, load_draft)
        return cls(loaded, loaded_draft, method, **sizes)

    def _num_wanted(self, method: Method) -> int:
        """Returns the number of drafts that the drafter is built for."""
        number, depth = method.num_draft_tokens, method.drafter_options.tree_depth
        most = max(self.max_seq_len - 2, 1)
        if number == AUTO or self.drafter == "none":
            most = min(MOST_DRAFT_TOKENS, most)
            if depth > most:
                expected = f"tree_depth of at most {most} with num_draft_tokens={AUTO}"
                raise InputError(f"expected {expected}, got {depth}")
            return most
        number = whole_number("num_draft_tokens", number, f" or {AUTO!r}")
        if not 1 <= number <= most:
            why = f"the context sets the limit (max_seq_len {self.max_seq_len})"
            why = "for plain decoding use --drafter=none" if number < 1 else why
            raise InputError(f"expected num_draft_tokens from 1 to {most}, got {number}; {why}")
        return number

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
          chat: whether to put texts into the chat template; None does so if the model has any.
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
        self,
        requests: Sequence[Request],
        *,
        chat: bool | None = None,
        system: str | None = None,
        rows: Sequence[Row] | None = None,
    ) -> Iterator[Chunk]:
        """Answers many requests, `batch_size` at a time, in chunks as tokens come.

        `Chunk.index` is a request's number. The last chunk of each answer carries its result.
        `rows` are what `make_row` returned for them, where that was called before.

        Raises:
          InputError: before the first chunk, if any of the requests cannot be answered.
        """
        requests = make_requests(requests, _DEFAULTS)
        rows = self._make_rows(requests, chat, system) if rows is None else rows
        for index, row in enumerate(rows):
            if row.settings.num_beams > 1:
                yield self._search(index, requests[index], row)
        waiting = collections.deque(i for i, row in enumerate(rows) if row.settings.num_beams == 1)
        if not waiting:
            return
        priced = {index: self.round_costs.add_to(rows[index]) for index in waiting}
        batch = self._make_batch([*priced.values()])
        models = self.target, self.num_draft_tokens
        answers: dict[int, Answer] = {}  # by row
        while waiting or answers:
            for row in batch.rows:
                # An answer that its first token completes leaves the row free for the next request.
                while waiting and row not in answers:
                    index = waiting.popleft()
                    answers[row] = Answer(index, requests[index], priced[index], *models)
                    answers[row].add_first(batch.fill(row, priced[index]))
                    yield self._take_chunk(row, answers, batch)
            if not answers:
                continue
            # A row whose answer ends is idle until the visit ends.
            length = self._visit_length
            seconds = batch.run(length.least if waiting else length.num_rounds)
            rounds = {row: [*batch.rounds(row)] for row in answers}
            length.note(seconds, max(map(len, rounds.values())))
            for row, of_row in rounds.items():
                answers[row].add_visit(seconds, of_row)
                yield self._take_chunk(row, answers, batch)

    def check(
        self, request: Request, *, chat: bool | None = None, system: str | None = None
    ) -> None:
        """Checks that a request can be answered, without answering it.

        Raises:
          InputError: if it cannot be answered.
        """
        self.make_row(request, chat=chat, system=system)

    def _make_rows(
        self, requests: Sequence[Request], chat: bool | None, system: str | None
    ) -> list[Row]:
        rows = []
        for index, request in enumerate(requests):
            with prefixed_errors(f"prompt {index}") if len(requests) > 1 else nullcontext():
                rows.append(self.make_row(request, chat=chat, system=system))
        return rows

    def _make_batch(self, rows: Sequence[Row]) -> Batch:
        """Returns a batch for the longest of all requests that will come."""
        settings = [row.settings for row in rows]
        self._check_processors(settings[0])
        # A power of two, so that another number of requests rarely needs another program.
        num_rows = min(self.batch_size, 1 << (len(rows) - 1).bit_length())
        max_length = max(row.max_length for row in rows)
        compiled = self.engine, self.params, self.compile_notice
        batch = Batch(*compiled, num_rows, max_length, self.switches(settings))
        self._announce(batch.cache_size)
        return batch

    def _search(self, index: int, request: Request, row: Row) -> Chunk:
        """Answers a request for beams, at once."""
        from jspec.generation.beam_search import BeamSearch  # few requests need it

        self._check_processors(row.settings)
        compiled, switches = (self.engine, self.params, self.compile_notice), self.switches
        search = BeamSearch(*compiled, self.target, request, row, switches([row.settings]))
        self._announce(search.cache_size)
        result = search.run()
        return Chunk(index, result.text, result.token_ids, result.stats.num_accepted, result)

    def _check_processors(self, settings: SamplingParams) -> None:
        for processor in self._processors:
            check_processor(processor, settings, self.target.config.vocab_size)

    def _announce(self, cache_size: CacheSize) -> None:
        if self._notify is not None and (line := str(self.budget(cache_size))) != self._announced:
            self._announced = line
            self._notify(line)

    def encode_prompt(
        self, prompt: str | Sequence[int], chat: bool | None = None, system: str | None = None
    ) -> list[int]:
        """Returns the token ids that the model is given for a prompt; see `generate`.

        Raises:
          InputError: if the prompt is empty, or a needed chat template is missing.
        """
        return encode_text(self.target, prompt, chat=chat, system=system)

    def _take_chunk(self, row: int, answers: dict[int, Answer], batch: Batch) -> Chunk:
        """Returns the next chunk of a row's answer; a row whose answer has ended becomes free."""
        if answers[row].finish_reason is not None:
            batch.finish(row)
            self.remember(answers[row], batch)
        chunk = answers[row].take_chunk()
        if chunk.result is not None:
            del answers[row]
        return chunk

    def remember(self, answer: Answer, batch: Batch) -> None:
        """Keeps a whole answer of a batch for later ones, if the drafter looks them up."""
        if answer.is_whole:
            # Of all batches, two of which may take turns.
            self.params = batch.params = self.engine.remember(self.params, answer.token_ids)

    def forget_answers(self) -> None:
        """Forgets the answers that `draft_memory` has kept, so that the next is as the first."""
        self.params = self.engine.forget(self.params)

    def make_row(
        self, request: Request, *, chat: bool | None = None, system: str | None = None
    ) -> Row:
        """Returns the row of a request, without costs.

        Raises:
          InputError: if the models, the drafter or the rule cannot answer the request.
        """
        prompt, source = read_prompt(self.target, request, chat=chat, system=system)
        settings = request.settings
        method, rule = self.method, self.method.rule_name
        check_draft_sampling(settings, [(method.drafter, method.drafter_options)])
        check_temperature(rule, self.rule.temperatures, settings.temperature)
        check_beams(settings, self.target, self.batch_size, rule)
        return make_row(prompt, settings, self.target, self.max_seq_len, source)

    @property
    def costs(self) -> RoundCosts | None:
        """The costs of rounds, measured now if need be; None if the number of drafts is fixed."""
        return self.round_costs.of_batch(self.max_seq_len)

    @property
    def params(self) -> ModelParams:
        """The parameters of target and drafter; those of answers that are kept change."""
        return self.round_costs.params

    @params.setter
    def params(self, params: ModelParams) -> None:
        self.round_costs.params = params

    def budget(self, cache_size: CacheSize) -> Budget:
        """Returns the device, and the memory that the models and caches of that size take on it."""
        budget, draft = self.engine.layout.budget(self.params, cache_size), self._draft
        if self.engine.drafter is None:
            return budget
        number = f"{self.num_draft_tokens} a round"
        if self.engine.numbers:
            number = "their number by measured costs"
        notes = [f"drafts by {self.drafter}, {number}"]
        if summary := self.engine.drafter.summary:
            notes.append(summary)
        if draft is not None and draft.is_quantization_chosen:
            notes.append(f"the draft's weights in {draft.quantization}: faster here")
        if self.engine.keeps_answers and not self.rule.noise.is_shared:
            # Else a seed would not give the same text again. Drafts that are looked up are accepted
            # as often under `coupled`.
            notes.append("earlier answers are looked up at temperature 0 (at any with coupled)")
        return budget._replace(note="; ".join(notes))

    @property
    def is_lossless(self) -> bool:
        """Whether the answers follow the target's distribution exactly."""
        return self.rule.is_lossless

    @functools.cached_property
    def _drafter_bytes(self) -> dict[str, int]:
        """The memory that drafting adds, in bytes: parameters, and the state of a full batch."""
        if (drafter := self.engine.drafter) is None:
            return {"parameters": 0, "state": 0}
        capacity = self.engine.capacity_for(self.max_seq_len)
        state = jax.eval_shape(lambda: drafter.init(self.batch_size, capacity))
        return {"parameters": tree_bytes(self.params.draft), "state": tree_bytes(state)}

    def describe(self) -> dict[str, Any]:
        """Returns everything besides the request that decides an answer, as plain values.

        That is models, quantisation, dtype, drafter and rule with options, known costs of "auto",
        and the kernels that blocks have taken so far.
        """
        draft, drafter, known = self._draft, self.engine.drafter, self.round_costs.known
        return {
            "target": self.target.name,
            "target_quantization": self.target.quantization or "none",
            "draft": None if draft is None else draft.name,
            "draft_quantization": None if draft is None else draft.quantization or "none",
            "draft_vocabulary": (drafter and drafter.summary) or None,
            "drafter": self.drafter,
            "drafter_bytes": self._drafter_bytes,
            "num_draft_tokens": AUTO if self.engine.numbers else self.num_draft_tokens,
            "costs": known and known.to_json(),
            "acceptance": self.method.rule_name,
            "is_lossless": self.rule.is_lossless,
            **_kernels_of(self.target, draft),
            "drafter_options": dataclasses.asdict(self.method.drafter_options),
            "rule_options": dataclasses.asdict(self.method.rule_options),
            "dtype": self.target.params["embedding"].dtype.name,
            "mesh": self.engine.layout.shape,
            "max_seq_len": self.max_seq_len,
        }

    @functools.cached_property
    def pattern_processor(self) -> Processor:
        """What keeps an answer to its `SamplingParams.pattern`; made when the first comes."""
        from jspec.generation.pattern_processor import make_pattern_processor

        return make_pattern_processor(self.target)

    @property
    def processors(self) -> tuple[Processor, ...]:
        """Your own processors, and last, as it forbids tokens, that of patterns."""
        return (*self._processors, self.pattern_processor)

    def switches(self, settings: Sequence[SamplingParams]) -> Switches:
        """Returns what programs need that answer requests with these settings."""
        has_patterns = any(params.pattern is not None for params in settings)
        return needed_switches(settings, self.processors if has_patterns else self._processors)


def _key_of_costs(
    target: LoadedModel, draft: LoadedModel | None, method: Method, engine: Engine
) -> dict[str, Any]:
    """Returns what the costs of rounds depend on besides the machine and sizes."""
    own_code = None
    if _has_user_code(entries_of(method.drafter)):
        from jspec.generation.own_code import digest_of_own_code

        own_code = digest_of_own_code(engine.drafter)
    return {
        "models": [_describe(target), draft and _describe(draft)],
        "drafter": name_of(method.drafter),
        "drafter_options": dataclasses.asdict(method.drafter_options),
        "rule": method.rule_name,
        "own_code": own_code,
        "kernels": _kernels_of(target, draft),
        "is_one_graph": kernels.run_options() is not None,
    }


def _kernels_of(target: LoadedModel, draft: LoadedModel | None) -> dict[str, str | None]:
    """Returns what has computed the blocks of target and draft so far."""
    return {
        "kernels": kernels.chosen_kernels(target.own_config),
        "draft_kernels": draft and kernels.chosen_kernels(draft.own_config),
    }


def _describe(model: LoadedModel) -> list[str | None]:
    dtype = model.params["embedding"].dtype.name
    return [model.name, repr(model.config), dtype, model.quantization]


def _has_user_code(entries: Sequence[DrafterEntry]) -> bool:
    return any(not (entry.build.__module__ or "").startswith("jspec.") for entry in entries)


def _check_number_types() -> None:
    if jax.dtypes.canonicalize_dtype("int64") == "int64":
        raise InputError(
            "expected jax_enable_x64 to be off for a Generator, whose programs count in 32 bits; "
            "got it on"
        )


def _keywords() -> list[str]:
    """Returns the names of a Generator's arguments, but for the models and the options."""
    names = list(inspect.signature(Generator).parameters)
    return names[names.index("method") : names.index("options")]
