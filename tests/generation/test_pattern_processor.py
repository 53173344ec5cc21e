"""Answers that must match a pattern: the mask, the answers, and the distribution."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.generation.pattern_processor import apply, make_tables, update
from jspec.generation.request import Request, SamplingParams
from jspec.sampling.settings import Processor
from tests.cases import slow_unless
from tests.tiny_models import shared_generator

_WORDS = ["cat", "cats", "dog", "do", "catdog", "é"]
_PATTERN = "|".join(_WORDS)
_TOKENS = [b"", b"c", b"a", b"t", b"s", b"d", b"o", b"g", b"ca", b"ts", b"dog", b"atd", b"\xc3",
           b"\xa9", b"x", b""]  # fmt: skip
_EOS = 0
_NUMBER = SamplingParams(
    max_new_tokens=40, pattern=r"\{\"n\": -?[1-9][0-9]{0,5}(, \"[a-z]{3}\")*\}"
)


def follow(tokens, text):
    """Returns the tokens that may follow some tokens of the words, by trying all."""
    allowed = set()
    for token_id, piece in enumerate(tokens):
        if piece and any(word.encode().startswith(text + piece) for word in _WORDS):
            allowed.add(token_id)
    return allowed | ({_EOS} if text.decode(errors="replace") in _WORDS else set())


def processor_state(settings):
    (processor,) = [p for p in shared_generator("none").processors if isinstance(p, Processor)]
    state = processor.init(settings, prompt=[], stop_ids=[_EOS], vocab_size=128)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], state)


def test_the_tokens_allowed_are_those_after_which_a_word_can_come():
    """After every beginning, whichever tokens spell it."""
    table, class_of = make_tables(_PATTERN, _TOKENS, len(_TOKENS))
    class_of[_EOS] = table.shape[1] - 1
    num_seen = 0
    for length in range(4):
        for ids in itertools.product(range(1, len(_TOKENS)), repeat=length):
            state, text = 1, b""
            for token_id in ids:
                state, text = table[state, class_of[token_id]], text + _TOKENS[token_id]
                if state == 0:
                    break
            if state == 0:
                continue
            num_seen += 1
            allowed = set(np.flatnonzero(table[state, class_of]).tolist())
            assert allowed == follow(_TOKENS, text), text
    assert num_seen > 15


def test_a_state_from_which_no_tokens_lead_on_is_never_reached():
    """The letter q is no token: 'c' may not come, as only 'q' could follow."""
    table, class_of = make_tables("a(?:b|cq|qc)|cq", [b"a", b"b", b"c"], 3)
    state = table[1, class_of[0]]
    assert np.flatnonzero(table[state, class_of]).tolist() == [1]
    assert np.flatnonzero(table[1, class_of]).tolist() == [0]
    with pytest.raises(InputError, match="that the model's tokens can spell"):
        make_tables("q", [b"a", b"b", b"c"], 3)


@pytest.mark.parametrize("pattern", ["(a|b)*a(a|b){12}", "(", "(a?b?){500}"])
def test_patterns_that_cannot_be_compiled_are_refused(pattern):
    with pytest.raises(InputError, match=r"expected a (pattern|regular expression)"):
        make_tables(pattern, [b"a", b"b"], 2)


def test_a_draft_that_is_not_allowed_leaves_nothing_forbidden_after_it():
    """Its logits would be NaN downstream; and rows without a pattern are left alone."""
    logits = jnp.zeros([1, 128])
    state = processor_state(SamplingParams(pattern="ab"))
    assert np.flatnonzero(np.isfinite(apply(state, logits)[0])).tolist() == [ord("a")]
    assert np.isfinite(apply(update(state, jnp.array([ord("z")])), logits)).all()
    assert np.isfinite(apply(processor_state(SamplingParams()), logits)).all()
    end = update(update(state, jnp.array([ord("a")])), jnp.array([ord("b")]))
    assert np.flatnonzero(np.isfinite(apply(end, logits)[0])).tolist() == [_EOS]


@pytest.mark.parametrize(
    "drafter", ["prompt_lookup", slow_unless(False, "tree"), slow_unless(False, "model")]
)
def test_speculation_says_what_plain_decoding_says_and_the_pattern_allows(drafter):
    """Greedy, and sampled with the coupled rule; drafts are accepted. Control: without pattern."""
    prompts = ['{"n": 12, "abc", "abc", "abc"} {"n": ', "once upon a time"]
    plain = shared_generator("none")
    generator = shared_generator(drafter, acceptance="coupled", batch_size=2)
    num_accepted = 0
    for settings in (_NUMBER, SamplingParams(**vars(_NUMBER) | {"temperature": 0.8, "seed": 3})):
        requests = [Request(prompt, settings) for prompt in prompts]
        results = generator.generate(requests)
        assert [result.token_ids for result in results] == [
            result.token_ids for result in plain.generate(requests)
        ]
        for result in results:
            num_accepted += result.stats.num_accepted
            is_whole = result.finish_reason == "eos"
            assert is_whole == bool(re.fullmatch(settings.pattern, result.text)), result.text
            assert result.text.startswith('{"n": ')
    assert num_accepted > 2
    free = plain.generate(prompts[0], SamplingParams(max_new_tokens=40))
    assert not free.text.startswith('{"n": ')


def test_a_mix_of_rows_is_as_each_alone():
    settings = [
        _NUMBER,
        SamplingParams(max_new_tokens=20),
        SamplingParams(max_new_tokens=20, pattern="(xy)*z"),
    ]
    requests = [Request("abc", one) for one in settings]
    generator = shared_generator("prompt_lookup", acceptance="coupled", batch_size=2)
    together = generator.generate(requests)
    alone = [shared_generator("none").generate([one])[0] for one in requests]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
