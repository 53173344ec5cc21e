"""Runs one generation call by call, to show what became of every draft, and when."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jspec.generation.answer import Drafts
from jspec.generation.batch import drafts_of
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.generation.rows import Row
from jspec.kernels import environment
from jspec.speculation.plain import plain_step
from jspec.speculation.round import propose, verify
from jspec.speculation.types import StepInfo
from jspec.weights import TokenizerLike


def record_trace(
    generator: Generator,
    prompt: str,
    settings: SamplingParams,
    *,
    chat: bool | None = None,
    argv: Sequence[str] = (),
) -> dict[str, Any]:
    """Answers one prompt in two programs a round, so that the drafts are seen between them.

    The drafter is not "none". The tokens are those that a Generator gives for the same request, but
    for stop strings, which are not looked at. All is run twice, and the second time is what is
    recorded: nothing is compiled then. Plain decoding is timed beside it.

    Returns:
      The trace; see `jspec.lab.analysis.trace`. It holds all that decides the answer, plain
      values: see `Generator.describe`, and the settings with the seed.

    Raises:
      InputError: a prompt or settings that cannot be answered.
    """
    target = generator.target
    row = generator.make_row(Request(prompt, settings), chat=chat)
    first, rounds = _run_twice(generator, row)
    _, plain_rounds = _run_twice(Generator(target, drafter="none"), row)
    last = rounds[-1]["emitted"][-1] if rounds else first
    return {
        **generator.describe(),
        "settings": dataclasses.asdict(settings),
        "argv": list(argv),
        "chat": chat,
        "prompt": prompt,
        **with_texts(target.tokenizer, row.prompt, first, rounds),
        "finish_reason": "stop" if last in row.stop_ids else "length",
        "plain_seconds": [one["target_seconds"] for one in plain_rounds],
        "environment": environment(),
    }


def _run_twice(generator: Generator, row: Row) -> tuple[int, list[dict[str, Any]]]:
    row = generator.round_costs.add_to(row)
    halves = _make_halves(generator)
    _run(generator, row, *halves)
    return _run(generator, row, *halves)


def _make_halves(generator: Generator) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the two programs of a round; of plain decoding the first one does nothing."""
    engine = generator.engine
    # The state is donated: its caches are written in place.
    jit = functools.partial(jax.jit, donate_argnums=1)
    if engine.drafter is None:
        step = jit(functools.partial(plain_step, target=engine.apply))
        return lambda params, state: (None, state), lambda params, state, _: step(params, state)
    shared = {"target": engine.apply, "drafter": engine.drafter, "rule": generator.rule}
    verify_half = functools.partial(verify, **shared, widths=engine.widths(batch_size=1))
    return jit(functools.partial(propose, **shared)), jit(verify_half)


def _run(
    generator: Generator,
    row: Row,
    propose_half: Callable[..., Any],
    verify_half: Callable[..., Any],
) -> tuple[int, list[dict[str, Any]]]:
    capacity = generator.engine.capacity_for(row.max_length)
    state = generator.engine.prefill(
        generator.params, row, capacity, generator.switches([row.settings])
    )
    first, rounds = int(state.last_token[0]), []
    jax.block_until_ready(state)
    start = time.perf_counter()
    while not bool(state.is_done[0]):
        begin = time.perf_counter()
        proposal, state = jax.block_until_ready(propose_half(generator.params, state))
        drafted = time.perf_counter()
        state, info = jax.block_until_ready(verify_half(generator.params, state, proposal))
        times = {
            "begin": begin - start,
            "draft_seconds": drafted - begin,
            "target_seconds": time.perf_counter() - drafted,
        }
        rounds.append(_counts(info) | times)
    return first, rounds


def _counts(info: StepInfo) -> dict[str, Any]:
    drafts, num_accepted = Drafts(), int(info.num_accepted[0])
    if info.drafts is not None:
        parents = None if info.parents is None else np.asarray(info.parents)[0]
        drafts = drafts_of(np.asarray(info.drafts)[0], parents, int(info.num_proposed[0]))
    emitted = np.asarray(info.tokens)[0, : int(info.num_tokens[0])].tolist()
    return round_record(drafts, num_accepted, emitted)


def round_record(drafts: Drafts, num_accepted: int, emitted: list[int]) -> dict[str, Any]:
    """Returns a round's drafts, how many were kept, and what was emitted; of a tree, which, too.

    Drafts after the end of the answer are left out, and with them a tree's other branches.
    """
    if len(emitted) <= num_accepted:
        drafts, num_accepted = Drafts(tuple(emitted)), len(emitted)
    record = {"drafts": list(drafts.ids), "num_accepted": num_accepted, "emitted": emitted}
    if not drafts.parents:
        return record
    kept = drafts.kept(emitted[:num_accepted])
    return record | {"parents": list(drafts.parents), "kept": kept}


def with_texts(
    tokenizer: TokenizerLike, prompt: Sequence[int], first: int, rounds: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the first token and the rounds with texts in the place of ids.

    A part of a character, or a token that has no text, is shown by its name.
    """

    def texts(before: Sequence[int], ids: Sequence[int]) -> list[str]:
        stream = tokenizer.stream([*prompt, *before])
        return [stream.push(token) or tokenizer.label(token)[0] for token in ids]

    said, traced = [first], []
    for a_round in rounds:
        drafts, kept, emitted = a_round["drafts"], a_round["num_accepted"], a_round["emitted"]
        following = texts([*said, *emitted[:kept]], emitted[kept:])
        paths = list[list[int]]()  # to each draft of a tree, which is read after its own path
        for draft, parent in zip(drafts, a_round.get("parents", ()), strict=False):
            paths.append([*(paths[parent] if parent >= 0 else []), draft])
        of_tree = [texts([*said, *path[:-1]], path[-1:])[0] for path in paths]
        texts_here = {
            "drafts": of_tree or texts(said, drafts), "next": following[0] if following else None,
        }  # fmt: skip
        traced.append(
            {key: value for key, value in a_round.items() if key != "emitted"} | texts_here
        )
        said += emitted
    return {"first": texts([], [first])[0], "rounds": traced}
