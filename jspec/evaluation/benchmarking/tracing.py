"""Runs one generation call by call, to show what became of every draft, and when."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jspec.common.compile_cache import use_compile_cache
from jspec.drafters import DrafterOptions
from jspec.generation.auto import numbers_of
from jspec.generation.batch import needed_switches
from jspec.generation.capacity import capacity_for
from jspec.generation.engine import verify_widths
from jspec.generation.programs import DRAFTER_DEFAULTS, RULE_DEFAULTS, Programs
from jspec.generation.prompts import encode_prompt
from jspec.generation.provenance import environment
from jspec.generation.request import Settings
from jspec.generation.rows import Row
from jspec.models import make_apply
from jspec.speculation.acceptance import RuleOptions
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.plain import plain_step
from jspec.speculation.step import propose, verify
from jspec.speculation.types import ModelParams, SpecState, StepInfo
from jspec.weights import TokenizerLike
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import mask_padding

ProposeFn = Callable[[ModelParams, SpecState], tuple[Proposal | None, SpecState]]
VerifyFn = Callable[[ModelParams, SpecState, Proposal | None], tuple[SpecState, StepInfo]]


def record_trace(
    target: LoadedModel,
    draft: LoadedModel | None,
    prompt: str,
    settings: Settings,
    *,
    drafter: str,
    num_draft_tokens: int | str,
    drafter_options: DrafterOptions = DRAFTER_DEFAULTS,
    acceptance: str = "rejection",
    rule_options: RuleOptions = RULE_DEFAULTS,
    chat: bool | None = None,
    argv: Sequence[str] = (),
) -> dict[str, Any]:
    """Answers one prompt in two programs a round, so that the drafts are seen between them.

    The tokens are those that a Generator gives for the same request, but for stop strings, which
    are not looked at. All is run twice, and the second time is what is recorded: nothing is
    compiled then. Plain decoding is timed beside it.

    Args:
      target: the model whose answer is wanted.
      draft: the draft model, for a drafter that has one.
      prompt: the prompt.
      settings: how to answer.
      drafter: its name; not "none".
      num_draft_tokens: a round, or "auto".
      drafter_options: of the drafters.
      acceptance: the rule's name.
      rule_options: of the rule.
      chat: whether to put the prompt into the chat template; None does if there is one.
      argv: the command line, for the record.

    Returns:
      The trace; see `jspec.evaluation.analysis.trace`. It holds all that decides the answer, plain
      values: models and their forms, settings with the seed, options of drafter and rule, costs of
      `auto`.

    Raises:
      InputError: a value out of range, or a draft that does not fit the target.
    """
    use_compile_cache()
    programs = Programs(
        target,
        draft,
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        acceptance=acceptance,
        rule_options=rule_options,
        drafter_options=drafter_options,
    )
    row = programs.make_row(encode_prompt(target, prompt, chat=chat, system=None), settings)
    first, rounds = _run_twice(target, programs, row)
    _, plain_rounds = _run_twice(target, Programs(target, drafter="none"), row)
    said = [first, *(token for one in rounds for token in one["emitted"])]
    return {
        "target": target.name,
        "target_quantization": target.quantization,
        "draft": None if draft is None else draft.name,
        "draft_quantization": None if draft is None else draft.quantization,
        "dtype": target.params["embedding"].dtype.name,
        "drafter": drafter,
        "num_draft_tokens": num_draft_tokens,
        "drafter_options": dataclasses.asdict(drafter_options),
        "costs": programs.auto and programs.auto.to_json(),
        "acceptance": acceptance,
        "rule_options": dataclasses.asdict(rule_options),
        "settings": dataclasses.asdict(settings),
        "argv": list(argv),
        "chat": chat,
        "prompt": prompt,
        **_with_texts(target.tokenizer, first, rounds),
        "finish_reason": "stop" if said[-1] in row.stop_ids else "length",
        "plain_seconds": [one["target_seconds"] for one in plain_rounds],
        "environment": environment(),
    }


def _run_twice(
    target: LoadedModel, programs: Programs, row: Row
) -> tuple[int, list[dict[str, Any]]]:
    """Returns the first token, and the rounds of the second run."""
    if programs.auto is not None:
        row = row._replace(costs=programs.auto.at(row.max_length))
    halves = _make_halves(target, programs)
    _run(programs, row, *halves)
    return _run(programs, row, *halves)


def _make_halves(target: LoadedModel, programs: Programs) -> tuple[ProposeFn, VerifyFn]:
    """Returns the two programs of a round; of plain decoding the first one does nothing."""
    apply = mask_padding(make_apply(target.config), target)
    drafter = programs.drafter
    if drafter is None:
        step = jax.jit(functools.partial(plain_step, target=apply), donate_argnums=1)
        return lambda params, state: (None, state), lambda params, state, _: step(params, state)
    numbers = numbers_of(drafter) if programs.auto is not None else ()
    shared = {"target": apply, "drafter": drafter, "rule": programs.rule}
    # The state is donated: its caches are written in place.
    return (
        jax.jit(functools.partial(propose, **shared), donate_argnums=1),
        jax.jit(
            functools.partial(verify, **shared, widths=verify_widths(drafter, numbers)),
            donate_argnums=1,
        ),
    )


def _run(
    programs: Programs, row: Row, propose_half: ProposeFn, verify_half: VerifyFn
) -> tuple[int, list[dict[str, Any]]]:
    """Returns the first token, and what each round proposed, emitted and took."""
    capacity = capacity_for(row.max_length, programs.num_draft_tokens + 1)
    state = programs.engine.prefill(programs.params, row, capacity, needed_switches([row.settings]))
    first, rounds = int(state.last_token[0]), []
    jax.block_until_ready(state)
    start = time.perf_counter()
    while not bool(state.is_done[0]):
        begin = time.perf_counter()
        proposal, state = jax.block_until_ready(propose_half(programs.params, state))
        drafted = time.perf_counter()
        state, info = jax.block_until_ready(verify_half(programs.params, state, proposal))
        end = time.perf_counter()
        rounds.append(
            _counts(proposal, info)
            | {
                "begin": begin - start,
                "draft_seconds": drafted - begin,
                "target_seconds": end - drafted,
            }
        )
    return first, rounds


def _counts(proposal: Proposal | None, info: StepInfo) -> dict[str, Any]:
    """Returns a round's drafts, how many were kept, and what was emitted.

    Drafts after the end of the answer are left out.
    """
    drafts: list[int] = []
    if proposal is not None:
        drafts = np.asarray(proposal.tokens)[0, : int(proposal.num_tokens[0])].tolist()
    num_emitted = int(info.num_tokens[0])
    emitted = np.asarray(info.tokens)[0, :num_emitted].tolist()
    num_accepted = int(info.num_accepted[0])
    if num_emitted <= num_accepted:
        drafts, num_accepted = drafts[:num_emitted], num_emitted
    return {"drafts": drafts, "num_accepted": num_accepted, "emitted": emitted}


def _with_texts(
    tokenizer: TokenizerLike, first: int, rounds: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the first token and the rounds with texts in the place of ids."""
    said = [first]
    traced = []
    for one in rounds:
        accepted = one["num_accepted"]
        next_id = one["emitted"][accepted] if len(one["emitted"]) > accepted else None
        traced.append(
            {
                "drafts": _texts(tokenizer, said, one["drafts"]),
                "num_accepted": accepted,
                "next": None
                if next_id is None
                else _texts(tokenizer, [*said, *one["drafts"][:accepted]], [next_id])[0],
                **{name: one[name] for name in ("begin", "draft_seconds", "target_seconds")},
            }
        )
        said += one["emitted"]
    return {"first": _texts(tokenizer, [], [first])[0], "rounds": traced}


def _texts(tokenizer: TokenizerLike, before: Sequence[int], ids: Sequence[int]) -> list[str]:
    """Returns the text of each token where it stands; a part of a character, or a token that has no
    text, is shown by its name.
    """
    stream = tokenizer.stream()
    for token_id in before:
        stream.push(token_id)
    return [stream.push(token_id) or _name(tokenizer, token_id) for token_id in ids]


def _name(tokenizer: TokenizerLike, token_id: int) -> str:
    names = {number: name for name, number in tokenizer.vocabulary().items()}
    return names.get(token_id, f"<{token_id}>")
