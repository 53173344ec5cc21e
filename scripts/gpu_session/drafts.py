"""3B with drafts: of a quantised 1B and of EAGLE's shape at given acceptance, and of a lookup.

Weights are random, so drafts are accepted by a coin, with the given probability (the rule
`synthetic`). A round takes as long whatever it accepts. Plain decoding, at temperature 1 as well,
is measured in turn with each.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jspec.drafters import BuiltDrafter, DrafterSpec
from jspec.drafters.eagle import ENTRY, make_eagle_drafter
from jspec.drafters.eagle_head import init_eagle_params
from jspec.generation.generator import Generator
from jspec.generation.request import SamplingParams
from jspec.lab.accelerators.shapes import eagle_config
from jspec.lab.analysis.theory import expected_tokens
from jspec.speculation.acceptance.synthetic import seed_of
from scripts.gpu_session.products import bandwidth, chosen, kernels_by
from scripts.gpu_session.session import Work
from scripts.gpu_session.speeds import Batch, Rounds, plain
from scripts.gpu_session.subjects import llama

RATES = 0.6, 0.75, 0.9
NUM_DRAFTS = 4
_DRAFT_WEIGHTS = "int8", "q4_0"
_ROUNDS_A_VISIT = 8
_VISITS = 7


def run(work: Work) -> str:
    """Measures each drafter at each rate of acceptance."""
    bandwidth(work)
    best = chosen(work.session)[0]
    with kernels_by(best):
        return _measure(work, best)


def _measure(work: Work, choice: str) -> str:
    load = functools.partial(llama, is_rehearsal=work.is_rehearsal)
    options: dict[str, Any] = {"num_draft_tokens": NUM_DRAFTS, "acceptance": "synthetic"}
    target = load("3b")
    generators = {
        f"1B, {kind}": Generator(target, load("1b", quantization=kind), drafter="model", **options)
        for kind in _DRAFT_WEIGHTS
    }
    eagle = dataclasses.replace(ENTRY, build=_build_eagle)
    generators["EAGLE"] = Generator(target, drafter=eagle, **options)
    generators["lookup"] = Generator(target, drafter="prompt_lookup", **options)
    batches = {name: Batch(one, _settings(RATES[0])) for name, one in generators.items()}
    batches["plain"] = Batch(plain("3b", is_rehearsal=work.is_rehearsal), _settings(RATES[0]))
    jobs = {name: functools.partial(batch.visit, 1) for name, batch in batches.items()}
    ready = work.together(jobs)
    decisions = []
    for name, batch in batches.items():
        if name != "plain" and name in ready and "plain" in ready:
            decisions.append(_time_drafter(work, choice, name, batch, batches["plain"]))
    return "; ".join(decisions) or "nothing was compiled in time"


def _time_drafter(work: Work, choice: str, name: str, batch: Batch, other: Batch) -> str:
    """Records a drafter's rounds beside plain ones; returns how many times as fast they are."""
    speeds = []
    for rate in RATES if name != "lookup" else RATES[1:2]:
        work.check_time()
        other.restart(_settings(rate))
        plain_rounds = other.time(_ROUNDS_A_VISIT, _VISITS)
        batch.restart(_settings(rate))
        rounds = batch.time(_ROUNDS_A_VISIT, _VISITS)
        speeds.append(_record(work, choice, name, rate, rounds, plain_rounds))
    return f"{name}: {', '.join(f'{speed:.2f}' for speed in speeds)} times plain"


def _record(
    work: Work, choice: str, name: str, rate: float, rounds: Rounds, plain_rounds: Rounds
) -> float:
    """Records rounds; returns the speed that their time and the rate of acceptance give."""
    cost = rounds.seconds / plain_rounds.seconds
    # A lookup of random texts finds nothing; what it costs to verify its drafts is known.
    expected = expected_tokens(rate, NUM_DRAFTS)
    work.record(
        "drafts", drafter=name, choice=choice, rate=rate, num_drafts=NUM_DRAFTS,
        milliseconds=1e3 * rounds.seconds, plain_milliseconds=1e3 * plain_rounds.seconds,
        cost_of_a_round=cost, tokens_a_round=rounds.tokens, expected_tokens=expected,
        times_plain=None if name == "lookup" else rounds.tokens / cost,
        times_plain_expected=expected / cost,
    )  # fmt: skip
    return expected / cost


def _settings(rate: float) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed_of(rate, 0), max_new_tokens=64)


def _build_eagle(spec: DrafterSpec) -> BuiltDrafter:
    """Returns a head of random weights, of the shape of the published ones."""
    config = eagle_config(spec)
    params = jax.jit(functools.partial(init_eagle_params, config))(jax.random.key(0))
    params = jax.tree.map(
        lambda leaf: leaf.astype(spec.dtype) if leaf.dtype == jnp.float32 else leaf, params
    )
    return BuiltDrafter(make_eagle_drafter(spec, config), params)
