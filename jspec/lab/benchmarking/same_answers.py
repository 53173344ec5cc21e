"""Checks on a real model that text is the same, token for token, however it is generated.

Greedy answers of every method, alone and in batches, are compared with plain decoding's, and in
float32 transformers' as well (if torch is installed). Where two answers part, the target's logits
at that place are computed in one pass over all that comes before; the gap is how far the less
likely of the two tokens is from the best one. Only a gap below `EXCUSED_GAPS` is excused as
rounding; how much rounding really changes gaps is measured first. In float32, sampled answers of a
batch are compared with the same answers alone, without any excuse.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jspec.common.text_table import format_table
from jspec.drafters import DEFAULT_NUM_DRAFT_TOKENS
from jspec.generation.generator import Generator
from jspec.generation.logits_after import largest_gap_change, make_logits_after
from jspec.generation.request import Request, SamplingParams
from jspec.lab.analysis.divergence import (
    EXCUSED_GAPS,
    parting_gaps,
)
from jspec.lab.benchmarking.measurement import Measurement, Outcome, choose_prompts
from jspec.lab.benchmarking.transformers_baseline import TransformersModels, has_transformers
from jspec.weights.resolver import LoadedModel

_ROUNDING_TOKENS = 114

Answers = list[list[int]]


def measure_parity(asked: Measurement) -> Iterator[Outcome]:
    """Generates every answer by every method and compares; yields after each method.

    Yields:
      Records with `num_unexcused`, the methods whose answers differ without an excuse.
    """
    texts = [prompt.text for prompt in choose_prompts(asked)[0]]
    (target, draft), settings = asked.models(), asked.settings()
    plain = Generator(target, drafter="none")
    prompts = list(map(plain.encode_prompt, texts))
    dtype = target.params["embedding"].dtype.name
    excused = EXCUSED_GAPS[dtype]
    expected = _answers(plain, prompts, settings)
    logits_after, found = make_logits_after(target), []
    record: dict[str, Any] = {"excused_gap": excused, "compared": found}
    record["rounding"] = _rounding(target, prompts, expected)

    def answers(name: str, batch_size: int, prompts: Answers, settings: SamplingParams) -> Answers:
        (made,) = asked.generators(target, draft, name, batch_size=batch_size).values()
        return _answers(made, prompts, settings)

    def compare(name: str, answers: Answers, wanted: Answers, bound: float) -> Outcome:
        gaps = parting_gaps(prompts, answers, wanted, logits_after)
        found.append({
            "name": name, "num_equal": len(answers) - len(gaps), "num_answers": len(answers),
            "gaps": gaps, "is_excused": all(gap < bound for gap in gaps),
        })  # fmt: skip
        record["num_unexcused"] = sum(not one["is_excused"] for one in found)
        return Outcome(record, _format(record))

    for name in asked.methods:
        for size, title in ((1, name), (asked.batch_size, f"{name}, batched")):
            yield compare(title, answers(name, size, prompts, settings), expected, excused)
    if dtype != "float32":  # transformers rounds its residual stream, jspec does not: no bound
        return
    if has_transformers() and jax.process_count() == 1:
        generate = TransformersModels(target).method("none", 0, settings.max_new_tokens)
        theirs = [generate(prompt, 0).token_ids for prompt in prompts]
        yield compare("transformers", theirs, expected, excused)
    few = prompts[: asked.batch_size]
    sampled = dataclasses.replace(settings, temperature=0.8, top_p=0.95)
    for name in asked.methods:
        alone, together = (answers(name, size, few, sampled) for size in (1, len(few)))
        yield compare(f"{name}, sampled, batch against alone", together, alone, bound=0.0)


def _format(record: dict[str, Any]) -> str:
    rows = [
        [one["name"], f"{one['num_equal']}/{one['num_answers']}",
         ", ".join(f"{gap:.2g}" for gap in one["gaps"]),
         "excused" if one["is_excused"] else "NOT excused"]
        for one in record["compared"]
    ]  # fmt: skip
    table = format_table(["", "equal", "gaps", "differences"], rows)
    rounding = record["rounding"]
    measured = "" if rounding is None else f"; rounding changes a gap by at most {rounding:.2g}"
    return f"{table}\ngaps below {record['excused_gap']:g} are excused{measured}"


def _answers(
    generator: Generator, prompts: Sequence[list[int]], settings: SamplingParams
) -> Answers:
    requests = [
        Request(prompt, dataclasses.replace(settings, seed=seed))
        for seed, prompt in enumerate(prompts)
    ]
    return [result.token_ids for result in generator.generate(requests)]


def _rounding(target: LoadedModel, prompts: Sequence[list[int]], expected: Answers) -> float | None:
    """Returns how far the gap between the two best logits changes with the tokens of a pass."""
    # Cut to one length: one program, and small enough for logits of all places.
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, expected, strict=True)]
    texts = [text[:_ROUNDING_TOKENS] for text in texts if len(text) >= _ROUNDING_TOKENS]
    return largest_gap_change(target, texts, (1, DEFAULT_NUM_DRAFT_TOKENS + 1)) if texts else None
