"""Heads of EAGLE-3 and P-EAGLE as drafters: chains, lag, distributions, norms, their one pass."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from safetensors.numpy import load_file, save_file

from jspec.common.errors import InputError
from jspec.drafters.eagle import ParallelEagleDrafter
from jspec.drafters.eagle_head import apply_head, fuse, load_eagle, save_eagle
from jspec.drafters.eagle_layouts import save_speculators
from jspec.models import init_cache
from tests import tiny, tiny_eagle, tiny_peagle
from tests.cases import slow_unless
from tests.drafters.rows import LENGTHS, TEXT, WIDTH, build, observe, propose

HEAD = tiny_eagle.params()
IDS = np.asarray(HEAD["ids"])
USED = 50  # ids that are no padding of the target's table
DRAFTER = dataclasses.replace(tiny_eagle.drafter(WIDTH), vocab_size=USED)


@pytest.fixture(scope="module")
def observed(tiny_pair):
    """Returns the state that has seen another number of tokens of each row, and proposed never."""
    return observe(tiny_pair, DRAFTER, HEAD)


def chain(pair, row, num_drafts):
    """Returns the logits of a row's drafts by calls over everything, and the greedy drafts."""
    text = TEXT[row, : LENGTHS[row] + 1].tolist()
    return tiny_eagle.chain_logits(pair, HEAD, text, num_drafts, USED)


def test_a_lagging_head_says_what_a_fresh_one_says(tiny_pair, observed):
    """Rows that missed 139, 65 and 2 pairs: the chain is that of calls over everything."""
    proposal, state = propose(tiny_pair, DRAFTER, HEAD, observed)
    np.testing.assert_array_equal(state.cache.length, LENGTHS)
    for row in range(len(LENGTHS)):
        np.testing.assert_array_equal(proposal.tokens[row], chain(tiny_pair, row, WIDTH)[1])


def test_its_distribution_is_the_heads_softmax_over_what_it_can_propose(tiny_pair, observed):
    """At temperature 1; padding and other tokens of the target have probability 0."""
    proposal, _ = propose(tiny_pair, DRAFTER, HEAD, observed, 1.0)
    np.testing.assert_array_equal(proposal.num_tokens, [WIDTH] * 3)
    probs, expected = np.asarray(proposal.probs), np.zeros(61)
    assert (probs[..., np.setdiff1d(np.arange(61), IDS[IDS < USED])] == 0).all()
    assert (np.asarray(proposal.tokens) < USED).all()
    expected[IDS] = scipy.special.softmax(chain(tiny_pair, 2, 1)[0][0])
    np.testing.assert_allclose(probs[2, 0], expected, rtol=1e-4, atol=1e-6)


def test_a_head_of_a_folder_is_told_of_the_padding(tmp_path):
    """Guards against a drafter that is right, and never told."""
    folder = tiny_eagle.save_head(tmp_path / "head", tiny.CONFIG)
    drafter = build("eagle", head=folder, vocab_size=59, draft_confidence=0.25).drafter
    assert (drafter.vocab_size, drafter.config.target_vocab_size) == (59, 61)
    assert (drafter.num_draft_tokens, drafter.min_confidence) == (WIDTH, 0.25)


def test_a_row_of_which_nothing_is_wanted_lags(tiny_pair, observed):
    """Its cache stays where it was, its neighbour's does not, and it proposes nothing."""
    proposal, state = propose(tiny_pair, DRAFTER, HEAD, observed, limit=[0, 2, 0])
    np.testing.assert_array_equal(proposal.num_tokens, [0, 2, 0])
    np.testing.assert_array_equal(state.cache.length, [0, LENGTHS[1], 0])


# Norms.

FLAGS = ("has_input_norm", "has_output_norm", "has_residual_norm")
KEYS = {"has_output_norm": "norm_output", "has_residual_norm": "norm_before_residual"}


def run_head(config, params, outputs, embedded, at):
    """Returns the logits at one pair, and what takes the features' place."""
    features = fuse(params, outputs, config.layer.norm_epsilon)
    empty = init_cache(config.layer, batch_size=1, capacity=5, dtype=jnp.float32)
    return apply_head(config, params, embedded, features, empty, logits_at=at)[:2]


@pytest.mark.parametrize(
    "flags",
    [slow_unless(sum(flags) in (1, 3), flags) for flags in itertools.product([0, 1], repeat=3)],
)
def test_a_head_with_these_norms_says_what_numpy_says(tmp_path, flags):
    """From folders of both layouts; with each norm alone, and all of them."""
    norms = dict(zip(FLAGS, map(bool, flags), strict=True))
    config = dataclasses.replace(tiny_eagle.CONFIG, **norms)
    params = tiny_eagle.params(config=config)
    save_eagle(tmp_path / "head", config, params)
    save_speculators(tmp_path / "head", tmp_path / "other", target="t", num_draft_tokens=3)
    for name in ("head", "other"):
        loaded = load_eagle(tmp_path / name, tiny.CONFIG, "float32")
        assert loaded.config == config
        jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    rng = np.random.default_rng(0)
    outputs, embedded = (
        rng.normal(size=shape).astype(np.float32) for shape in ((5, 3, 32), (5, 32))
    )
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    expected = tiny_peagle.reference_stream(tensors, config, outputs.reshape(5, -1), embedded)
    said = tiny_peagle.normed(tensors, config, expected, "norm")
    logits, hidden = jax.jit(run_head, static_argnums=0)(
        config, params, outputs[None], embedded[None], np.array([3])
    )
    np.testing.assert_allclose(
        logits[0, 0], said[3] @ tensors["lm_head.weight"].T, rtol=1e-3, atol=1e-3
    )
    stream = said if config.has_output_norm else expected
    np.testing.assert_allclose(hidden[0], stream, rtol=1e-3, atol=1e-3)


def changed_config(path, **fields):
    """Writes a config.json with other fields; None takes one away."""
    raw = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def test_what_is_missing_means_what_it_means_to_vllm(tmp_path):
    """In speculators' layout `norm_before_residual` is true where nothing is said."""
    save_eagle(tmp_path / "head", tiny_eagle.CONFIG, HEAD)
    save_speculators(tmp_path / "head", tmp_path / "other", target="t", num_draft_tokens=3)
    changed_config(tmp_path / "other" / "config.json", norm_before_residual=None)
    assert load_eagle(tmp_path / "other", tiny.CONFIG, "float32").config.has_residual_norm


def test_the_keys_may_stand_in_a_group(tmp_path):
    """As some publish them."""
    save_eagle(tmp_path / "head", tiny_eagle.CONFIG, HEAD)
    for flag, key in KEYS.items():
        changed_config(tmp_path / "head" / "config.json", eagle_config={key: True})
        config = load_eagle(tmp_path / "head", tiny.CONFIG, "float32").config
        assert config == dataclasses.replace(tiny_eagle.CONFIG, **{flag: True})


# P-EAGLE.

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


def write(folder, config=tiny_peagle.CONFIG):
    """Writes a head, and as speculators have it too; returns both folders."""
    save_eagle(folder / "head", config, tiny_peagle.params(config))
    save_speculators(folder / "head", folder / "other", target="t", num_draft_tokens=3)
    return folder / "head", folder / "other"


@pytest.mark.parametrize("name", [slow_unless(name == "norms", name) for name in CONFIGS])
def test_its_distributions_are_those_of_one_plain_attention(tiny_pair, tmp_path, name):
    """Of rows that lag by 140, 66 and 3 tokens, beside numpy on the published tensors."""
    config = CONFIGS[name]
    folder, normed_folder = write(tmp_path, config)
    built = build("eagle", head=normed_folder if name == "norms" else folder)
    assert isinstance(built.drafter, ParallelEagleDrafter)
    assert built.drafter.config == config
    state = observe(tiny_pair, built.drafter, built.params)
    proposal, state = propose(tiny_pair, built.drafter, built.params, state, 1.0)
    np.testing.assert_array_equal(state.cache.length, LENGTHS)
    tensors = load_file(folder / "model.safetensors")
    ids = np.arange(len(tensors["d2t"])) + tensors["d2t"]
    for row, length in enumerate(LENGTHS):
        outputs = tiny_eagle.features_of(tiny_pair, TEXT[row : row + 1, :length])[0]
        text = TEXT[row, : length + 1]
        said = tiny_peagle.reference_logits(tensors, config, outputs, text, WIDTH)
        assert np.std(said) > 0.3
        expected = np.zeros((WIDTH, 61))
        expected[:, ids] = scipy.special.softmax(said, axis=-1)
        np.testing.assert_allclose(proposal.probs[row], expected, rtol=2e-3, atol=2e-5)


def test_folders_have_the_published_names_and_are_read_back(tmp_path):
    """In both layouts, and with the mask's output as vLLM keeps it, on two axes."""
    config = dataclasses.replace(tiny_peagle.CONFIG, most_drafts=8)
    params = tiny_peagle.params(config)
    folders = write(tmp_path, config)
    tensors = load_file(folders[1] / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == SHAPES
    raw = json.loads((folders[1] / "config.json").read_text())
    assert (raw["speculators_model_type"], raw["mask_token_id"]) == ("peagle", 60)
    assert raw["architectures"] == ["PEagleSpeculator"]
    extra = {"verifier_lm_head.weight": np.ones((61, 32), np.float32)}
    flat = tensors | extra | {"mask_hidden": tensors["mask_hidden"].reshape(1, -1)}
    save_file(flat, folders[1] / "model.safetensors")
    changed_config(
        folders[1] / "config.json",
        down_sample_ratio=0.7,
        max_seq_len=2048,
        embed_requires_grad=True,
    )
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
    _, folder = write(tmp_path)
    changed_config(folder / "config.json", **change)
    with pytest.raises(InputError, match=message) as caught:
        load_eagle(folder, tiny.CONFIG, "float32")
    assert "\n" not in str(caught.value)


def test_there_are_no_more_drafts_than_it_was_trained_for(tmp_path):
    """Chains are cut; a deeper tree is refused."""
    folder, _ = write(tmp_path, dataclasses.replace(tiny_peagle.CONFIG, most_drafts=2))
    for wanted in (1, 7):
        drafter = build("eagle", wanted, head=folder).drafter
        assert drafter.num_draft_tokens == drafter.kinds[0].most == min(wanted, 2)
    tree = build("eagle", 4, head=folder, tree_depth=2, tree_branches=2).drafter
    assert isinstance(tree, ParallelEagleDrafter)
    assert tree.shape is not None
    with pytest.raises(InputError, match="expected tree_depth of at most 2"):
        build("eagle", 4, head=folder, tree_depth=3)
