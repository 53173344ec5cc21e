"""Models on a mesh of 8 virtual devices: the same texts, two sums a layer, rows that share nothing.

The devices are those of a separate process, as JAX has them from its start.
"""

import pytest

from jspec.drafters import DRAFTERS
from tests.meshes import CONFIG, PROMPTS, run_on_devices

# What runs in the process: everything that the quick tests ask, as each start takes seconds.
_QUICK = """
from jspec.sampling.settings import Switches
from tests import meshes
import jax, math, re
import numpy as np

COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
meshes.CONFIG = dataclasses.replace(CONFIG, num_layers=1)  # of drafts
outputs = {}
for mesh in (None, "data:2,model:4"):
    # Fewer rows than prompts: rows are replaced, each on its own row of the mesh.
    outputs[str(mesh)] = answers("model", mesh, 10, model=target(num_layers=1), batch_size=2)

def text_of(drafter, mesh, **options):
    generator = make_generator(drafter, mesh, target(num_layers=1), **options)
    engine, rows = generator.engine, generator.batch_size
    state = engine.empty_state(rows, 64, Switches())
    return engine._run.lower(generator.params, state, np.int32(1)).compile().as_text()

of_both = text_of("none", "data:2,model:2")
outputs["groups"] = replica_groups(of_both)
outputs["sums"] = len(re.findall(r" all-reduce(?:-start)?\\(", of_both))

def gathered(text):
    lines = re.findall(r" = (.*?) all-gather(?:-start)?\\(", text)
    arrays = re.findall(r"[a-z](\\d+)\\[([0-9,]*)\\]", " ".join(lines))
    return max(int(bits) // 8 * math.prod(map(int, sizes.split(","))) for bits, sizes in arrays)

outputs["of parts"] = [gathered(of_both), gathered(text_of("prompt_lookup", "data:2,model:2"))]
outputs["of all"] = gathered(text_of("prompt_lookup", "data:2,model:2", acceptance="rejection"))
text = text_of("model", "data:4")
outputs["of rows"] = [op for op in COLLECTIVES if f" {op}" in text]
outputs["elsewhere"] = [op for op in COLLECTIVES if f" {op}" in of_both]
report(outputs)
"""


@pytest.fixture(scope="module")
def outputs():
    return run_on_devices(_QUICK)


def test_answers_are_those_of_one_device(outputs):
    """Guards against a shard that reads another's heads, and rows of their own noise."""
    assert outputs["data:2,model:4"] == outputs["None"]
    for texts, num_accepted in outputs["None"]:
        assert num_accepted > 0
        assert len({tuple(ids) for ids in texts}) == len(PROMPTS)


def test_a_layer_needs_two_sums(outputs):
    """And the embedding one more. Guards against a lost `psum`."""
    assert outputs["sums"] == 2 + 1


def test_logits_are_gathered_only_for_a_rule_that_needs_them(outputs):
    """Of two rows, and one position or five; a pair of four bytes of each of two devices."""
    pair = 2 * 4 * 2
    assert outputs["of parts"] == [2 * pair, 2 * 5 * pair]
    assert outputs["of all"] == 2 * 5 * 4 * CONFIG.vocab_size


def test_rows_of_the_mesh_share_nothing(outputs):
    """Their groups of devices are apart; with `data` alone there is no collective at all."""
    assert outputs["groups"] == [[[0, 1], [2, 3]]]
    assert outputs["of rows"] == []
    assert outputs["elsewhere"] == ["all-reduce", "all-gather"], "what is looked for can be found"


_MATRIX = """
import pathlib, tempfile

folder = pathlib.Path(tempfile.mkdtemp())
options = drafter_options({drafter!r}, folder, **{changes!r})
outputs = []
for mesh in (None, "model:1", "model:2", "data:2,model:2", "model:8", "data:2,model:4", "data:4"):
    outputs.append(answers({drafter!r}, mesh, drafter_options=options))
report(outputs)
"""
_CHANGES = {
    "layer_skip": {"draft_layers": (0,)},
    "layer_skip, second": {"draft_layers": (1,)},
    "model, few tokens": {"draft_vocab_size": 100},
    "model, tree": {"tree_depth": 2, "tree_branches": 2},
    "dflash, tree": {"tree_depth": 2, "tree_branches": 2},
    "suffix, memory": {"draft_memory": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [*DRAFTERS, *sorted(_CHANGES.keys() - DRAFTERS)])
def test_every_drafter_on_every_mesh(case):
    """On 1, 2, 4 and 8 devices; key/value heads that are split, whole, and copied."""
    drafter = case.partition(",")[0]
    answers = run_on_devices(_MATRIX.format(drafter=drafter, changes=_CHANGES.get(case, {})))
    assert answers == answers[:1] * len(answers)


# What decides how parameters are split, or made of a checkpoint's tensors.
_CONFIGS = {
    "llama": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "mixtral": {"num_experts": 4, "num_experts_per_token": 2, "expert_dim": 16},
    "gemma3_text": {"norms": "both", "qk_norm": "head", "tie_embeddings": True},
    "phi3": {},
    "granite": {"vocab_size": 123},
}
_FAMILIES = """
outputs = {{}}
for family, changes in {configs!r}.items():
    model = target(family=family, **changes)
    pair = [answers("prompt_lookup", mesh, model=model) for mesh in (None, "model:4")]
    outputs[family] = pair[0] == pair[1]
report(outputs)
"""


@pytest.mark.slow
def test_families_on_a_mesh():
    """Biases are added once, experts' outputs are summed, fused tensors and odd sizes are cut."""
    assert run_on_devices(_FAMILIES.format(configs=_CONFIGS)) == dict.fromkeys(_CONFIGS, True)


_BEAMS = """
from jspec import SamplingParams
outputs = []
for mesh in (None, "data:2,model:4"):
    generator = make_generator("model", mesh, acceptance="greedy", batch_size=1)
    params = SamplingParams(max_new_tokens=12, num_beams=3)
    outputs.append(generator.generate(PROMPTS[0], params).token_ids)
for mesh in (None, "data:2,model:4"):
    generator = make_generator("model", mesh, num_draft_tokens="auto")
    outputs.append(generator.costs.numbers)
report(outputs)
"""


@pytest.mark.slow
def test_beams_and_measured_costs_on_a_mesh(monkeypatch, tmp_path):
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    alone, spread, *numbers = run_on_devices(_BEAMS)
    assert alone == spread
    assert numbers[0] == numbers[1]


_ROUNDED = """
import pathlib, tempfile
from jspec.generation.generator import Generator
from jspec.models.sharding import make_mesh
from jspec.weights import load_model
from jspec import SamplingParams

folder = tiny_models.save_folder(
    pathlib.Path(tempfile.mkdtemp()) / "m", num_heads=8, head_dim=16, hidden_dim=128
)
outputs = []
for kind in ("none", "int8", "int4", "q4_0"):
    pair = []
    for text in (None, "model:4"):
        mesh = None if text is None else make_mesh(text)
        model = load_model(folder, dtype="float32", quantization=kind, mesh=mesh)
        generator = Generator(model, drafter="prompt_lookup", acceptance="greedy")
        pair.append(generator.generate(PROMPTS, SamplingParams(max_new_tokens=24))[0].token_ids)
    outputs.append(pair)
report(outputs)
"""


_PACKED = """
import gguf, pathlib, tempfile
from jspec.weights.gguf import load_gguf
from jspec.common.errors import InputError
from tests.weights.toys import write_gguf, unpack

kinds, folder, outputs = gguf.GGMLQuantizationType, pathlib.Path(tempfile.mkdtemp()), []
config = dataclasses.replace(CONFIG, head_dim=16, embed_dim=64, hidden_dim=128, eos_ids=(2, 3))
tensors = unpack(config, tiny_models.peaked_params(config))
for index, mixed in enumerate(({"": kinds.Q4_1}, {
    "attn_v": kinds.Q8_0, "attn_output": kinds.Q5_0, "ffn_up": kinds.Q5_1, "ffn_gate": kinds.F16,
    "token_embd": kinds.Q8_0, "": kinds.Q4_1,
})):
    path = folder / f"{index}.gguf"
    write_gguf(path, config, tensors, kinds=mixed)
    read, params, _ = load_gguf(path, "float32", "packed")
    model = tiny_models.make_model(read, params=params)
    meshes = None, "model:2", "data:2,model:4"
    outputs.append([answers("prompt_lookup", mesh, model=model) for mesh in meshes])
try:
    spread(model, "model:8")
except InputError as error:
    outputs.append(str(error))
report(outputs)
"""


_READ = """
import pathlib, tempfile
import numpy as np
from jspec.models.sharding import make_mesh
from jspec.weights import load_model
from jspec.weights.orbax_checkpoint import save_orbax
from jspec.weights.shards import is_placed

hf = tiny_models.save_folder(pathlib.Path(tempfile.mkdtemp()) / "m", num_heads=8)
whole = load_model(str(hf), dtype="float32")
folder = hf.parent / "orbax"
save_orbax(folder, whole.config, whole.params, tokenizer=whole.tokenizer)
outputs = []
for text in ("model:2", "data:2,model:4"):
    mesh = make_mesh(text)
    model, copy = (load_model(str(path), dtype="float32", mesh=mesh) for path in (hf, folder))
    same = jax.tree.map(
        lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()) and a.sharding == b.sharding,
        model.params, copy.params,
    )
    outputs.append(model.config == copy.config and all(jax.tree.leaves(same)))
report(outputs)
"""


@pytest.mark.slow
def test_orbax_folders_are_read_as_they_will_lie():
    """As safetensors are: heads split, and copied where there are fewer than devices."""
    assert run_on_devices("import jax\n" + _READ) == [True, True]


@pytest.mark.slow
def test_rounded_weights_on_a_mesh():
    """Guards against rows of integers that lie elsewhere than their scales, or another rounding."""
    answers = run_on_devices(_ROUNDED)
    assert all(alone == spread for alone, spread in answers)
    assert len({tuple(alone) for alone, _ in answers}) > 1, "rounded models say something else"


@pytest.mark.slow
def test_packed_weights_on_a_mesh():
    """Strips lie shard after shard, of several formats as well; a block is never cut."""
    *answers, said = run_on_devices(_PACKED)
    for alone, *spread in answers:
        assert spread == [alone, alone]
        assert alone[0][1] > 0, "drafts are accepted"
    assert "leaves groups of 32 inputs of out whole, got model:8" in said
