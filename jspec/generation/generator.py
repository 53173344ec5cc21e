"""The Python API: load models once, then generate."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from jspec.common.errors import InputError
from jspec.common.memory import Budget, give_back_after_compiling, give_back_freed
from jspec.common.user_cache import use_compile_cache
from jspec.drafters import DEFAULT_NUM_DRAFT_TOKENS, DrafterOptions, choose_drafter
from jspec.generation.costs import RoundCosts
from jspec.generation.programs import DRAFTER_DEFAULTS, RULE_DEFAULTS, Programs
from jspec.generation.result import Result
from jspec.generation.runner import RequestRunner
from jspec.sampling.processor import Processor
from jspec.speculation.acceptance import RuleOptions
from jspec.weights.resolver import LoadedModel, load_model, model_name

DEFAULT_TARGET = "smollm2-135m-instruct"


class Generator(RequestRunner):
    """A target model, a drafter, and the compiled programs that run them.

    Up to `batch_size` requests are answered together; when an answer ends, the next request takes
    its row. An answer depends on its own prompt and settings alone, never on the other rows.

    Example:
      >>> import jspec
      >>> generator = jspec.Generator.load("smollm2-135m-instruct")
      >>> result = generator.generate("Why is the sky blue?", jspec.Settings(max_new_tokens=64))
      >>> print(result.text)
      >>> print(result.stats.tokens_per_target_call)

    Attributes:
      target: the target model.
      drafter: name of the drafter.
      num_draft_tokens: maximum number of drafts a round; 0 for plain decoding.
      max_seq_len: maximum number of tokens of prompt and answer together.
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
        rule_options: RuleOptions = RULE_DEFAULTS,
        drafter_options: DrafterOptions = DRAFTER_DEFAULTS,
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
          drafter: a name from `jspec.drafters.DRAFTERS`, or several joined by "+", of which the
            first that has a proposal makes it. None means "model" with a draft model and
            "prompt_lookup" without, plus "+eagle" if jspec ships a head for the target.
          num_draft_tokens: number of drafts a round; "auto" chooses it in every round.
          costs: costs of rounds, for "auto"; None measures them once on this machine.
          acceptance: the acceptance rule. "rejection", "block" and "coupled" keep the target's
            distribution, and so does "greedy", for temperature 0; "lenient", "lenient_argmax" and
            "typical" do not.
          rule_options: options of the last three rules.
          drafter_options: options of the drafters.
          batch_size: maximum number of requests answered together.
          max_seq_len: maximum number of tokens of prompt and answer together; None takes the
            model's context.
          rounds_per_visit: number of rounds between two looks of the host at the tokens.
          processors: your own logits processors. They are applied after those of jspec and before
            the temperature.
          on_result: called with every result, for instance `AcceptanceMonitor.add`.
          on_start: called before each run with the device and the memory that the run takes.

        Raises:
          InputError: if a value is out of range, the draft model does not fit the target, or
            neither the drafter nor the rule reads an option.
        """
        use_compile_cache()
        programs = Programs(
            target,
            draft,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens,
            costs=costs,
            acceptance=acceptance,
            rule_options=rule_options,
            drafter_options=drafter_options,
            batch_size=batch_size,
            max_seq_len=max_seq_len,
        )
        super().__init__(
            programs,
            rounds_per_visit=rounds_per_visit,
            processors=processors,
            on_result=on_result,
            on_start=on_start,
        )
        self.target, self.max_seq_len = target, programs.max_seq_len
        self.drafter, self.num_draft_tokens = programs.drafter_name, programs.num_draft_tokens
        give_back_after_compiling()
        give_back_freed()  # what loading models and heads has taken in addition

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

        Example:
          >>> Generator.load("HuggingFaceTB/SmolLM2-360M-Instruct", "smollm2-135m-instruct")

        Args:
          target: a Hugging Face folder or hub name, a .gguf file, an Orbax folder, a preset such as
            "smollm2-135m-instruct", or "random:" followed by a preset's name.
          draft: the draft model, named in the same way, or None.
          dtype: "bfloat16" or "float32", for weights and caches.
          target_quantization: "int8" or "int4" rounds the target's weights, which makes it another
            model: the answers follow the distribution of that model. None leaves them alone.
          draft_quantization: the same for the draft model, which changes no answer's distribution.
          **options: keyword arguments of the constructor.

        Raises:
          InputError: if a model cannot be loaded, or an option is out of range.
        """
        target = model_name(target)
        # Checked before the models are loaded, which takes long.
        options["drafter"] = choose_drafter(
            options.get("drafter"),
            has_draft=draft is not None,
            target=target,
            options=options.get("drafter_options", DRAFTER_DEFAULTS),
        )
        if draft is None and draft_quantization is not None:
            raise InputError(f"draft_quantization {draft_quantization!r} expects a draft model")
        load = functools.partial(load_model, dtype=dtype)
        loaded = load(target, quantization=target_quantization)
        loaded_draft = None if draft is None else load(draft, quantization=draft_quantization)
        return cls(loaded, loaded_draft, **options)

    @property
    def is_lossless(self) -> bool:
        """Whether the answers follow the target's distribution exactly."""
        return self._programs.rule.is_lossless

    def describe(self) -> dict[str, Any]:
        """Returns everything besides the request that decides an answer, as plain values.

        That is models, quantisation, dtype, drafter and acceptance rule with their options, and the
        costs by which "auto" chooses, once they are known.
        """
        return self._programs.describe()

    @property
    def costs(self) -> RoundCosts | None:
        """The costs of rounds on this machine, measured now if they are not known.

        None where the number of drafts is fixed.
        """
        auto = self._programs.auto
        return None if auto is None else auto.costs

    def measure_costs(self) -> RoundCosts | None:
        """Measures what rounds cost on this machine: a plain step, and rounds with drafts.

        With a fixed number of drafts that number is measured beside 0; with "auto", all that it
        chooses from. This takes a few seconds, and about as long again to compile.

        Returns:
          The costs; None for plain decoding.
        """
        return self._programs.measure_costs()
