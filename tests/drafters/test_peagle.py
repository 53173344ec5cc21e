"""Heads of P-EAGLE: their one pass, their folders, their cache, and the whole step."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import scipy.special

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.drafters.eagle import ParallelEagleDrafter
from jspec.drafters.eagle_head import load_eagle, save_eagle
from jspec.drafters.eagle_layouts import save_speculators
from tests import tiny, tiny_eagle, tiny_peagle
from tests.cases import slow_unless
from tests.drafters.rows import LENGTHS, WIDTH, observe
from tests.speculation.drive import propose

CONFIGS = {
    "two layers": tiny_peagle.CONFIG,
    "norms": dataclasses.replace(
        tiny_peagle.CONFIG, has_input_norm=True, has_residual_norm=True, mask_id=0
    ),
}
# What is published of a head with two layers for the tiny target.
SHAPES = {
    "fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (40, 32), "d2t": (40,),
    "t2d": (61,), "mask_hidden": (1, 1, 96), "embed_tokens.weight": (61, 32),
    "layers.0.hidden_norm.weight": (32,),
} | {
    f"layers.{i}.{name}.weight": shape
    for i, inputs in ((0, 64), (1, 32))
    for name, shape in {
        "input_layernorm": (32,), "post_attention_layernorm": (32,),
        "self_attn.q_proj": (24, inputs), "self_attn.k_proj": (12, inputs),
        "self_attn.v_proj": (12, inputs), "self_attn.o_proj": (32, 24),
        "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48),
    }.items()
}  # fmt: skip


def build(folder, config=tiny_peagle.CONFIG, **options):
    """Writes a head, and as speculators have it too; returns both folders."""
    save_eagle(folder / "head", config, tiny_peagle.params(config))
    save_speculators(folder / "head", folder / "other", target="t", num_draft_tokens=3)
    return folder / "head", folder / "other"


def spec_for(folder, width=WIDTH, **options):
    """Returns what the drafter of a folder is built from."""
    options = DrafterOptions(draft_head=str(folder), **options)
    return DrafterSpec(width, tiny.CONFIG, 61, None, jnp.float32, options=options)


@pytest.mark.parametrize("name", [slow_unless(name == "norms", name) for name in CONFIGS])
def test_its_distributions_are_those_of_one_plain_attention(tiny_pair, tmp_path, text, last, name):
    """Of rows that lag by 140, 66 and 3 tokens, beside numpy on the published tensors."""
    config = CONFIGS[name]
    folder, normed_folder = build(tmp_path, config)
    built = make_drafter("eagle", spec_for(normed_folder if name == "norms" else folder))
    assert isinstance(built.drafter, ParallelEagleDrafter)
    assert built.drafter.config == config
    state = observe(tiny_pair, built.drafter, built.params)
    limits = [WIDTH] * 3
    proposal, state = propose(tiny_pair, built.drafter, built.params, state, last, limits, 1.0)
    np.testing.assert_array_equal(state.cache.length, LENGTHS)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    ids = np.arange(len(tensors["d2t"])) + tensors["d2t"]
    for row, length in enumerate(LENGTHS):
        known = jnp.asarray(text[row : row + 1, :length])
        outputs = tiny_eagle.features_of(tiny_pair, known)[0]
        said = tiny_peagle.reference_logits(
            tensors, config, outputs, text[row, : length + 1], WIDTH
        )
        assert np.std(said) > 0.3
        expected = np.zeros((WIDTH, 61))
        expected[:, ids] = scipy.special.softmax(said, axis=-1)
        np.testing.assert_allclose(proposal.probs[row], expected, rtol=2e-3, atol=2e-5)


def test_folders_have_the_published_names_and_are_read_back(tmp_path):
    """In both layouts, and with the mask's output as vLLM keeps it, on two axes."""
    config = dataclasses.replace(tiny_peagle.CONFIG, most_drafts=8)
    params = tiny_peagle.params(config)
    folders = build(tmp_path, config)
    tensors = safetensors.numpy.load_file(folders[1] / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == SHAPES
    raw = json.loads((folders[1] / "config.json").read_text())
    assert (raw["speculators_model_type"], raw["mask_token_id"]) == ("peagle", 60)
    assert raw["architectures"] == ["PEagleSpeculator"]
    extra = {"verifier_lm_head.weight": np.ones((61, 32), np.float32)}
    flat = tensors | extra | {"mask_hidden": tensors["mask_hidden"].reshape(1, -1)}
    safetensors.numpy.save_file(flat, folders[1] / "model.safetensors")
    more = {"down_sample_ratio": 0.7, "max_seq_len": 2048, "embed_requires_grad": True}
    (folders[1] / "config.json").write_text(json.dumps(raw | more))
    for folder in folders:
        loaded = load_eagle(folder, tiny.CONFIG, "float32")
        assert loaded.config == config
        jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": None}, "expected mask_token_id or ptd_token_id"),
        ({"mask_token_id": 61}, "expected mask_token_id from 0 to 60, got 61"),
        ({"speculators_model_type": "eagle3", "mask_token_id": None}, "a head of one layer, got 2"),
        ({"zebra": 1}, "unknown config keys: zebra"),
        ({"num_depths": -1}, "expected num_depths as a whole number"),
        ({"fc_norm": True}, "expected fc_norm false"),
    ],
)
def test_bad_configs_are_refused_in_one_line(tmp_path, change, message):
    """What was expected, and what came."""
    _, folder = build(tmp_path)
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    with pytest.raises(InputError, match=message) as caught:
        load_eagle(folder, tiny.CONFIG, "float32")
    assert "\n" not in str(caught.value)


def test_tensors_that_do_not_fit_the_config_are_named(tmp_path):
    """A P-EAGLE without what stands for the target's outputs; and that in a plain head."""
    folder, _ = build(tmp_path)
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    mask = tensors.pop("mask_hidden")
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(InputError, match=r"mask_hidden: expected \[1, 1, 96\], found nothing"):
        load_eagle(folder, tiny.CONFIG, "float32")
    save_eagle(tmp_path / "plain", tiny_eagle.CONFIG, tiny_eagle.params())
    path = tmp_path / "plain" / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(tensors | {"mask_hidden": mask}, path)
    with pytest.raises(InputError, match=r"mask_hidden: expected nothing, found \[1, 1, 96\]"):
        load_eagle(tmp_path / "plain", tiny.CONFIG, "float32")


def test_there_are_no_more_drafts_than_it_was_trained_for(tmp_path):
    """Chains are cut; a deeper tree is refused."""
    folder, _ = build(tmp_path, dataclasses.replace(tiny_peagle.CONFIG, most_drafts=2))
    for wanted in (1, 7):
        drafter = make_drafter("eagle", spec_for(folder, wanted)).drafter
        assert drafter.num_draft_tokens == drafter.kinds[0].most == min(wanted, 2)
    tree = make_drafter("eagle", spec_for(folder, 4, tree_depth=2, tree_branches=2)).drafter
    assert isinstance(tree, ParallelEagleDrafter)
    assert tree.shape is not None
    with pytest.raises(InputError, match="expected tree_depth of at most 2"):
        make_drafter("eagle", spec_for(folder, 4, tree_depth=3))
