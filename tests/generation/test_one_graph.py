"""The programs of rounds as XLA compiles them for a GPU that is not there: loops, and products.

Guards against a loop whose condition has no kernels. In one CUDA graph it starts at once, beside
what should come before it and on a stale condition: drafts are wrong, and at a temperature so may
the answer be. First answers are right, as a program's first run is no graph.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from jspec import Generator, SamplingParams, kernels
from jspec.drafters import DRAFTERS, DrafterOptions
from jspec.drafters.dflash_head import save_dflash
from jspec.drafters.eagle_head import EagleConfig, save_eagle
from jspec.generation.batch import needed_switches
from jspec.lab.accelerators.compiled import compile_program, find_accelerator
from jspec.lab.auditing.subject import cast
from jspec.models.config import EncoderConfig
from jspec.speculation.beam import BeamLimits, num_candidates
from tests import meshes, tiny_dflash, tiny_eagle, tiny_models
from tests.drafters.test_translated_model import model as translated_model

pytestmark = pytest.mark.compile_gpu
_CAPACITY = 128
_QUICK = {"xla_gpu_autotune_level": 0}  # tilings decide no condition
_SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.2, top_p=0.99, repetition_penalty=1.1),
}
_TREE = {"num_draft_tokens": 5, "tree_depth": 2, "tree_branches": 2}
_DRAWN = {**_TREE, "num_draft_tokens": 4, "tree_draws": "with"}
_WITH_HEADS = "dflash with a Markov and a confidence head"
_PARALLEL = "eagle in one pass"  # P-EAGLE
_HEADS = {
    "markov_rank": 2, "has_confidence": True, "confidence_reads_markov": True, "says_next": True,
}  # fmt: skip
_CASCADE, _MERGED = "prompt_lookup+model", "prompt_lookup+recycle+model"
_RUNS = [(name, kind, 1, {}) for name in DRAFTERS for kind in _SETTINGS]
_RUNS += [
    (_CASCADE, "greedy", 1, {}),
    (_CASCADE, "sampled", 1, {"num_draft_tokens": "auto"}),
    ("model", "greedy", 1, _TREE),
    ("model", "greedy", 1, _DRAWN),
    ("model", "sampled", 3, _DRAWN),
    ("eagle", "greedy", 1, _TREE),
    ("mtp", "greedy", 1, _TREE),
    ("medusa", "greedy", 1, _TREE),
    ("prompt_lookup", "greedy", 1, _TREE),
    (_MERGED, "greedy", 1, _TREE),
    (_MERGED, "sampled", 3, _TREE),
    ("none", "sampled", 3, {}),
    ("prompt_lookup", "sampled", 3, {}),
    ("model", "greedy", 3, {}),
    ("hierarchical", "greedy", 3, {}),
    ("prompt_lookup", "greedy", 32, {}),
    ("model", "greedy", 32, {"num_draft_tokens": "auto"}),
    (_CASCADE, "sampled", 32, {"num_draft_tokens": "auto"}),
    ("model", "sampled", 1, {"acceptance": "block"} | _DRAWN),
    ("model", "sampled", 1, {"acceptance": "coupled"}),
    ("model", "greedy", 1, {"dtype": "bfloat16"}),
    ("eagle", "sampled", 1, {"dtype": "bfloat16"}),
    (_MERGED, "greedy", 3, {"dtype": "bfloat16"} | _TREE),
    ("prompt_lookup", "greedy", 32, {"dtype": "bfloat16"}),
    ("dflash", "greedy", 1, _TREE),
    ("dflash", "sampled", 3, {"dtype": "bfloat16"} | _DRAWN),
    (_WITH_HEADS, "greedy", 1, {}),
    (_WITH_HEADS, "sampled", 3, {"num_draft_tokens": "auto"}),
    (_WITH_HEADS, "greedy", 32, {"dtype": "bfloat16"}),
    (_WITH_HEADS, "greedy", 1, _TREE),
    (_WITH_HEADS, "sampled", 3, _DRAWN),
    (_PARALLEL, "greedy", 1, {}),
    (_PARALLEL, "sampled", 3, {"dtype": "bfloat16"}),
    (_PARALLEL, "greedy", 1, _TREE),
]
# Drafts of another vocabulary, by their translation.
_RUNS += [
    (("translated", "model", "shared"), "greedy", 1, {}),
    (("translated", "model", "shared"), "sampled", 3, {"num_draft_tokens": "auto"}),
    (("translated", "model", "spelling"), "greedy", 1, {}),
    (("translated", "model", "spelling"), "sampled", 3, {}),
    (("translated", "model", "auto"), "greedy", 1, {"dtype": "bfloat16"}),
    (("translated", "model", "auto"), "sampled", 1, {"acceptance": "coupled"}),
    (("translated", "model", "auto"), "sampled", 32, {}),
    (("translated", _CASCADE, "auto"), "sampled", 1, {}),
]
_ENCODERS = {
    "text": EncoderConfig(num_layers=2, num_heads=4, head_dim=8, hidden_dim=48, max_len=64),
    "sound": EncoderConfig(
        num_layers=2, num_heads=4, head_dim=8, hidden_dim=48, max_len=32, num_mels=8,
        never_ids=(5,), never_first_ids=(6,),
    ),
}  # fmt: skip
# Encoder-decoders, whose keys and values of the source are constants of the round.
_RUNS += [
    (("encoded", "text", "none"), "greedy", 1, {}),
    (("encoded", "text", "prompt_lookup"), "greedy", 1, {}),
    (("encoded", "text", "model"), "sampled", 3, {}),
    (("encoded", "text", _CASCADE), "sampled", 1, {"num_draft_tokens": "auto"}),
    (("encoded", "text", "model"), "greedy", 1, _TREE),
    (("encoded", "sound", "none"), "greedy", 1, {}),
    (("encoded", "sound", "prompt_lookup"), "greedy", 3, {"dtype": "bfloat16"}),
    (("encoded", "sound", "model"), "sampled", 1, {"acceptance": "coupled"}),
]
_BEAMS = [("none", {}), ("prompt_lookup", {}), ("model", _TREE)]


@pytest.fixture(autouse=True)
def for_a_gpu(monkeypatch):
    """Traces for a GPU, with the options of one graph, and keeps no program: XLA must dump it."""
    for name in ("XLA_FLAGS", "JSPEC_ONE_GRAPH"):
        monkeypatch.delenv(name, raising=False)
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    with kernels.compiling_for("gpu"):
        yield
    jax.config.update("jax_enable_compilation_cache", before)


def make_generator(drafter, folder, batch_size=1, dtype="float32", **options):
    if isinstance(drafter, tuple):
        kind, *names = drafter
        make = {"translated": make_translated, "encoded": make_encoded}[kind]
        return make(*names, batch_size, dtype, **options)
    trees = {name: options.pop(name) for name in tuple(options) if name.startswith("tree_")}
    options = {"batch_size": batch_size, "acceptance": "rejection"} | options
    if drafter == _WITH_HEADS:
        drafter, config = "dflash", tiny_dflash.make_config(meshes.CONFIG, **_HEADS)
        save_dflash(folder, config, tiny_dflash.params(config))
        more = trees or {"draft_confidence": 0.5}
        drafter_options = DrafterOptions(draft_head=str(folder), **more)
    elif drafter == _PARALLEL:
        drafter, layer = "eagle", dataclasses.replace(meshes.CONFIG, vocab_size=80)
        config = EagleConfig(layer, meshes.CONFIG.vocab_size, (0, 1, 2), mask_id=9)
        save_eagle(folder, config, tiny_eagle.params(config=config))
        drafter_options = DrafterOptions(draft_head=str(folder), **trees)
    else:
        drafter_options = meshes.drafter_options(drafter, folder, **trees)
    options["drafter_options"] = drafter_options
    target = meshes.target(num_mtp_layers=int(drafter == "mtp"))
    return meshes.make_generator(drafter, None, cast(target, dtype), **options)


def make_translated(drafter, translation, rows, dtype="float32", **options):
    models = cast(translated_model("bpe"), dtype), cast(translated_model("bytes", 0.01), dtype)
    options = {"acceptance": "rejection", "num_draft_tokens": 4} | options
    drafter_options = DrafterOptions(draft_translation=translation)
    return Generator(
        *models, drafter=drafter, batch_size=rows, drafter_options=drafter_options, **options
    )


def make_encoded(source, drafter, rows, dtype="float32", **options):
    is_sound = source == "sound"
    config = dataclasses.replace(
        tiny_models.CONFIG, family="whisper" if is_sound else "t5", encoder=_ENCODERS[source],
        num_kv_heads=tiny_models.CONFIG.num_heads, max_seq_len=_CAPACITY,
        activation="gelu", tie_embeddings=is_sound,
    )  # fmt: skip
    model = tiny_models.make_model(config, params=tiny_models.peaked_params(config))
    model = cast(model, dtype)
    trees = {name: options.pop(name) for name in tuple(options) if name.startswith("tree_")}
    usual = {} if drafter == "none" else {"num_draft_tokens": 4}
    options = {"acceptance": "rejection", "drafter_options": DrafterOptions(**trees)} | options
    draft = model if "model" in drafter else None
    return Generator(model, draft, drafter=drafter, batch_size=rows, **usual | options)


def compile_rounds(function, generator, state):
    """Returns a program of many rounds, compiled for an H100."""
    device = find_accelerator("h100").devices()[0]
    arguments = generator.params, state, jax.ShapeDtypeStruct((), jnp.int32)
    sharding = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
    )
    return compile_program(function.lower(*placed), "gpu", _QUICK)


def state_of(generator, settings, rows):
    switches = needed_switches([settings])
    return generator.engine.empty_state.eval_shape(rows, _CAPACITY, switches)


def check(program, dtype="float32"):
    """Checks that it is one graph whose loops all wait, and that float32 is multiplied as such."""
    assert program.is_one_graph
    assert program.loops_without_condition == 0
    if dtype == "float32":
        assert imprecise_products(program.text) == []


def imprecise_products(text):
    """Returns the products of an optimised program that XLA may compute with TF32."""
    products = re.findall(r'^.*(?: dot\(|custom_call_target="__cublas).*$', text, re.MULTILINE)
    assert products  # otherwise XLA writes them in another way
    is_exact = r'operand_precision(={highest,highest}|":\["HIGHEST","HIGHEST"\])'
    return [line for line in products if not re.search(is_exact, line)]


def name_of(case):
    values = case.values() if isinstance(case, dict) else case
    return str(case) if isinstance(case, str | int) else "-".join(map(str, values))


@pytest.mark.parametrize(("drafter", "kind", "rows", "options"), _RUNS, ids=name_of)
def test_every_loop_of_a_run_waits_for_its_condition(drafter, kind, rows, options, tmp_path):
    """Each drafter, cascades, trees; 1, 3 and 32 rows; float32 and bfloat16."""
    generator = make_generator(drafter, tmp_path, rows, **options)
    state = state_of(generator, _SETTINGS[kind], rows)
    check(compile_rounds(generator.engine._run, generator, state), options.get("dtype", "float32"))


@pytest.mark.parametrize(("drafter", "options"), _BEAMS, ids=name_of)
def test_every_loop_of_a_search_waits_for_its_condition(drafter, options, tmp_path):
    generator = make_generator(drafter, tmp_path, **options, acceptance="greedy")
    engine, read = generator.engine, state_of(generator, _SETTINGS["greedy"], 1)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    limits = BeamLimits(
        jax.ShapeDtypeStruct(read.stop_ids.shape[1:], jnp.int32),
        number, number.update(dtype=jnp.float32), number,
    )  # fmt: skip
    state = engine.begin_beams.eval_shape(
        read, number.update(shape=(1,)), limits,
        num_beams=3, num_candidates=num_candidates(3, 1), max_steps=_CAPACITY,
    )  # fmt: skip
    check(compile_rounds(engine._search, generator, state))


@pytest.mark.parametrize("is_computed", [False, True])
def test_a_carried_condition_is_seen(is_computed):
    """The negative control, and that the loops' helper is enough."""

    def run(x):
        def body(carry):
            index, x = carry
            is_wanted, grow = jnp.sum(x) > index, lambda x: jnp.cos(x) * 2
            if is_computed:
                return index + 1, kernels.run_if(is_wanted, grow, x)
            once = jax.lax.while_loop(
                lambda carry: carry[0], lambda carry: (jnp.array(False), grow(carry[1])),
                (is_wanted, x),
            )  # fmt: skip
            return index + 1, once[1]

        return jax.lax.while_loop(lambda carry: carry[0] < 5, body, (jnp.float32(0), x))[1]

    sharding = jax.sharding.SingleDeviceSharding(find_accelerator("h100").devices()[0])
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=sharding)
    lowered = jax.jit(run, compiler_options=kernels.run_options()).lower(x)
    program = compile_program(lowered, "gpu")
    assert program.is_one_graph
    assert program.loops_without_condition == (0 if is_computed else 1)


def test_an_imprecise_product_is_seen():
    """The negative control: JAX's default, which lets XLA take TF32 for float32."""
    sharding = jax.sharding.SingleDeviceSharding(find_accelerator("h100").devices()[0])
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)
    texts = [
        compile_program(jax.jit(function).lower(x), "gpu").text
        for function in (lambda x: x @ x, lambda x: jnp.matmul(x, x, precision="highest"))
    ]
    assert [len(imprecise_products(text)) for text in texts] == [1, 0]
