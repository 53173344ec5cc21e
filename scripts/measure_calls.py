"""Times the parts of a round: a target call at each width, a draft step, a whole round.

`python scripts/measure_calls.py --target=random:llama3.2-3b --draft=random:llama3.2-1b`

Every part runs many times inside one compiled loop on the device, after a warm-up; the median over
repeats is given, in milliseconds. Beside it stands the least time that reading the weights once
takes at the bandwidth of a large copy measured in the same process.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from jspec import cli, provenance
from jspec.drafters import DrafterSpec, make_drafter
from jspec.generator import DEFAULT_TARGET
from jspec.json_lines import JsonLinesWriter
from jspec.models import KVCache, init_cache, make_apply
from jspec.sampling import SamplingSettings, first_argmax
from jspec.speculation.acceptance import get_rule
from jspec.speculation.loop import StepFn, run_rounds
from jspec.speculation.plain import plain_step
from jspec.speculation.step import speculative_step
from jspec.speculation.types import Drafter, ModelParams, SpecState
from jspec.typing import Params
from jspec.vocabulary import shared_vocab_size
from jspec.weights.resolver import LoadedModel, load_model

_TARGET = flags.DEFINE_string("target", DEFAULT_TARGET, "The target.")
_DRAFT = flags.DEFINE_string("draft", None, "The draft model, if any.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the weights.")
_WIDTHS = flags.DEFINE_multi_integer("width", [1, 2, 3, 4, 5, 6, 8, 16], "Tokens of a target call.")
_NUM_DRAFT_TOKENS = flags.DEFINE_integer("num_draft_tokens", 4, "Drafts a round.")
_CAPACITY = flags.DEFINE_integer("capacity", 512, "Slots of the caches.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Repeats of each measurement.")
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write the results to this file.")
_CALLS = 16


def main() -> None:
    """Measures and prints; writes JSON."""
    output = JsonLinesWriter(_OUTPUT_JSON.value) if _OUTPUT_JSON.value else None
    target = load_model(_TARGET.value, dtype=_DTYPE.value)
    draft = load_model(_DRAFT.value, dtype=_DTYPE.value) if _DRAFT.value else None
    record: dict[str, Any] = {
        "target": target.name,
        "draft": None if draft is None else draft.name,
        "dtype": _DTYPE.value,
        "capacity": _CAPACITY.value,
        "num_draft_tokens": _NUM_DRAFT_TOKENS.value,
        "copy_gb_per_second": copy_bandwidth() / 1e9,
        "target_bytes": num_bytes(target.params),
        "milliseconds": {},
    }
    for name, function in measurements(target, draft).items():
        record["milliseconds"][name] = median_milliseconds(function, _REPEATS.value)
        print(f"{name}: {record['milliseconds'][name]:.3f} ms", flush=True)
    least = record["target_bytes"] / record["copy_gb_per_second"] / 1e6
    print(f"reading the target once at {record['copy_gb_per_second']:.0f} GB/s: {least:.3f} ms")
    if output is not None:
        with output:
            output.write(provenance.environment() | record)


def measurements(target: LoadedModel, draft: LoadedModel | None) -> dict[str, Callable[[], float]]:
    """Returns functions that do one measurement each and return milliseconds a call."""
    functions = {
        f"target call, {width} tokens": time_calls(target, width) for width in _WIDTHS.value
    }
    functions["plain step"] = time_rounds(target, None, None)
    functions["round, prompt_lookup"] = time_rounds(target, None, "prompt_lookup")
    if draft is not None:
        functions["draft call, 1 token"] = time_calls(draft, 1)
        functions["round, model"] = time_rounds(target, draft, "model")
    return functions


def time_calls(model: LoadedModel, width: int) -> Callable[[], float]:
    """Returns a measurement of model calls on `width` tokens, each with a greedy choice."""
    apply = make_apply(model.config)

    def loop(params: Params, cache: KVCache) -> jax.Array:
        def body(_: jax.Array, carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
            cache, tokens = carry
            logits, _, cache = apply(params, tokens, cache)
            return cache, first_argmax(logits)[0]

        return jax.lax.fori_loop(0, _CALLS, body, (cache, jnp.zeros([1, width], jnp.int32)))[1]

    cache = _half_full_cache(model)
    compiled = jax.jit(loop).lower(model.params, cache).compile()
    return lambda: _milliseconds(lambda: compiled(model.params, cache), _CALLS)


def time_rounds(
    target: LoadedModel, draft: LoadedModel | None, drafter_name: str | None
) -> Callable[[], float]:
    """Returns a measurement of whole rounds at temperature 0; of plain steps without a drafter."""
    apply = make_apply(target.config)
    params = ModelParams(target.params, None if draft is None else draft.params)
    step: StepFn = functools.partial(plain_step, target=apply)
    drafter = None
    if drafter_name is not None:
        spec = DrafterSpec(
            num_draft_tokens=_NUM_DRAFT_TOKENS.value,
            target_config=target.config,
            vocab_size=shared_vocab_size(target, draft),
            draft_config=None if draft is None else draft.config,
            dtype=target.params["embedding"].dtype,
        )
        drafter = make_drafter(drafter_name, spec).drafter
        assert drafter is not None
        rule = get_rule("rejection")
        step = functools.partial(speculative_step, target=apply, drafter=drafter, rule=rule)
    run = jax.jit(functools.partial(run_rounds, step=step, max_rounds=_CALLS))
    state = _half_full_state(target, drafter)
    compiled = run.lower(params, state, jnp.int32(_CALLS)).compile()
    return lambda: _milliseconds(lambda: compiled(params, state, jnp.int32(_CALLS)), _CALLS)


def _half_full_cache(model: LoadedModel) -> KVCache:
    cache = init_cache(
        model.config,
        batch_size=1,
        capacity=_CAPACITY.value,
        dtype=model.params["embedding"].dtype,
    )
    return cache.commit(jnp.array([_CAPACITY.value // 2], jnp.int32))


def _half_full_state(target: LoadedModel, drafter: Drafter | None) -> SpecState:
    zeros, ones = jnp.zeros([1], jnp.int32), jnp.ones([1], jnp.float32)
    settings = SamplingSettings(0 * ones, zeros, ones, 0 * ones)
    cache = _half_full_cache(target)
    state = None if drafter is None else drafter.init(1, _CAPACITY.value)
    if drafter is not None:
        history = jnp.zeros([1, _CAPACITY.value // 2], jnp.int32)
        state = drafter.observe(None, state, history, history, history == 0)
    return SpecState(
        target_cache=cache,
        draft=state,
        last_token=zeros,
        seed=zeros.astype(jnp.uint32),
        settings=settings,
        draft_temperature=settings.temperature,
        stop_ids=jnp.full([1, 1], -1, jnp.int32),
        max_length=zeros + _CAPACITY.value - 32,
        is_done=jnp.zeros([1], bool),
    )


def _milliseconds(function: Callable[[], Any], num_calls: int) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(function())
    return (time.perf_counter() - begin) / num_calls * 1e3


def median_milliseconds(function: Callable[[], float], repeats: int) -> float:
    """Returns the median of several measurements after one that does not count."""
    function()
    return statistics.median(function() for _ in range(repeats))


def copy_bandwidth() -> float:
    """Returns bytes read and written a second by a large copy on the device."""
    size = 2**28 if jax.default_backend() == "cpu" else 2**31
    array = jnp.zeros([size], jnp.uint8)
    copy = jax.jit(lambda array: array + 1)
    seconds = median_milliseconds(lambda: _milliseconds(lambda: copy(array), 1), 5) / 1e3
    return 2 * size / seconds


def num_bytes(params: Params) -> int:
    """Returns the size of all parameters."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


if __name__ == "__main__":
    cli.run_main(main)
