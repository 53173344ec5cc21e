"""The default model, as it is published."""

import numpy as np
import pytest

from jspec.models.config import PRESETS
from jspec.weights import load_model
from jspec.weights.published import SMOLLM2, fetch
from tests.weights.tokenizers.test_tokenizer import ODD_TEXTS
from tests.weights.toys import unpack


@pytest.fixture(scope="module")
def smollm():
    """The real model, downloaded into the user's cache the first time."""
    return load_model(SMOLLM2)


def test_real_model_has_the_presets_shape(smollm):
    """Guards against a preset that is not the model it names."""
    assert smollm.config == PRESETS["smollm2-135m"]
    assert not smollm.is_random


def test_real_tokenizer_behaves_as_published(smollm):
    """Guards against joined digits, a BOS that this model does not want, and a lost template."""
    tokenizer = smollm.tokenizer
    assert tokenizer.encode("Hello world 12345") == [19556, 905, 216, 33, 34, 35, 36, 37]
    prompt = tokenizer.chat_prompt([{"role": "user", "content": "hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode(prompt)[:6] == [1, 9690, 198, 2683, 359, 253]
    for text in ODD_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_real_weights_are_what_transformers_reads():
    """Guards against any slip in reading the real file: every tensor, bit for bit."""
    torch = pytest.importorskip("torch")
    import transformers

    path, smollm = fetch(SMOLLM2), load_model(SMOLLM2, dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    for name, tensor in unpack(smollm.config, smollm.params).items():
        np.testing.assert_array_equal(tensor, theirs[name].numpy())
