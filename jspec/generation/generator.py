"""The Python API: load once, then generate."""

import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

from jspec.common.compile_cache import use_compile_cache
from jspec.common.errors import InputError, check_count
from jspec.common.memory import (
    Budget,
    device_name,
    give_back_after_compiling,
    give_back_freed,
    tree_bytes,
)
from jspec.drafters import (
    DEFAULT_NUM_DRAFT_TOKENS,
    DrafterOptions,
    choose_drafter,
    with_shipped_head,
)
from jspec.generation.answer import Answer
from jspec.generation.auto import AUTO
from jspec.generation.batch import Batch
from jspec.generation.capacity import capacity_for
from jspec.generation.costs import RoundCosts
from jspec.generation.encode_prompt import encode_prompt
from jspec.generation.engine import MAX_ROUNDS_PER_VISIT, Row
from jspec.generation.programs import make_programs
from jspec.generation.request import Piece, Request, Result, Settings
from jspec.generation.row_checks import make_row
from jspec.generation.validate_options import (
    check_draft_temperature,
    check_num_draft_tokens,
    check_rule_options,
)
from jspec.sampling.processor import Processor
from jspec.speculation.acceptance import RuleOptions, get_rule
from jspec.weights.resolver import LoadedModel, load_model, model_name
from jspec.weights.vocabulary import used_vocab_size

DEFAULT_TARGET = "smollm2-135m-instruct"
_DEFAULTS = Settings()
_RULE_DEFAULTS = RuleOptions()
_DRAFTER_DEFAULTS = DrafterOptions()


class Generator:
    """A target model, a drafter, and the compiled programs that run them.

    Requests are answered `batch_size` at a time; when one is finished the next takes its row. An
    answer depends on its own prompt and settings alone, not on its neighbours.
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | None = None,
        *,
        drafter: str | None = None,
        num_draft_tokens: int | str = DEFAULT_NUM_DRAFT_TOKENS,
        costs: RoundCosts | None = None,
        acceptance: str = "rejection",
        rule_options: RuleOptions = _RULE_DEFAULTS,
        drafter_options: DrafterOptions = _DRAFTER_DEFAULTS,
        batch_size: int = 1,
        max_seq_len: int | None = None,
        rounds_per_visit: int = 8,
        processors: Sequence[Processor] = (),
        on_result: Callable[[Result], object] | None = None,
        on_start: Callable[[Budget], object] | None = None,
    ) -> None:
        """Prepares the models; nothing is compiled yet.

        Args:
          target: the model whose answers are wanted.
          draft: a cheaper model with the same vocabulary, for the drafters "model" and
            "hierarchical".
          drafter: a name among `jspec.drafters.DRAFTERS`, or several joined by "+": the first that
            has something to say proposes. None takes "model" where there is a draft, else
            "prompt_lookup", and "+eagle" where a head for the target comes with jspec.
          num_draft_tokens: drafts a round; "auto" chooses them, round by round.
          costs: what rounds cost, for "auto"; None measures them once on this machine.
          acceptance: the rule: "rejection", "block", "coupled", or "greedy" for temperature 0; the
            lossy ones are "lenient", "lenient_argmax" and "typical".
          rule_options: numbers of the lossy rules.
          drafter_options: options of the drafters.
          batch_size: requests answered at a time.
          max_seq_len: tokens that prompt and answer may come to; None takes the model's context.
          rounds_per_visit: rounds between two looks of the host.
          processors: logits processors of your own; they come after jspec's, before temperature.
          on_result: called with every answer, such as `AcceptanceMonitor.add`.
          on_start: called with the device and the memory of a run, before any prompt is read.

        Raises:
          InputError: a value out of range, a draft that does not fit the target, or an option that
            neither drafter nor rule reads.
        """
        use_compile_cache()
        drafter = choose_drafter(
            drafter, has_draft=draft is not None, target=target.name, options=drafter_options
        )
        check_num_draft_tokens(num_draft_tokens, drafter)
        drafter_options = with_shipped_head(drafter, drafter_options, target.name)
        context = target.config.max_seq_len
        self.target = target
        self._draft = draft
        self.max_seq_len = context if max_seq_len is None else max_seq_len
        check_count("max_seq_len", self.max_seq_len, 2, context)
        check_count("batch_size", batch_size, 1, 4096)
        check_count("rounds_per_visit", rounds_per_visit, 1, MAX_ROUNDS_PER_VISIT)
        self._acceptance = acceptance
        self._batch_size = batch_size
        self._rounds_per_visit = rounds_per_visit
        self._drafter_options, self._rule_options = drafter_options, rule_options
        self._rule = get_rule(acceptance, rule_options)
        check_rule_options(rule_options, acceptance, drafter)
        self._make_programs = functools.partial(
            make_programs,
            target,
            draft,
            drafter=drafter,
            drafter_options=drafter_options,
            acceptance=acceptance,
            rule=self._rule,
            max_seq_len=self.max_seq_len,
            batch_size=batch_size,
        )
        self._programs = self._make_programs(num_draft_tokens=num_draft_tokens, costs=costs)
        self.drafter = drafter
        self.num_draft_tokens = self._programs.num_draft_tokens
        self._drafter_bytes = self._programs.drafter_bytes(
            batch_size, capacity_for(self.max_seq_len, self.num_draft_tokens + 1)
        )
        self._processors = tuple(processors)
        self._on_result, self._on_start = on_result, on_start
        self._make_row = functools.partial(
            make_row,
            config=target.config,
            vocab_size=used_vocab_size(target),
            max_seq_len=self.max_seq_len,
            acceptance=acceptance,
            temperatures=self._rule.temperatures,
        )
        give_back_after_compiling()
        give_back_freed()  # what loading models and heads took besides

    @classmethod
    def load(
        cls,
        target: str | os.PathLike[str] = DEFAULT_TARGET,
        draft: str | os.PathLike[str] | None = None,
        *,
        dtype: str = "bfloat16",
        target_quantization: str | None = None,
        draft_quantization: str | None = None,
        **options: Any,
    ) -> "Generator":
        """Loads models by name and returns a Generator.

        Args:
          target: a Hugging Face folder or hub name, a .gguf file, an Orbax folder, a preset such as
            "smollm2-135m-instruct", or "random:" and a preset's name.
          draft: likewise, or None.
          dtype: "bfloat16" or "float32", of weights and caches.
          target_quantization: "int8" or "int4" rounds the target's weights: another model, whose
            distribution is then the one that is kept; None leaves them alone.
          draft_quantization: likewise of the draft, which changes no distribution.
          **options: of the constructor.

        Raises:
          InputError: a model that cannot be loaded, or an option out of range.
        """
        target = model_name(target)
        options["drafter"] = choose_drafter(
            options.get("drafter"),
            has_draft=draft is not None,
            target=target,
            options=options.get("drafter_options", _DRAFTER_DEFAULTS),
        )
        if draft is None and draft_quantization is not None:
            raise InputError(f"draft_quantization {draft_quantization!r} expects a draft model")
        loaded = load_model(target, dtype=dtype, quantization=target_quantization)
        if draft is None:
            return cls(loaded, **options)
        quantized = load_model(draft, dtype=dtype, quantization=draft_quantization)
        return cls(loaded, quantized, **options)

    @overload
    def generate(
        self, prompts: str | Request, settings: Settings = ..., *, chat: bool | None = ...,
        system: str | None = ...,
    ) -> Result: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Sequence[str | Request], settings: Settings = ..., *,
        chat: bool | None = ..., system: str | None = ...,
    ) -> list[Result]: ...  # fmt: skip

    def generate(
        self,
        prompts: str | Request | Sequence[str | Request],
        settings: Settings = _DEFAULTS,
        *,
        chat: bool | None = None,
        system: str | None = None,
    ) -> Result | list[Result]:
        """Answers one prompt or many.

        Args:
          prompts: one, or a list; a Request carries its own settings.
          settings: for the prompts that are texts.
          chat: whether to put texts into the model's chat template; None does if it has one.
          system: a system message for the template.

        Returns:
          One result for one prompt; else a list, in the order of the prompts.

        Raises:
          InputError: an empty prompt, or one that the context cannot hold.
        """
        is_one = isinstance(prompts, str | Request) or not isinstance(prompts, Iterable)
        listed: Sequence[str | Request] = [prompts] if is_one else prompts  # type: ignore[assignment]
        requests = [p if isinstance(p, Request) else Request(p, settings) for p in listed]
        pieces = self.run(requests, chat=chat, system=system)
        results = {piece.index: piece.result for piece in pieces if piece.result is not None}
        return results[0] if is_one else [results[index] for index in range(len(requests))]

    def stream(
        self,
        prompt: str | Request,
        settings: Settings = _DEFAULTS,
        *,
        chat: bool | None = None,
        system: str | None = None,
    ) -> Iterator[Piece]:
        """Answers one prompt piece by piece; see `generate`."""
        request = prompt if isinstance(prompt, Request) else Request(prompt, settings)
        return self.run([request], chat=chat, system=system)

    def run(
        self, requests: Sequence[Request], *, chat: bool | None = None, system: str | None = None
    ) -> Iterator[Piece]:
        """Answers many requests, `batch_size` at a time, piece by piece, as they come.

        Args:
          requests: what to answer; `Piece.index` counts them.
          chat: see `generate`.
          system: see `generate`.

        Yields:
          Pieces of all answers in hand; the last piece of each carries its result.

        Raises:
          InputError: before the first piece, if any request cannot be answered.
        """
        if not requests:
            return
        rows = []
        for index, request in enumerate(requests):
            try:
                row = self._row_of(request, chat, system)
            except InputError as error:
                where = f"prompt {index}: " if len(requests) > 1 else ""
                raise InputError(f"{where}{error}") from None
            auto = self._programs.auto
            rows.append(row if auto is None else row._replace(costs=auto.at(row.max_length)))
        batch = self._make_batch(rows)
        waiting = collections.deque(
            self._new_answer(index, request, rows[index]) for index, request in enumerate(requests)
        )
        answers: dict[int, Answer] = {}
        while waiting or answers:
            for place in batch.places:
                while waiting and place not in answers:
                    answer = waiting.popleft()
                    answer.start()
                    answer.add_first(batch.fill(place, answer.index))
                    if answer.finish_reason is None:
                        answers[place] = answer
                    else:
                        batch.finish(place)
                    yield self._take_piece(answer)
            seconds = batch.run(self._rounds_per_visit) if answers else 0.0
            for place, answer in list(answers.items()):
                answer.add_device_seconds(seconds)
                for a_round in batch.rounds(place):
                    answer.add_round(a_round)
                if answer.finish_reason is not None:
                    batch.finish(place)
                    del answers[place]
                yield self._take_piece(answer)

    def check(
        self, request: Request, *, chat: bool | None = None, system: str | None = None
    ) -> None:
        """Checks that a request can be answered; see `run`.

        Raises:
          InputError: it cannot.
        """
        self._row_of(request, chat, system)

    def _row_of(self, request: Request, chat: bool | None, system: str | None) -> Row:
        check_draft_temperature(request.settings, [(self.drafter, self._drafter_options)])
        prompt = self.encode_prompt(request.prompt, chat, system)
        return self._make_row(prompt, request.settings)

    def _make_batch(self, rows: Sequence[Row]) -> Batch:
        batch = Batch(
            self._programs.engine,
            self._programs.params,
            rows,
            batch_size=self._batch_size,
            head_room=self.num_draft_tokens + 1,
            processors=self._processors,
            drafters=self._programs.drafter_of_kind,
        )
        if self._on_start is not None:
            weights = tree_bytes(self._programs.params)
            self._on_start(Budget(device_name(), weights, batch.room))
        return batch

    @property
    def is_lossless(self) -> bool:
        """Whether what is emitted follows the target's distribution."""
        return self._rule.is_lossless

    def describe(self) -> dict[str, Any]:
        """Returns what besides a request decides its answer: models, drafter, rule, dtype."""
        auto = self._programs.auto
        return {
            "target": self.target.name,
            "target_quantization": self.target.quantization,
            "draft": None if self._draft is None else self._draft.name,
            "draft_quantization": None if self._draft is None else self._draft.quantization,
            "drafter": self.drafter,
            "drafter_bytes": self._drafter_bytes,
            "num_draft_tokens": self.num_draft_tokens if auto is None else AUTO,
            "costs": auto and auto.to_json(),
            "acceptance": self._acceptance,
            "is_lossless": self.is_lossless,
            "drafter_options": dataclasses.asdict(self._drafter_options),
            "rule_options": dataclasses.asdict(self._rule_options),
            "dtype": self.target.params["embedding"].dtype.name,
            "max_seq_len": self.max_seq_len,
        }

    def encode_prompt(
        self, prompt: str | Sequence[int], chat: bool | None = None, system: str | None = None
    ) -> list[int]:
        """Returns the ids that the model is given for a prompt; see `generate`.

        Raises:
          InputError: an empty prompt, or no chat template where one is asked for.
        """
        return encode_prompt(self.target, prompt, chat=chat, system=system)

    @property
    def costs(self) -> RoundCosts | None:
        """What rounds cost here; measured now if need be. None with a fixed number of drafts."""
        return None if self._programs.auto is None else self._programs.auto.costs

    def measure_costs(self) -> RoundCosts | None:
        """Measures what rounds cost here, a plain step and rounds with drafts, apart from any run.

        With a fixed number of drafts that number is measured beside 0, with "auto" all that it
        chooses from. Takes a few seconds, and as many again to compile. None for plain decoding.
        """
        if self._programs.drafter is None:
            return None
        programs = self._programs
        if programs.auto is None:
            numbers = 0, self.num_draft_tokens
            programs = self._make_programs(num_draft_tokens=AUTO, costs=None, numbers=numbers)
        assert programs.auto is not None
        return programs.auto.measure()

    def _take_piece(self, answer: Answer) -> Piece:
        piece = answer.take_piece()
        if piece.result is not None and self._on_result is not None:
            self._on_result(piece.result)
        return piece

    def _new_answer(self, index: int, request: Request, row: Row) -> Answer:
        return Answer(
            index,
            request,
            list(row.prompt),
            tokenizer=self.target.tokenizer,
            eos_ids=self.target.config.eos_ids,
            max_new_tokens=row.max_length - len(row.prompt),
            num_draft_tokens=self.num_draft_tokens,
        )
