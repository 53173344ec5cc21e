"""Compares methods of generating and baselines on the same prompts, in one process.

Every method answers every prompt in turn, repeat after repeat, after a warm-up: a machine that
slows down slows all of them. A time is that of a whole answer, prompt included, compilation
excluded.
"""

import resource
import sys
from collections.abc import Iterator, Mapping, Sequence

from jspec.evaluation.benchmarking.answers import format_summary, measure, summarise, warm_up
from jspec.evaluation.benchmarking.baselines import Wanted, plain_of, working_baselines
from jspec.evaluation.benchmarking.by_task import columns_by_method, format_columns
from jspec.evaluation.benchmarking.methods import answer_with, representative
from jspec.evaluation.benchmarking.outcome import Outcome
from jspec.generation.generator import Generator
from jspec.generation.prompts import Prompt
from jspec.weights.resolver import LoadedModel


def compare(
    generators: Mapping[str, Generator],
    prompts: Sequence[Prompt],
    tasks: Sequence[str | None],
    *,
    max_new_tokens: int,
    repeats: int,
    temperature: float = 0.0,
    decoding: bool = False,
    wanted: Wanted | None = None,
    baseline_draft: LoadedModel | None = None,
) -> Iterator[Outcome]:
    """Measures answers, and yields after each repeat all that has been measured.

    Args:
      generators: jspec's methods, by name, of one target; the first is what answers are compared
        with.
      prompts: the prompts.
      tasks: of each prompt; see `by_task.tasks_of`.
      max_new_tokens: of an answer.
      repeats: of every answer.
      temperature: of the target.
      decoding: whether the time of decoding alone counts, without the prompt; of jspec only.
      wanted: the baselines; None for none.
      baseline_draft: the draft model for transformers.
    """
    methods = {
        name: answer_with(one, max_new_tokens, temperature=temperature, decoding=decoding)
        for name, one in generators.items()
    }
    some = next(iter(generators.values()))
    texts = [prompt.text for prompt in prompts]
    ids = [some.encode_prompt(text) for text in texts]
    warm_up(methods, representative(ids, max_new_tokens))
    peak_bytes, left_out = _peak_bytes(), {}
    if wanted is not None:
        baselines, left_out = working_baselines(
            wanted, some.target, baseline_draft, texts, ids, max_new_tokens
        )
        methods |= baselines
    bases = plain_of(list(methods))
    record = {
        "peak_bytes": peak_bytes,
        "plain_of": bases,
        "tasks": list(tasks),
        "left_out": left_out,
        "described": {name: one.describe() for name, one in generators.items()},
    }
    timings = {}
    for timings in measure(methods, ids, repeats):
        record |= {"timings": {name: own.to_json() for name, own in timings.items()}}
        yield Outcome(record)
    report, columns = summarise(timings), columns_by_method(timings, bases, tasks)
    by_task = {name: own.to_json() for name, own in columns.items()}
    before = ", before the baselines were loaded" if wanted is not None else ""
    memory = f"peak memory of jspec{before}: {peak_bytes / 1e9:.2f} GB"
    tables = [format_summary(report), format_columns(columns, bases), memory]
    record |= {"methods": report, "spec_bench": by_task}
    yield Outcome(record, "\n\n".join(filter(None, tables)))


def _peak_bytes() -> int:
    """Returns the most memory that this process has had; macOS counts bytes, Linux kilobytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
