"""Times of a model's calls beside the least time the machine allows, and the parts of a round.

The least time of a call is the longer of two: reading its bytes at the machine's bandwidth, and
doing its operations at the machine's rate (the roofline of Williams et al., 2009,
doi:10.1145/1498765.1498785). Bandwidth and rate are measured with the products of a model; bytes
and operations are those of `CallCost`.

Rounds are those that `auto` measures (`generation.costs`); drafting is what they take beside the
call and the choice. For a drafter that computes some of the target's layers, from which the call
goes on, this means nothing.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jspec.common.errors import say
from jspec.common.memory import tree_bytes
from jspec.common.text_table import format_table, number_cell
from jspec.common.timing import Loop, TurnLoop, seconds_each, seconds_in_turn, with_first
from jspec.common.typing import Logits, RowTokens
from jspec.drafters import DrafterOptions
from jspec.drafters.model import with_draft_vocabulary
from jspec.generation.costs import PROMPT_TOKENS
from jspec.generation.generator import Generator
from jspec.generation.options import make_spec
from jspec.generation.request import Request, SamplingParams
from jspec.generation.rows import capacity_for
from jspec.kernels import chunk_widths, first_argmax, run_options
from jspec.lab.analysis.call_cost import CallCost, Machine, measure_machine, streamed_rules
from jspec.lab.benchmarking.measurement import Measurement, Outcome
from jspec.models import init_cache, make_apply
from jspec.sampling.distribution import draw_next
from jspec.sampling.settings import SamplingSettings, Switches
from jspec.speculation.acceptance import get_rule
from jspec.speculation.round import judge
from jspec.speculation.types import Proposal
from jspec.weights.quantize import PACKED_KINDS
from jspec.weights.resolver import LoadedModel

Line = dict[str, Any]
"""A measured part: its `name`, its `seconds`, and those of `_COLUMNS` that apply to it.

`ratio` is that of the seconds to those of the model's call on one token, or of a round's to those
of a plain step, measured by turns.
"""

_CONTEXT = 128
_COLUMNS = {  # title, format, unit
    "num_bytes": ("MB", ".1f", 1e-6),
    "operations": ("GFLOP", ".2f", 1e-9),
    "least_seconds": ("least ms", ".2f", 1e3),
    "seconds": ("measured ms", ".3f", 1e3),
    "share": ("share", ".0%", 1),  # the least time's of the measured one
    "ratio": ("calls on 1", ".2f", 1),
}
_SLOWED = "a share above 100 %: the machine was slower while its limit was measured"

_MOST_WIDTH = 16  # of a verify call; wider calls are those of a prefill
_NUM_DRAFTS = 5  # of the choices that are timed
# One token over and over: a drafter that looks back finds a match.
PROFILED = Request([1] * PROMPT_TOKENS, SamplingParams(max_new_tokens=64))
_KINDS = {  # of a choice
    "T = 0": {"temperature": 0.0},
    "T = 1": {},
    "T = 1, filters": {"has_filters": True},
    "T = 1, drafts with a distribution": {"has_distribution": True},
}


def measure_roofline(asked: Measurement) -> Iterator[Outcome]:
    """Measures calls of the target and of the draft, and rounds; yields after each line.

    The machine is measured before and after; the better figures count.
    """
    target, draft = asked.models()
    generators = asked.generators(target, draft)
    dtype = str(target.params["embedding"].dtype)
    machine, lines = measure_machine(dtype), []

    def all_lines() -> Iterator[Line]:
        yield from call_lines(target, "target", asked.quick)
        yield from round_lines(generators)
        if draft is not None:
            used = with_own_head(target, draft, asked.options)
            yield from call_lines(used, "draft", asked.quick)
        yield from choice_lines(target.config.vocab_size)

    for line in all_lines():
        say(f"{line['name']}: {1e3 * line['seconds']:.3g} ms")
        lines.append(line)
        yield _outcome(lines, machine)
    yield _outcome(lines, Machine(*map(max, machine, measure_machine(dtype))))
    if asked.trace_folder is not None:
        profile(next(reversed(generators.values())), asked.trace_folder)


def profile(generator: Generator, folder: str) -> None:
    """Writes a trace of JAX's profiler while an answer is generated, for a viewer such as XProf."""
    generator.generate(PROFILED)  # compiles
    with jax.profiler.trace(folder):
        generator.generate(PROFILED)
    say(f"a profile of an answer is in {folder}")


def _outcome(lines: Sequence[Line], machine: Machine) -> Outcome:
    lines = [on_machine(line, machine) for line in lines]
    record = {"machine": machine._asdict(), "lines": lines}
    return Outcome(record, format_lines(lines, machine))


def on_machine(line: Line, machine: Machine) -> Line:
    """Returns a line with all columns, the least seconds that a machine needs among them."""
    line = {"name": line["name"]} | dict.fromkeys(_COLUMNS) | line
    if line["num_bytes"] is None:
        return line
    least = max(line["num_bytes"] / machine.bandwidth, line["operations"] / machine.flop_rate)
    return line | {"least_seconds": least, "share": least / line["seconds"]}


def format_lines(lines: Sequence[Line], machine: Machine) -> str:
    """Returns a table of lines that are complete, under the machine's rates."""
    rows = [
        [line["name"], *(number_cell(line[key], *look) for key, (_, *look) in _COLUMNS.items())]
        for line in lines
    ]
    table = format_table(["", *(title for title, *_ in _COLUMNS.values())], rows)
    rates = (
        f"{machine.bandwidth / 1e9:.1f} GB/s and {machine.flop_rate / 1e9:.0f} GFLOP/s by the "
        "products of this program"
    )
    is_slowed = any((line["share"] or 0) > 1 for line in lines)
    return "\n".join([rates, table, *[_SLOWED] * is_slowed])


def _shapes(most: int, is_quick: bool) -> list[tuple[int, int, int]]:
    """Returns width, context and rows of calls by each of the three, where a context allows it."""
    widths, contexts, batch_sizes = (1, 2, 3, 4, 6, 8, 16), (1024, 4096, 8191), (4, 16)
    if is_quick:
        widths, contexts, batch_sizes = (1, 6, 16), (4096,), (16,)
    middle = min(_CONTEXT, most // 2)
    shapes = [(width, middle, 1) for width in widths]
    shapes += [(1, context, 1) for context in contexts]
    shapes += [(1, middle, batch_size) for batch_size in batch_sizes]
    return [shape for shape in shapes if shape[0] + shape[1] <= most]


def model_cost(model: LoadedModel, float_bytes: int) -> CallCost:
    """Returns what calls of a model cost; how small packed weights are, only they tell."""
    if model.quantization not in PACKED_KINDS:
        return CallCost(model.config, None, model.quantization, float_bytes)
    streamed = streamed_rules(model.config)
    leaves = flatten_dict(model.params)
    size = tree_bytes([leaves[rule.path] for rule in streamed])
    num_weights = sum(math.prod(rule.shape) for rule in streamed)
    return CallCost(model.config, size / num_weights, None, float_bytes)


def call_lines(model: LoadedModel, role: str, is_quick: bool) -> Iterator[Line]:
    """Yields calls of a model: by width, by context, by batch size, and of a prefill.

    `role` is its name in the lines. With `is_quick` fewer are measured, and each less often.
    """
    itemsize = model.params["embedding"].dtype.itemsize
    cost = model_cost(model, itemsize)
    shapes = _shapes(model.config.max_seq_len, is_quick)
    first, one_token = call_loop(model, *shapes[0]), 0.0
    for shape in shapes:
        width, context, rows = shape
        # Each by turns with the first call; a cache is freed before the next one is made.
        loops = {"own": first if shape == shapes[0] else call_loop(model, *shape), "first": first}
        turns = list(seconds_in_turn(loops, 5 if is_quick else 15))
        del loops
        one_token = statistics.median(turn["first"] for turn in turns)
        yield {
            "name": f"{role}: call on {width} tokens, {context} before, {rows} rows",
            "seconds": statistics.median(turn["own"] for turn in turns),
            "ratio": statistics.median(turn["own"] / turn["first"] for turn in turns),
            "num_bytes": cost.call_bytes(width, context=context, batch_size=rows),
            "operations": cost.call_operations(width, context=context, batch_size=rows),
        }
    outputs = model.config.head_size or model.config.vocab_size
    head = 2 * outputs * model.config.embed_dim  # operations on one token
    widths = chunk_widths(model.params["embedding"])
    for width in (widths.narrow, widths.wide):
        seconds = time_call(model, width, context=0)
        yield {
            "name": f"{role}: prefill of {width} tokens",
            "seconds": seconds,
            "ratio": seconds / one_token,
            "num_bytes": cost.call_bytes(width, context=0),
            # Only the last token's logits are computed.
            "operations": cost.call_operations(width, context=0) - (width - 1) * head,
        }


def with_own_head(target: LoadedModel, draft: LoadedModel, options: DrafterOptions) -> LoadedModel:
    """Returns the draft model as rounds use it: with the head that `draft_vocab_size` leaves."""
    spec = with_draft_vocabulary(make_spec(target, draft, "model", options, 1))
    assert spec.draft_config is not None
    return dataclasses.replace(draft, config=spec.draft_config, params=spec.draft_params)


def time_call(model: LoadedModel, width: int, context: int) -> float:
    """Returns the seconds of a call of one row, the median of several measurements."""
    return seconds_each(call_loop(model, width, context))


def call_loop(model: LoadedModel, width: int, context: int, batch_size: int = 1) -> TurnLoop:
    """Returns a loop over calls, each with a greedy choice, on what the one before it chose.

    Each is on `width` tokens of each row, after `context` others in its cache. The loop is compiled
    as a run of rounds is: on a GPU as one graph.
    """
    apply = make_apply(model.config)
    # Of a long block, as of a prefill, only the last logits are wanted.
    last = jnp.full([batch_size], width - 1, jnp.int32) if width > _MOST_WIDTH else None

    def turn(params: Any, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        cache, tokens = carry
        logits, _, cache = apply(params, tokens, cache, logits_at=last)
        return cache, jnp.broadcast_to(first_argmax(logits)[0], tokens.shape)

    dtype, capacity = model.params["embedding"].dtype, capacity_for(context, width)
    cache = init_cache(model.config, batch_size=batch_size, capacity=capacity, dtype=dtype)
    cache = cache.commit(jnp.full([batch_size], context, jnp.int32))
    carry = cache, jnp.zeros([batch_size, width], jnp.int32)
    return TurnLoop(turn, model.params, carry, run_options())


def choice_lines(vocab_size: int) -> Iterator[dict[str, Any]]:
    """Yields what follows a call: distributions, acceptance, choice of tokens."""
    for num_drafts in (0, _NUM_DRAFTS):
        for title, options in _KINDS.items():
            if num_drafts or not options.get("has_distribution"):
                name = f"choice among {vocab_size} ids, {num_drafts} drafts, {title}"
                choice = choice_loop(vocab_size, num_drafts, **options)
                yield {"name": name, "seconds": seconds_each(choice)}


def round_lines(generators: Mapping[str, Generator]) -> Iterator[dict[str, Any]]:
    """Yields rounds of each Generator, T = 0: drafting, the whole, and the host beside it."""
    for name, generator in generators.items():
        yield from _rounds_of(name, generator)
        generator.generate(PROFILED)
        stats = [generator.generate(PROFILED).stats for _ in range(5)]
        device = sorted(s.device_seconds / s.num_rounds for s in stats if s.num_rounds)
        if device and generator.engine.drafter is None:  # by whole visits: one round may be noise
            yield {"name": f"{name}: a round without drafts", "seconds": device[len(device) // 2]}
        # The least: text, bookkeeping and Python are only slowed down by other work on the machine.
        host = [(s.decode_seconds - s.device_seconds) / s.num_rounds for s in stats if s.num_rounds]
        if host:
            yield {"name": f"{name}: the host, a round", "seconds": min(host)}


def _rounds_of(name: str, generator: Generator) -> Iterator[dict[str, Any]]:
    target, costs = generator.target, generator.round_costs.measure()
    if costs is None:
        return
    beside = {}
    for number in costs.numbers[1:]:
        choice = choice_loop(target.config.vocab_size, number, temperature=0.0)
        beside[number] = time_call(target, number + 1, PROMPT_TOKENS) + seconds_each(choice)
    plain = costs.seconds[0][0][0]
    yield {"name": f"{name}: a round without drafts", "seconds": plain, "ratio": 1.0}
    for drafter, (plain, *others) in zip(costs.drafters, costs.seconds[0], strict=True):
        for number, whole in zip(beside, others, strict=True):
            drafting = max(whole - beside[number], 0.0)  # a difference of two times
            yield {"name": f"{name}: {drafter} drafts {number}", "seconds": drafting}
            title = f"{name}: a round of {drafter}, {number} drafts"
            yield {"name": title, "seconds": whole, "ratio": whole / plain}


def choice_loop(
    vocab_size: int,
    num_drafts: int,
    *,
    temperature: float = 1.0,
    has_filters: bool = False,
    has_distribution: bool = False,
) -> Loop:
    """Returns a loop over what turns a call's logits into a round's tokens, for one row.

    Drafts are judged by the rule `rejection`; 0 of them is plain decoding. With a distribution, the
    drafts' is uniform; filters are top-k, top-p and min-p.
    """
    unit = jnp.ones([1])
    settings = SamplingSettings(
        temperature * unit, 50 * unit.astype(jnp.int32), 0.95 * unit, 0.02 * unit,
        switches=Switches(top_k=has_filters, top_p=has_filters, min_p=has_filters),
    )  # fmt: skip

    def turn(settings: SamplingSettings, carry: tuple[Logits, RowTokens]) -> Any:
        logits, token = carry
        token = choose(logits, token, settings, has_distribution)
        # So little that it changes nothing, but the next turn has to wait for it.
        return with_first(logits, 1e-30 * token[0].astype(jnp.float32)), token

    logits = 3 * jax.random.normal(jax.random.key(0), [1, num_drafts + 1, vocab_size])
    return TurnLoop(turn, settings, (logits, jnp.zeros([1], jnp.int32)))


def choose(
    logits: Logits, token: RowTokens, settings: SamplingSettings, has_distribution: bool
) -> RowTokens:
    """Returns the token that a round ends with, as `plain_step` or `verify` choose it."""
    num_drafts, vocab_size = logits.shape[1] - 1, logits.shape[2]
    seed = token.astype(jnp.uint32)
    if not num_drafts:
        return draw_next(logits[:, 0], settings, seed, token)[0]
    proposal = Proposal(
        tokens=jnp.broadcast_to(token, [1, num_drafts]),
        num_tokens=jnp.full([1], num_drafts, jnp.int32),
        probs=jnp.full([1, num_drafts, vocab_size], 1 / vocab_size) if has_distribution else None,
    )
    return judge(get_rule("rejection"), logits, settings, proposal, seed, token)[0].next_token
