"""An answer that fails, alone and beside others; arguments of another type, each in one line."""

import dataclasses
import functools
import json
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.generation.request import Request, SamplingParams
from jspec.kernels import candidates
from jspec.kernels.contest import Candidate
from jspec.models import decoder
from jspec.sampling.settings import Processor
from tests.tiny_models import make_generator, shared_generator, small, target

UNLUCKY = ("no such text",)
BROKEN = Processor(  # the logits of those who ask for this stop are NaN, from some token on
    "broken",
    is_used=lambda settings: True,
    init=lambda settings, **_: jnp.int32(3 if settings.stop == UNLUCKY else 10**6),
    apply=lambda left, logits: jnp.where((left > 0)[:, None], logits, jnp.nan),
    update=lambda left, token: left - 1,
)


@functools.cache
def unlucky_generator():
    return make_generator("prompt_lookup", small(), batch_size=3, processors=[BROKEN])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_one_row_of_nan_fails_alone(temperature):
    """Guards against neighbours' answers that are lost with it, and NaN's argmax as a token."""
    results, whole = (
        unlucky_generator().generate([
            Request("abcabcabc", SamplingParams(20, temperature, seed=seed, stop=stop))
            for seed, stop in ((1, ()), (13, stop), (2, ()))
        ])
        for stop in (UNLUCKY, ())
    )  # fmt: skip
    for index in (0, 2):
        assert results[index].token_ids == whole[index].token_ids
        assert results[index].error is None
    failed = results[1]
    assert failed.finish_reason == "failed"
    assert failed.error == (
        "expected logits that are numbers; the model gave NaN, or forbade every token, at token 3 "
        "of the answer"
    )
    assert failed.token_ids == whole[1].token_ids[:3]
    json.dumps(failed.to_json(), allow_nan=False)


def test_one_prompt_that_fails_raises():
    generator = make_generator("none", small(), processors=[BROKEN])
    with pytest.raises(InputError, match="NaN, or forbade every token, at token 3 of the answer"):
        generator.generate(Request("abc", SamplingParams(stop=UNLUCKY)))


@functools.cache
def tokens_by_xla():
    """Returns the answer's tokens where XLA computes everything."""
    return make_generator("prompt_lookup", small()).generate(PROMPT, SETTINGS).token_ids


@pytest.fixture
def kernel(monkeypatch):
    """A CPU whose blocks a kernel computes, as XLA does, that fails from some call on."""
    kernel = types.SimpleNamespace(num_calls=0, first_failure=None, takes=lambda width: True)
    kernel.expected = tokens_by_xla()

    def count():
        kernel.num_calls += 1
        if kernel.first_failure is not None and kernel.num_calls >= kernel.first_failure:
            raise RuntimeError("no memory of a block")
        return np.float32(0)

    def run(config, block_offset, params, x, rope, visible, cache):
        x, cache = decoder.Block(config).apply(
            {"params": params}, x, rope, visible, cache, block_offset
        )
        return x + jax.pure_callback(count, jax.ShapeDtypeStruct((), jnp.float32)), cache

    def takes(config, params, x, cache):
        return kernel.takes(x.shape[1])

    monkeypatch.setenv("JSPEC_KERNELS", "cuda")
    for name, value in (
        ("block_candidates", lambda: [Candidate("cuda", takes, run)]),
        ("_may_compete", lambda: not candidates._HAS_FAILED.is_set()),
        ("_CHOICES", {}),
        ("_HAS_FAILED", threading.Event()),
    ):
        monkeypatch.setattr(candidates, name, value)
    jax.clear_caches()
    yield kernel
    jax.clear_caches()


PROMPT, SETTINGS = "abcabcabc", SamplingParams(max_new_tokens=12)


@pytest.fixture(params=["prefill", "rounds"])
def generator(request, kernel):
    """A Generator whose prefill or whose rounds take the kernel."""
    kernel.takes = lambda width: (width > 16) == (request.param == "prefill")
    return make_generator("prompt_lookup", small())


@pytest.mark.slow  # of the kernels alone: tests/kernels/test_contest.py
def test_xla_computes_where_a_kernel_fails_at_first(generator, kernel, capsys):
    """One line, and the answer that XLA gives; its state, which had been given away, is there."""
    kernel.first_failure = 1
    assert generator.generate(PROMPT, SETTINGS).token_ids == kernel.expected
    num_calls = kernel.num_calls
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jspec: a program with the kernels cuda failed (JaxRuntimeError: ")
    assert line.endswith("): XLA computes everything from now on")
    assert generator.generate(PROMPT, SETTINGS).token_ids == kernel.expected
    assert (kernel.num_calls, capsys.readouterr().err) == (num_calls, "")


@pytest.mark.slow
def test_a_kernel_that_fails_later_fails_one_answer(generator, kernel):
    """Guards against a traceback of XLA's, and against a server that fails from then on."""
    assert generator.generate(PROMPT, SETTINGS).token_ids == kernel.expected
    kernel.first_failure = kernel.num_calls + 1
    with pytest.raises(
        InputError, match=r"the kernels cuda failed .*: XLA computes what comes next"
    ):
        generator.generate(PROMPT, SETTINGS)
    assert generator.generate(PROMPT, SETTINGS).token_ids == kernel.expected


def test_prompts_may_come_one_by_one():
    """Guards against an iterator that a check has used up."""
    settings = SamplingParams(max_new_tokens=3)
    first, second = shared_generator("none").generate((text for text in ("ab", "cd")), settings)
    assert [first.prompt, second.prompt] == ["ab", "cd"]


def test_samples_have_seeds_of_their_own():
    """Sample k is the answer with seed + k; equal requests have equal answers."""
    generator = shared_generator("none")
    settings = SamplingParams(max_new_tokens=12, temperature=1.5, seed=5)
    samples = generator.generate("abc", settings, num_samples=3)
    alone = [generator.generate("abc", dataclasses.replace(settings, seed=5 + k)) for k in range(3)]
    assert [s.token_ids for s in samples] == [a.token_ids for a in alone]
    assert len({tuple(s.token_ids) for s in samples}) == 3
    same = generator.generate(["abc", "abc"], settings)
    assert same[0].token_ids == same[1].token_ids
    with pytest.raises(InputError, match="expected num_samples from 1"):
        generator.generate("abc", settings, num_samples=0)
    with pytest.raises(InputError, match=r"settings as jspec\.SamplingParams, got None"):
        generator.generate("abc", None)


def test_what_is_printed_is_short():
    """Guards against parameters or every round on the screen of a notebook."""
    generator = shared_generator("prompt_lookup")
    result = generator.generate("abc" * 9, SamplingParams(max_new_tokens=40))
    for thing in (generator, result, result.stats, target()):
        assert len(repr(thing)) < 600, repr(thing)
    assert repr(generator) == "<Generator of tiny: prompt_lookup, 4 drafts, rejection>"


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda state, logits: logits[:, 1:], "processor 'own' to return logits .* got .*127"),
        (lambda state, logits: logits.astype(jnp.bfloat16), "float32 for such logits, got .*bf"),
        (lambda state, logits: logits + missing, "the processor 'own': NameError"),
    ],
    ids=["shape", "dtype", "error"],
)
def test_a_processor_of_another_shape_is_named(apply, message):
    """Guards against an error from within a compiled round."""
    wrong = Processor("own", lambda settings: True, lambda settings, **_: jnp.int32(0), apply)
    with pytest.raises(InputError, match=message):
        make_generator("none", processors=[wrong]).generate("abc")
