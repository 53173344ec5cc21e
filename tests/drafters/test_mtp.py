"""MiMo's layer for multi-token prediction: from its target's folder, and through the whole step."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import transformers
from safetensors.numpy import load_file, save_file

from jspec.common.errors import InputError
from jspec.generation.options import choose_method
from jspec.models import init_cache, make_apply
from jspec.models.families.hf_config import from_hf_config
from jspec.weights.hf import load_hf, save_hf
from jspec.weights.resolver import has_mtp_layer
from tests import tiny, tiny_models, tiny_mtp
from tests.drafters.rows import CAPACITY, LENGTHS, TEXT, build, observe, propose
from tests.models.family_checkpoints import ROPE, SHAPE

D, HEADS, KV_HEADS, SIZE, INNER = 24, 4, 2, 10, 40
# What is published beside the keys of a Qwen2.
KEYS = {
    "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1,
    "attention_bias": True, "use_mrope": False, "use_sliding_window": False, "head_dim": SIZE,
    "sliding_window": 32_768, "max_window_layers": 36, "rope_theta": 777.0, "rope_scaling": None,
    "auto_map": {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
}  # fmt: skip
SHAPES = {
    "token_layernorm.weight": [D], "hidden_layernorm.weight": [D], "final_layernorm.weight": [D],
    "input_layernorm.weight": [D], "post_attention_layernorm.weight": [D],
    "input_proj.weight": [D, 2 * D],
    "self_attn.q_proj.weight": [HEADS * SIZE, D], "self_attn.q_proj.bias": [HEADS * SIZE],
    "self_attn.k_proj.weight": [KV_HEADS * SIZE, D], "self_attn.k_proj.bias": [KV_HEADS * SIZE],
    "self_attn.v_proj.weight": [KV_HEADS * SIZE, D], "self_attn.v_proj.bias": [KV_HEADS * SIZE],
    "self_attn.o_proj.weight": [D, HEADS * SIZE],
    "mlp.gate_proj.weight": [INNER, D], "mlp.up_proj.weight": [INNER, D],
    "mlp.down_proj.weight": [D, INNER],
}  # fmt: skip


def draw(rng, name, shape):
    """Returns a random tensor; norms lie about 1."""
    noise = (0.4 * rng.normal(size=shape)).astype(np.float32)
    return noise + np.float32(1 if "norm" in name else 0)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Returns a folder as MiMo's are published, transformers' model of the target, and tensors."""
    torch = pytest.importorskip("torch")
    folder, rng = tmp_path_factory.mktemp("mimo"), np.random.default_rng(0)
    fields = SHAPE | {"head_dim": SIZE, "num_hidden_layers": 2, "rope_parameters": dict(ROPE)}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**fields)).eval().float()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.tensor(draw(rng, name, tuple(tensor.shape))))
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key not in ("rope_parameters",)} | KEYS
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    for name, shape in SHAPES.items():
        tensors[f"model.mtp_layers.0.{name}"] = draw(rng, name, shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, model, tensors


def changed(published, folder, tensors=None, **keys):
    """Writes the folder again with other keys of config.json, or tensors; returns it."""
    folder.mkdir()
    raw = json.loads((published[0] / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = published[2] if tensors is None else tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_its_distributions_are_those_of_one_plain_attention(published):
    """Of rows that lag by 140, 66 and 3 tokens, beside numpy on the published tensors.

    The target's hidden states are those of transformers.
    """
    torch = pytest.importorskip("torch")
    folder, model, tensors = published
    config, params = load_hf(folder, "float32")
    drafter = build("mtp", target=config).drafter
    empty = init_cache(config, batch_size=3, capacity=CAPACITY, dtype=jnp.float32)
    apply = tiny.one_program(make_apply(config))
    _, hidden, _ = apply(params, jnp.asarray(TEXT), empty, hidden_layers=drafter.hidden_layers)
    state = observe(None, drafter, None, hidden, block=20)
    pair = tiny.TinyPair(config, apply, params, None)
    proposal, state = propose(pair, drafter, None, state, 1.0)
    np.testing.assert_array_equal(state.cache.length, LENGTHS)
    keys = SHAPE | {"head_dim": SIZE, "theta": 777.0}
    for row, length in enumerate(LENGTHS):
        with torch.no_grad():
            output = model.model(torch.tensor(TEXT[row : row + 1, :length]))
        states = output.last_hidden_state[0].numpy()
        logits = tiny_mtp.reference_logits(
            tensors, keys, states, TEXT[row, : length + 1], np.asarray(proposal.tokens[row])
        )
        expected = scipy.special.softmax(logits, axis=-1)
        assert np.std(logits) > 0.3
        np.testing.assert_allclose(proposal.probs[row], expected, rtol=2e-3, atol=2e-5)


def test_what_is_saved_is_read_back(published, tmp_path):
    """Under the published names; and without the layer it is the target alone."""
    folder, _, tensors = published
    config, params = load_hf(folder, "float32")
    assert config.num_mtp_layers == 1
    save_hf(tmp_path / "copy", config, params)
    again = load_file(tmp_path / "copy" / "model.safetensors")
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(again[name], tensor)
    assert load_hf(tmp_path / "copy", "float32")[0] == config
    rest = {name: tensor for name, tensor in tensors.items() if "mtp_layers" not in name}
    alone = changed(published, tmp_path / "alone", rest, num_nextn_predict_layers=0)
    assert load_hf(alone, "float32")[0] == dataclasses.replace(config, num_mtp_layers=0)


@pytest.mark.parametrize(
    ("number", "has_tensors", "message"),
    [
        (1, False, r"missing tensors: model\.mtp_layers\.0\.final_layernorm\.weight, .* and 12"),
        (0, True, r"unknown tensors: model\.mtp_layers\.0\.final_layernorm\.weight, .* and 12"),
        (2, True, "expected num_nextn_predict_layers to be 0 or 1, got 2"),
        ("one", True, "expected num_nextn_predict_layers to be 0 or 1, got 'one'"),
    ],
)
def test_a_config_and_tensors_that_disagree_are_refused(
    published, tmp_path, number, has_tensors, message
):
    """In one line, whichever says more."""
    tensors = {k: v for k, v in published[2].items() if has_tensors or "mtp_layers" not in k}
    folder = changed(published, tmp_path / "model", tensors, num_nextn_predict_layers=number)
    with pytest.raises(InputError, match=message) as caught:
        load_hf(folder, "float32")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"use_mrope": True}, {"attention_bias": False}, {"zebra": 1},
                                    {"use_sliding_window": True}])  # fmt: skip
def test_keys_that_change_the_computation_are_refused(published, change):
    """And named."""
    raw = json.loads((published[0] / "config.json").read_text())
    with pytest.raises(ValueError, match=next(iter(change))):
        from_hf_config(raw | change)


def test_a_target_without_the_layer_is_named():
    """One line says what was expected."""
    config = dataclasses.replace(tiny_mtp.CONFIG, num_mtp_layers=0)
    message = r"expects a target with a layer for .* got a mimo without"
    with pytest.raises(InputError, match=message):
        build("mtp", target=config)


def test_the_default_drafter_uses_the_layer(published, tmp_path):
    """By the folder's config.json, or by the model; a draft model comes first."""
    folder = str(published[0])
    assert choose_method({}, folder, has_draft=False).drafter == "prompt_lookup+mtp"
    assert choose_method({}, folder, has_draft=True).drafter == "prompt_lookup+model"
    config = dataclasses.replace(tiny_mtp.CONFIG, vocab_size=128)
    model = tiny_models.make_model(config)
    assert choose_method({}, model, has_draft=False).drafter == "prompt_lookup+mtp"
    rest = {name: leaf for name, leaf in published[2].items() if "mtp_layers" not in name}
    alone = changed(published, tmp_path / "alone", rest, num_nextn_predict_layers=0)
    for target in (str(alone), tiny_models.target(), str(tmp_path / "none"), "random:smollm2-135m"):
        assert choose_method({}, target, has_draft=False).drafter == "prompt_lookup"
        assert not has_mtp_layer(target)
