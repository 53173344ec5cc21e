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
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.generation.result import RoundCounts, Stats
from jspec.kernels import candidates
from jspec.kernels.contest import Candidate
from jspec.models import decoder
from jspec.sampling.settings import Processor
from tests.tiny_models import CONFIG, make_generator, make_model, shared_generator, target

UNLUCKY = 13
BROKEN = Processor(  # the logits of one seed are NaN, from some token on
    "broken",
    is_used=lambda settings: True,
    init=lambda settings, **_: jnp.int32(3 if settings.seed == UNLUCKY else 10**6),
    apply=lambda left, logits: jnp.where((left > 0)[:, None], logits, jnp.nan),
    update=lambda left, token: left - 1,
)


@functools.cache
def unlucky_generator():
    return make_generator("prompt_lookup", batch_size=3, processors=[BROKEN])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_one_row_of_nan_fails_alone(temperature):
    """Guards against neighbours' answers that are lost with it, and NaN's argmax as a token."""
    requests = [
        Request("abcabcabc", SamplingParams(max_new_tokens=20, seed=seed, temperature=temperature))
        for seed in (1, UNLUCKY, 2)
    ]
    results = unlucky_generator().generate(requests)
    whole = shared_generator("prompt_lookup").generate(requests)
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
    with pytest.raises(InputError, match="NaN, or forbade every token, at token 3 of the answer"):
        unlucky_generator().generate(Request("abc", SamplingParams(seed=UNLUCKY)))


@functools.cache
def small():
    return make_model(dataclasses.replace(CONFIG, num_layers=1))


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


@pytest.mark.slow  # of the kernels alone: tests/kernels/test_contest.py
@pytest.mark.parametrize("part", ["prefill", "rounds"])
def test_xla_computes_where_a_kernel_fails_at_first(part, kernel, capsys):
    """One line, and the answer that XLA gives; its state, which had been given away, is there."""
    kernel.first_failure = 1
    kernel.takes = lambda width: (width > 16) == (part == "prefill")
    generator = make_generator("prompt_lookup", small())
    result = generator.generate(PROMPT, SETTINGS)
    num_calls = kernel.num_calls
    assert result.token_ids == kernel.expected
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jspec: a program with the kernels cuda failed (JaxRuntimeError: ")
    assert line.endswith("): XLA computes everything from now on")
    assert generator.generate(PROMPT, SETTINGS).token_ids == kernel.expected
    assert (kernel.num_calls, capsys.readouterr().err) == (num_calls, "")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["prefill", "rounds"])
def test_a_kernel_that_fails_later_fails_one_answer(part, kernel):
    """Guards against a traceback of XLA's, and against a server that fails from then on."""
    kernel.takes = lambda width: (width > 16) == (part == "prefill")
    generator = make_generator("prompt_lookup", small())
    assert generator.generate(PROMPT, SETTINGS).token_ids == kernel.expected
    kernel.first_failure = kernel.num_calls + 1
    with pytest.raises(
        InputError, match=r"the kernels cuda failed .*: XLA computes what comes next"
    ):
        generator.generate(PROMPT, SETTINGS)
    assert generator.generate(PROMPT, SETTINGS).token_ids == kernel.expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"drafter": ["model"]},
            r"expected drafter to be a text or a DrafterEntry, got \['model'\]",
        ),
        (
            {"acceptance": ["block"]},
            r"expected acceptance to be a text or a AcceptanceRule, got \['block'\]",
        ),
        ({"processors": ("x",)}, "expected each of processors to be a Processor, got 'x'"),
        ({"processors": max}, "expected processors as a list, such as .mine., got <built-in"),
        ({"processors": BROKEN}, "expected processors as a list, such as .mine., got Processor"),
        ({"drafter_options": {}}, "expected drafter_options to be a DrafterOptions, got {}"),
        ({"rule_options": {}}, "expected rule_options to be a RuleOptions, got {}"),
    ],
)
def test_options_of_another_type_are_refused(options, message):
    """Guards against an AttributeError far from its cause."""
    with pytest.raises(InputError, match=message):
        Generator(target(), **options)


@pytest.mark.parametrize("name", ["drafter_options", "rule_options"])
def test_such_options_load_no_model(name):
    with pytest.raises(InputError, match=f"expected {name} to be a .*, got {{}}"):
        Generator.load("nowhere", **{name: {}})


@pytest.mark.parametrize("prompts", [{"prompt": "a"}, {"a"}, b"abc"], ids=str)
def test_prompts_of_another_type_are_refused(prompts):
    """Guards against an answer to a key, or to a byte."""
    message = f"list of them, got {type(prompts).__name__}"
    with pytest.raises(InputError, match=message):
        shared_generator("none").generate(prompts)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([{"role": "user", "content": "a"}], "a Request, got dict .of chat messages give the user"),
        ([1, 2, 3], r"a Request, got 1 \(one prompt of token ids is a list in a list, \[\[1, 2"),
        ([["a"]], "token id to be a whole number, got 'a'"),
        (5, "each prompt as a text, a list of token ids or a Request, got 5"),
        (["a", None], "each prompt as a text, a list of token ids or a Request, got None"),
    ],
    ids=["messages", "ids", "letters", "number", "none"],
)
def test_prompts_that_look_like_others_are_told_how_to_be_given(prompts, message):
    """Guards against "expected a token id, got 'role'"."""
    with pytest.raises(InputError, match=message):
        shared_generator("none").generate(prompts)


def test_prompts_may_come_one_by_one():
    """Guards against an iterator that a check has used up."""
    settings = SamplingParams(max_new_tokens=3)
    first, second = shared_generator("none").generate((text for text in ("ab", "cd")), settings)
    assert [first.prompt, second.prompt] == ["ab", "cd"]


def test_options_have_the_names_of_their_flags(monkeypatch):
    """`Generator.load(draft_layers=1)` is `--draft_layers=1`; a wrong one loads no model."""
    loaded = []
    monkeypatch.setattr(
        "jspec.generation.generator.load_model", lambda name, **_: loaded.append(name) or target()
    )
    generator = Generator.load("tiny", drafter="layer_skip", draft_layers=1)
    assert generator.describe()["drafter_options"]["draft_layers"] == (0,)
    rule = Generator.load("tiny", drafter="prompt_lookup", acceptance="lenient", lenience=0.25)
    assert rule.describe()["rule_options"]["lenience"] == 0.25
    loaded.clear()
    with pytest.raises(InputError, match="expected a drafter among"):
        Generator.load("tiny", drafter="modle")
    with pytest.raises(
        InputError,
        match=r"num_draft_tokens='auto' \(--num_draft_tokens=auto\) chooses their number",
    ):
        Generator.load("tiny", drafter="auto")
    with pytest.raises(InputError, match="draft_layers as a number or a list"):
        Generator.load("tiny", drafter="layer_skip", draft_layers="x")
    with pytest.raises(InputError, match="unknown option 'drafer': did you mean 'drafter'"):
        Generator.load("tiny", drafer="model")
    with pytest.raises(
        InputError, match="unknown option 'draft_layer': did you mean 'draft_layers'"
    ):
        Generator.load("tiny", draft_layer=2)
    assert loaded == []


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
    generator = make_generator("prompt_lookup", num_draft_tokens=1)
    assert repr(generator) == "<Generator of tiny: prompt_lookup, 1 draft, rejection>"
    short_stats = Stats((RoundCounts(1, 1, "prompt_lookup"),), 3, 0.5, 2.0, 1.5, 0.0, 3)
    assert repr(short_stats).endswith(", 1 of 1 draft accepted>")


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
