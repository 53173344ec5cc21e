"""Folders with heads of every kind: there and back, the published layouts, what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jspec.common.errors import InputError
from jspec.drafters import medusa
from jspec.drafters.blockwise import load_blockwise, save_blockwise
from jspec.drafters.eagle_head import EagleConfig, eagle_rules, load_eagle, save_eagle
from jspec.drafters.eagle_layouts import save_speculators
from jspec.drafters.lookahead import load_lookahead, save_lookahead
from jspec.models import PRESETS
from jspec.weights.torch_file import convert_torch, find_torch_files
from tests import tiny, tiny_blockwise, tiny_eagle, tiny_lookahead, tiny_medusa
from tests.tiny_models import save_folder

MEDUSA = "medusa_lm_head.safetensors"
TARGET = PRESETS["llama3.1-8b"]
# Of the public head for Llama-3.1-8B-Instruct, but for d2t [32000] and t2d [128256].
_PUBLISHED = {
    "fc.weight": (4096, 12288), "norm.weight": (4096,), "lm_head.weight": (32000, 4096),
    "midlayer.hidden_norm.weight": (4096,), "midlayer.input_layernorm.weight": (4096,),
    "midlayer.post_attention_layernorm.weight": (4096,),
    "midlayer.self_attn.q_proj.weight": (4096, 8192),
    "midlayer.self_attn.k_proj.weight": (1024, 8192),
    "midlayer.self_attn.v_proj.weight": (1024, 8192),
    "midlayer.self_attn.o_proj.weight": (4096, 4096),
    "midlayer.mlp.gate_proj.weight": (14336, 4096), "midlayer.mlp.up_proj.weight": (14336, 4096),
    "midlayer.mlp.down_proj.weight": (4096, 14336),
}  # fmt: skip


def _save_eagle(folder, config, params, target):
    save_eagle(folder, config, params)


def _save_speculators(folder, config, params, target):
    source = folder.with_name("source")
    save_eagle(source, config, params)
    save_speculators(source, folder, target="org/target", num_draft_tokens=3)


# What makes the tiny head of a kind, writes it and reads it.
KINDS = {
    "blockwise": (tiny_blockwise, save_blockwise, load_blockwise),
    "lookahead": (tiny_lookahead, save_lookahead, load_lookahead),
    "medusa": (tiny_medusa, medusa.save_medusa, medusa.load_medusa),
    "eagle": (tiny_eagle, _save_eagle, load_eagle),
    "speculators": (tiny_eagle, _save_speculators, load_eagle),
}


def load(folder, kind, target=tiny.CONFIG, dtype="float32"):
    """Returns the head of a folder."""
    return KINDS[kind][2](folder, target, dtype)


@pytest.fixture
def saved(tmp_path):
    """Returns a function from a kind to the folder of its tiny head."""

    def write(kind):
        module, save, _ = KINDS[kind]
        save(tmp_path / kind, module.CONFIG, module.params(), tiny.CONFIG)
        return tmp_path / kind

    return write


def tensors_of(folder):
    """Returns the file of a folder's tensors."""
    path = folder / MEDUSA
    return path if path.exists() else folder / "model.safetensors"


def change_tensors(folder, change):
    """Writes the folder's tensors again after a change."""
    path = tensors_of(folder)
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)


def change_config(folder, **fields):
    """Writes fields of config.json anew; None takes one away."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_come_back_as_they_were(saved, kind):
    """Every parameter bit for bit; the config too."""
    loaded, module = load(saved(kind), kind), KINDS[kind][0]
    assert loaded.config == module.CONFIG
    jax.tree.map(np.testing.assert_array_equal, loaded.params, module.params())


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("blockwise", lambda t: t.pop("up.bias"), r"up\.bias: expected \[48\], found nothing"),
        ("medusa", lambda t: t.update({"2.7.weight": np.zeros(1)}), r"2\.7\.weight: expected no"),
        ("medusa", lambda t: t.update({"0.1.linear.weight": np.zeros((2, 2))}), r"cted \[32, 32\]"),
        ("eagle", lambda t: t.pop("fc.weight"), r"fc\.weight: expected \[32, 96\], found nothing"),
        ("eagle", lambda t: t.update(d2t=t["d2t"] * 0 - 1), "d2t: expected different ids of the"),
        ("eagle", lambda t: t.update(t2d=~t["t2d"]), "d2t and t2d disagree"),
        ("eagle", lambda t: t.pop("d2t"), "d2t: missing"),
        # Else they would be weights of up to 127.
        ("eagle", lambda t: t.update({"fc.weight": t["fc.weight"].astype(np.int8)}),
         r"fc.weight: expected fc.weight_scale with a scale for"),
    ],
)  # fmt: skip
def test_other_tensors_are_refused(saved, kind, change, message):
    """By the name of the tensor."""
    folder = saved(kind)
    change_tensors(folder, change)
    with pytest.raises(InputError, match=message):
        load(folder, kind)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("blockwise", {"blockwise_hidden_size": "wide"}, "hidden_dim as a .* least 1, got 'wide'"),
        ("lookahead", {"lookahead_num_tokens": "many"}, "num_tokens as a .* least 1, got 'many'"),
        ("lookahead", {"lookahead_num_tokens": 2}, r"weight: expected \[2, 32\], found \[3, 32\]"),
        ("medusa", {"medusa_num_heads": "3"}, "num_heads as a number of at least 1"),
        ("medusa", {"medusa_num_heads": None}, "it has no medusa_num_heads"),
        # Else it would be given three layers' features.
        ("eagle", {"eagle_config": {"use_aux_hidden_state": False}}, "states of several layers"),
        ("speculators", {"fc_norm": True}, "expected fc_norm false"),
        ("speculators", {"norm_before_fc": True}, r"input_norm.weight: expected \[96\], found"),
        ("speculators", {"speculators_model_type": "dflash"}, "eagle3 or peagle, got 'dflash'"),
        ("speculators", {"transformer_layer_config": []}, "transformer_layer_config to be an obj"),
    ],
)  # fmt: skip
def test_other_configs_are_refused(saved, kind, fields, message):
    """By the name of the field, or of the tensor that it contradicts."""
    folder = saved(kind)
    change_config(folder, **fields)
    with pytest.raises(InputError, match=message):
        load(folder, kind)


@pytest.mark.parametrize("kind", ["blockwise", "medusa", "published", "eagle"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [({"embed_dim": 64}, "the target's width, 64; it has 32"),
     ({"vocab_size": 99}, "the target's vocabulary, 99; it has 61"),
     ({"num_layers": 1}, r"the target's layers, 1; it has 2|it reads layers \[0, 1, 2\], of 1")],
)  # fmt: skip
def test_heads_of_another_target_are_refused(saved, kind, changes, message):
    """By what differs; published folders of Medusa do not say how many layers there were."""
    is_published, kind = kind == "published", kind.replace("published", "medusa")
    folder, target = saved(kind), dataclasses.replace(tiny.CONFIG, **changes)
    if is_published:
        change_config(folder, hidden_size=None, vocab_size=None, num_hidden_layers=None)
    if is_published and "num_layers" in changes:
        assert load(folder, kind, target).config == tiny_medusa.CONFIG
        return
    with pytest.raises(InputError, match=message):
        load(folder, kind, target)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_truncated_or_missing_file_is_refused(saved, kind):
    """One line."""
    folder = saved(kind)
    path = tensors_of(folder)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="truncated or damaged safetensors"):
        load(folder, kind)
    path.unlink()
    with pytest.raises(InputError, match=r"safetensors: missing|no safetensors"):
        load(folder, kind)


def test_names_and_shapes_of_eagle_are_those_of_published_heads():
    """At full size."""
    layer = dataclasses.replace(TARGET, num_layers=1, vocab_size=32000)
    config = EagleConfig(layer, TARGET.vocab_size, (2, 16, 29))
    parts = [part for rule in eagle_rules(config) for part in rule.parts]
    assert {part.name: part.shape for part in parts} == _PUBLISHED


def test_names_and_shapes_of_medusa_are_those_of_published_heads():
    """Of the public heads for Vicuna-7B, at full size."""
    config = medusa.MedusaConfig(TARGET.embed_dim, 32000, num_heads=5)
    parts = [part for rule in medusa.medusa_rules(config) for part in rule.parts]
    expected = {}
    for head in range(5):
        expected[f"{head}.0.linear.weight"] = (4096, 4096)
        expected[f"{head}.0.linear.bias"] = (4096,)
        expected[f"{head}.1.weight"] = (32000, 4096)
    assert {part.name: part.shape for part in parts} == expected


# Medusa.


def test_a_published_file_of_torch_becomes_a_folder_that_loads(saved, tmp_path):
    """Its name stays: `medusa_lm_head.pt` beside config.json."""
    torch, folder = pytest.importorskip("torch"), saved("medusa")
    loaded = safetensors.numpy.load_file(folder / MEDUSA)
    tensors = {name: torch.from_numpy(value) for name, value in loaded.items()}
    (folder / MEDUSA).unlink()
    torch.save(tensors, folder / "medusa_lm_head.pt")
    convert_torch(find_torch_files(folder), tmp_path / "new", "float32")
    heads = load(tmp_path / "new", "medusa")
    jax.tree.map(np.testing.assert_array_equal, heads.params, tiny_medusa.params())


def test_bfloat16_comes_back_as_it_was(tmp_path):
    """The form in which trained heads are stored."""
    stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny_medusa.params())
    arguments = tiny_medusa.CONFIG, stored, tiny.CONFIG
    medusa.save_medusa(tmp_path / "head", *arguments, base_model="some/base")
    heads = load(tmp_path / "head", "medusa", dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, heads.params, stored)
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    assert raw["base_model_name_or_path"] == "some/base"


def test_a_published_folder_is_read(tmp_path):
    """Its config names the base model, and fewer heads than there are, as public ones do."""
    rng = np.random.default_rng(0)
    tensors = {}
    for head in range(3):
        tensors[f"{head}.0.linear.weight"] = rng.normal(size=(32, 32)).astype(np.float16)
        tensors[f"{head}.0.linear.bias"] = rng.normal(size=(32,)).astype(np.float16)
        tensors[f"{head}.1.weight"] = rng.normal(size=(61, 32)).astype(np.float16)
    safetensors.numpy.save_file(tensors, tmp_path / MEDUSA)
    raw = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "a/b",
           "transformers_version": "4.31.0"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    heads = load(tmp_path, "medusa")
    assert heads.config.num_heads == 3
    np.testing.assert_array_equal(heads.params["head_2"]["head"], tensors["2.1.weight"])
    block = heads.params["head_1"]["layer_0"]
    np.testing.assert_array_equal(block["kernel"], tensors["1.0.linear.weight"])
    np.testing.assert_array_equal(block["bias"], tensors["1.0.linear.bias"])


# EAGLE.


def test_ids_are_sorted_with_their_rows(saved):
    """A head whose ids do not rise says the same; of equal logits the smallest id is first."""
    folder = saved("eagle")
    right = load(folder, "eagle").params
    order = np.random.default_rng(0).permutation(len(right["ids"]))

    def shuffle(tensors):
        tensors["d2t"] = np.asarray(right["ids"], np.int64)[order] - np.arange(len(order))
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]

    change_tensors(folder, shuffle)
    loaded = load(folder, "eagle").params
    jax.tree.map(np.testing.assert_array_equal, loaded, right)


@pytest.mark.parametrize(
    ("config", "layers"),
    [({}, (2, 6, 9)),
     ({"eagle_config": {"use_aux_hidden_state": True,
                        "eagle_aux_hidden_state_layer_ids": [1, 5, 8]}}, (1, 5, 8)),
     ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, (0, 1, 2))],
)  # fmt: skip
def test_configs_as_published_are_read(saved, config, layers):
    """The keys of the public heads' config.json, with and without what names the layers."""
    layer = tiny_eagle.CONFIG.layer
    sizes = {
        "hidden_size": layer.embed_dim, "intermediate_size": layer.hidden_dim,
        "num_attention_heads": layer.num_heads, "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim, "vocab_size": tiny.CONFIG.vocab_size,
        "draft_vocab_size": tiny_eagle.NUM_IDS,
    }  # fmt: skip
    published = {
        "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 2048,
        "model_type": "llama", "num_hidden_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.28.1",
        "use_cache": True,
    }  # fmt: skip
    folder = saved("eagle")
    (folder / "config.json").write_text(json.dumps(published | sizes | config))
    head = load(folder, "eagle", dataclasses.replace(tiny.CONFIG, num_layers=12))
    assert head.config.feature_layers == layers
    assert head.config.layer.rope_theta == 10_000
    jax.tree.map(np.testing.assert_array_equal, head.params, tiny_eagle.params())


def test_depth_and_biases_come_back(tmp_path):
    """Biases of heads for targets that have some; else drafting would end for want of a parameter.

    A target of another depth is refused, though it has layers of those numbers too.
    """
    biases = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
    layer = dataclasses.replace(tiny_eagle.CONFIG.layer, **biases)
    config = dataclasses.replace(tiny_eagle.CONFIG, layer=layer, target_num_layers=2)
    params = tiny_eagle.params(config=config)
    assert {"qkv_bias", "out_bias"} <= set(params["head"]["attention"])
    save_eagle(tmp_path / "head", config, params)
    head = load(tmp_path / "head", "eagle")
    assert head.config == config
    jax.tree.map(np.testing.assert_array_equal, head.params, params)
    deeper = dataclasses.replace(tiny.CONFIG, num_layers=12)
    with pytest.raises(InputError, match="the target's layers, 12; it has"):
        load(tmp_path / "head", "eagle", deeper)


# EAGLE in the layout of vLLM's `speculators`.


def test_the_config_has_what_vllm_reads(tmp_path):
    """The fields of base.py and algos.py, and a layer that transformers takes for a Llama.

    RoPE is in the spelling of every version; the tensors' names are in test_eagle.py.
    """
    layer = dataclasses.replace(
        tiny_eagle.CONFIG.layer, rope_scaling=TARGET.rope_scaling, max_seq_len=131_072
    )
    config = dataclasses.replace(tiny_eagle.CONFIG, layer=layer)
    _save_speculators(tmp_path / "out", config, tiny_eagle.params(), None)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["speculators_model_type"] == "eagle3"
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert raw["norm_before_residual"] is False
    assert raw["draft_vocab_size"] == tiny_eagle.NUM_IDS
    assert raw["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    layer = raw["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"]) == ("llama", 1)
    assert (layer["vocab_size"], layer["hidden_size"]) == (61, 32)
    assert layer["rope_theta"] == tiny.CONFIG.rope_theta
    assert layer["rope_scaling"]["factor"] == TARGET.rope_scaling.factor
    config = pytest.importorskip("transformers").LlamaConfig(**layer)
    assert config.num_key_value_heads == tiny.CONFIG.num_kv_heads
    assert config.head_dim == tiny.CONFIG.head_dim


def test_the_verifier_is_of_the_targets_family(tmp_path, monkeypatch):
    """Guards against a Qwen that vLLM takes for a Llama; a folder, the hub's cache, neither."""
    save_eagle(tmp_path / "head", tiny_eagle.CONFIG, tiny_eagle.params())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub/models--org--qwen"
    folders = (tmp_path / "qwen", cached / "snapshots/c0ffee")
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("c0ffee")
    kinds = ("Qwen3", "Qwen3", "Llama")
    for target, kind in zip((str(folders[0]), "org/qwen", "org/other"), kinds, strict=True):
        output = tmp_path / "out" / target.replace("/", "-")
        output.parent.mkdir(exist_ok=True)
        save_speculators(tmp_path / "head", output, target=target, num_draft_tokens=3)
        actual = json.loads((output / "config.json").read_text())["speculators_config"]["verifier"]
        assert actual == {"architectures": [f"{kind}ForCausalLM"], "name_or_path": target}


def test_what_is_no_head_is_refused(tmp_path):
    """An empty folder, a model of several layers, one of a single layer."""
    with pytest.raises(InputError, match="config lacks the key"):
        save_speculators(tmp_path, tmp_path / "out", target="t", num_draft_tokens=3)
    for layers, message in ((2, "a head of one layer, got 2 layers"), (1, "it has no fc.weight")):
        source = save_folder(tmp_path / str(layers), num_layers=layers)
        with pytest.raises(InputError, match=message):
            save_speculators(source, tmp_path / "out", target="t", num_draft_tokens=3)
    assert not (tmp_path / "out").exists()
