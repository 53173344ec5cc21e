"""Law 2: at temperature 0 speculation says what plain decoding says, token for token (float32)."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny import full_logits

MAX_LENGTHS = [30, 41, 44, 38]


@pytest.fixture(scope="module")
def plain(make_engine, prompts):
    return make_engine("plain").generate(prompts, max_length=MAX_LENGTHS)


def test_plain_decoding_equals_the_argmax_of_full_passes(plain, tiny_pair, prompts):
    """Anchors everything below in the model itself."""
    for prompt, emitted, length in zip(prompts, plain.tokens, MAX_LENGTHS, strict=True):
        text = prompt + emitted
        assert len(text) == length
        logits = full_logits(tiny_pair, tiny_pair.target, jnp.array([text], jnp.int32))
        expected = np.argmax(logits[0, len(prompt) - 1 : -1], axis=-1)
        assert emitted == expected.tolist()


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["model", "prompt_lookup"])
def test_greedy_output_equals_plain_decoding(make_engine, prompts, plain, name, width):
    """Any slip in cache, positions, acceptance or ends changes a token sooner or later."""
    result = make_engine(name, width).generate(prompts, max_length=MAX_LENGTHS)
    assert result.tokens == plain.tokens
    proposed, accepted = result.infos.num_proposed.sum(), result.num_accepted.sum()
    assert 0 < accepted < proposed, "drafts must be both kept and refused to prove anything"
