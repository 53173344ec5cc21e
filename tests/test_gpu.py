"""On a GPU: the distributions that its other kernels, layouts and donated buffers could break.

They hold on a CPU, too, where `-m gpu` runs them to see that they can run.
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import pytest

from jspec.drafters import DrafterOptions
from jspec.generation.request import Request, SamplingParams
from jspec.kernels import attend, backend, verdicts
from jspec.lab.auditing.checks import _TEXTS, check_seeds, run_checks
from jspec.lab.auditing.subject import cast
from jspec.models import causal_mask, init_cache, make_apply
from jspec.models.cache import TAIL, KVCache
from tests.kernels.families import FAMILIES
from tests.kernels.families import make_model as make_family
from tests.lab.auditing.subjects import SETTINGS, make_subject
from tests.tiny_models import CONFIG, make_generator, make_model, peaked_params

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("optimised")]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_output_is_plain_decodings(batch_size):
    """Guards invariant 2 against TF32, which would round one token and several differently.
    Float32.
    """
    prompts = [[1 + (7 * i + i * i) % 127 for i in range(n)] for n in (5, 40, 70)]
    requests = [Request(prompt, SamplingParams(max_new_tokens=60)) for prompt in prompts]
    expected = [r.token_ids for r in make_generator("none").generate(requests)]
    assert sum(map(len, expected)) > 60
    for drafter in ("prompt_lookup", "self", "tree", "merged tree"):
        results = make_generator(drafter, batch_size=batch_size).generate(requests)
        assert [r.token_ids for r in results] == expected
        assert sum(r.stats.num_accepted for r in results) > 0  # otherwise nothing was tested
        proposed = sum(r.stats.num_proposed for r in results)
        assert drafter != "self" or sum(r.stats.num_accepted for r in results) == proposed


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("t", "n", "k", "h", "capacity"),
    [
        (128, 9, 3, 64, 512),  # SmolLM2's
        (256, 24, 8, 128, 2048),  # Llama-3.2-3B's
        (256, 32, 8, 64, 8192),  # Llama-3.2-1B's
    ],
)
def test_cudnns_attention_is_used_and_says_what_xlas_says(t, n, k, h, capacity):
    """Chunks of a prompt behind no, few and many committed slots, bfloat16."""
    keys = jax.random.split(jax.random.key(t), 3)
    queries = jax.random.normal(keys[0], (3, t, n, h), jnp.float32) / jnp.sqrt(jnp.float32(h))
    layers = [jax.random.normal(key, (3, k, capacity + TAIL, h), jnp.bfloat16) for key in keys[1:]]
    length = jnp.array([0, 13, capacity - t], jnp.int32)
    cache = KVCache((layers[0],), (layers[1],), length)
    visible = cache.visible(causal_mask(t))
    expected = inspect.unwrap(attend)(queries, *layers, visible)
    results = jax.jit(cache.attend)(queries, visible)
    distance = jnp.linalg.norm(results - expected, axis=-1)
    assert (distance < 0.02 * jnp.linalg.norm(expected, axis=-1)).all()
    assert "cudnn" in jax.jit(cache.attend).lower(queries, visible).as_text()


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", [None, "int8", "q4_0"])
def test_candidates_for_blocks_are_right(name, kind, monkeypatch, tmp_path):
    """No candidate is wrong, or fails, in any family's contest."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(verdicts, "_VERDICTS", {})
    config, params = make_family(name, kind)
    cache = init_cache(config, batch_size=1, capacity=200, dtype=jnp.bfloat16)
    jax.clear_caches()
    jax.jit(make_apply(config)).lower(params, jnp.zeros([1, 1], jnp.int32), cache)
    assert all(verdict["faults"] == {} for verdict in verdicts._VERDICTS.values())


@pytest.mark.parametrize("settings", [SETTINGS, dataclasses.replace(SETTINGS, top_p=1.0)])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_seeds(rule, settings):
    """The same text alone and in a batch, at any number of drafts; there is a text: no NaN."""
    subject = make_subject(rule, "model", settings=settings)
    prompts = [list(text.encode()) for text in _TEXTS]
    assert check_seeds(subject, prompts, 24).has_passed


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_an_audit_finds_nothing(rule):
    """The joint distribution of what compiled rounds emit, parity, seeds, caches; wrong targets are
    refused.

    The models have opinions. False alarms: one in a million for each test of a distribution.
    """
    audit(make_subject(rule, "model"), "float32")


def test_an_audit_of_trees_finds_nothing():
    """Each row's own tree, whose kept path is moved in the caches; with its six wrong targets.

    The draft is refused often: a wrong path would otherwise seldom be wrong. What a draft sees of
    its siblings would be in the caches from a second layer on: with one layer nothing tells.
    """
    config = dataclasses.replace(CONFIG, num_layers=1)
    params = (peaked_params(config, disturbance=size) for size in (0.0, 0.15))
    target, draft = (make_model(config, params=one) for one in params)
    options = DrafterOptions(tree_depth=2, tree_branches=2)
    pair = {"target": target, "draft": draft, "drafter_options": options}
    subject = make_subject("rejection", "model", num_draft_tokens=4, **pair)
    audit(subject, "float32", num_rows=8192, untold={"tree control, siblings seen"})


@pytest.mark.parametrize("kernels", backend.NAMES)
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_an_audit_of_any_kernels_finds_nothing(rule, kernels, monkeypatch):
    """In bfloat16, of sizes that they take: on a GPU they do, in calls of few rows."""
    if jax.default_backend() != "gpu" and kernels != backend.XLA:
        pytest.skip("only a GPU has other kernels")
    monkeypatch.setenv("JSPEC_KERNELS", kernels)
    jax.clear_caches()
    config = dataclasses.replace(CONFIG, num_layers=1, embed_dim=64, hidden_dim=96, head_dim=32)
    target, draft = (
        make_model(config, params=peaked_params(config, disturbance=size)) for size in (0.0, 0.02)
    )
    audit(make_subject(rule, "model", target=target, draft=draft), "bfloat16")


def audit(subject, dtype, num_rows=4096, untold=frozenset()):
    """Checks that an audit finds nothing, but for controls that cannot tell."""
    pair = {"target": cast(subject.target, dtype), "draft": cast(subject.draft, dtype)}
    subject = dataclasses.replace(subject, **pair)
    assert subject.dtype == dtype
    checks = list(run_checks(subject, num_rows=num_rows, max_new_tokens=24))
    assert {"emitted distribution", "negative control", "seeds", "caches"} <= {
        check.name for check in checks
    }
    assert {check.name for check in checks if not check.has_passed} == untold
