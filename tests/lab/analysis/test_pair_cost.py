"""Will it pay? On machines made up, and of pairs known; and the rates of this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.kernels.device import TimedProducts
from jspec.lab.analysis import call_cost
from jspec.lab.analysis.call_cost import CallCost, Machine, PairCost, load_config, predict_table
from jspec.lab.analysis.theory import break_even_alpha
from jspec.models.config import PRESETS
from tests.tiny_models import CONFIG, save_folder

H200 = Machine(bandwidth=4.8e12, flop_rate=9.9e14)
PREDICT = {
    "target": "llama3.2-3b", "draft": "llama3.2-1b",
    "target_bytes_per_weight": None, "target_quantization": "none",
    "draft_bytes_per_weight": None, "draft_quantization": "none", "draft_vocab_size": 0,
    "bandwidth": 4.8e12, "flop_rate": 9.9e14, "context": 0, "batch_size": 1,
    "dtype": "bfloat16", "alphas": (0.5, 0.7, 0.9), "numbers": (0, 1, 2, 4, 8),
}  # fmt: skip


def pair(target="llama3.2-3b", **options):
    return PairCost(*(CallCost(PRESETS[name]) for name in (target, "llama3.2-1b")), H200, **options)


@pytest.mark.parametrize(
    ("target", "expected", "roof"), [("llama3.2-3b", 0.385, 747), ("llama3.1-8b", 0.165, 320)]
)
def test_costs_are_those_of_the_bytes(target, expected, roof):
    """By hand, from the numbers of parameters; tokens a second at 4.8 TB/s in bfloat16.

    E.g. 4.8e12 / (2 · 3.2127e9) = 747.
    """
    costs = pair(target)
    assert costs.cost_ratio == pytest.approx(expected, abs=0.004)
    assert 1 / costs.plain_seconds == pytest.approx(roof, rel=1e-3)


def test_drafting_is_a_call_each():
    """The first over two tokens; at one stream a verify call costs hardly more than a step."""
    costs = pair()
    assert costs.drafting_cost(0) == 0
    assert costs.drafting_cost(4) == pytest.approx(4 * costs.cost_ratio, rel=1e-3)
    assert 1 < costs.verify_cost(4) < 1.001
    assert costs.improvement(0.7, 0) == pytest.approx(1)
    assert costs.improvement(0.7, 2) == pytest.approx(2.19 / (2 * 0.3847 + 1), rel=1e-3)
    assert break_even_alpha(1, *costs.costs(1)) == pytest.approx(costs.cost_ratio, abs=1e-3)


def cost_ratio(**options):
    """Returns the ratio that the table's note tells."""
    (note,) = [n for n in predict_table(PREDICT | options)["notes"] if n.startswith("cost ratio")]
    return float(note.split("c = ")[1].split(";")[0])


def test_a_smaller_head_of_the_draft_is_cheaper():
    """By hand: 128,256 - 32,000 rows of 2,048 floats of bfloat16 less; no more than there are."""
    less = 2 * (128_256 - 32_000) * 2_048 / pair().target.weight_bytes
    actual = cost_ratio() - cost_ratio(draft_vocab_size=32_000)
    assert actual == pytest.approx(less, abs=0.001)
    with pytest.raises(InputError, match="draft_vocab_size of at most 128256, got 200000"):
        predict_table(PREDICT | {"draft_vocab_size": 200_000})
    with pytest.raises(InputError, match=r"^expected draft and target of one vocabulary[^\n]*$"):
        predict_table(PREDICT | {"draft": "smollm2-135m"})


def test_where_operations_decide_speculation_stops_paying():
    """A batch of 512: a verify call of 5 tokens costs 5 steps, and what was gained is lost."""
    costs = pair(batch_size=512)
    assert costs.verify_cost(4) == pytest.approx(5, rel=0.01)
    assert costs.improvement(0.9, 4) < 1
    assert break_even_alpha(4, *costs.costs(4)) is None
    assert costs.improvement(0.9, 4) < pair(batch_size=8).improvement(0.9, 4)


def test_the_table_says_whether_it_pays():
    """One row a number."""
    table = predict_table(PREDICT)
    assert [row[0] for row in table["rows"]] == [0, 1, 2, 4, 8]
    assert max(row[5] for row in table["rows"]) == pytest.approx(pair().improvement(0.7, 2))
    assert "c = 0.385" in "\n".join(table["notes"])
    slow = predict_table(PREDICT | {"batch_size": 512, "numbers": (4,)})
    assert slow["rows"][0][3] is None


def test_bytes_a_weight_or_a_quantization():
    """Half the bytes, half the cost; int8 a little over it, for its scales."""
    half = pytest.approx(cost_ratio() / 2, abs=0.002)
    assert cost_ratio(draft_bytes_per_weight=1.0) == half
    assert cost_ratio(draft_quantization="int8") == half
    assert cost_ratio(draft_quantization="int4") == pytest.approx(0.12, abs=0.01)
    assert cost_ratio(dtype="float32") == cost_ratio()


def test_what_is_not_given_is_measured(monkeypatch):
    """Only what is not given; and the note says which."""
    monkeypatch.setattr(call_cost, "measure_machine", lambda dtype: Machine(1e10, 1e11))
    notes = "\n".join(predict_table(PREDICT | {"bandwidth": None})["notes"])
    assert "10 GB/s (measured here), 9.9e+05 GFLOP/s (given)" in notes
    monkeypatch.setattr(call_cost, "measure_machine", lambda dtype: 1 / 0)
    predict_table(PREDICT)


def test_models_by_name(tmp_path):
    """Presets, the default target's name, and a folder without a look at its weights."""
    assert load_config("llama3.2-1b") == PRESETS["llama3.2-1b"]
    assert load_config("smollm2-135m-instruct") == PRESETS["smollm2-135m"]
    assert load_config("random:llama3.2-1b") == PRESETS["llama3.2-1b"]
    folder = save_folder(tmp_path / "model")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert load_config(str(folder)).embed_dim == CONFIG.embed_dim
    with pytest.raises(InputError, match=r"expected a preset among llama3.2-1b, .* got 'gpt-2'"):
        load_config("gpt-2")


def test_rates_are_bytes_and_operations_over_seconds(monkeypatch):
    """Guards against half the operations, or bytes of another type."""
    calls = []

    def product_loop(rows, inputs, outputs, dtype):
        calls.append((rows, inputs, outputs, dtype))

    monkeypatch.setattr(call_cost, "product_loop", product_loop)
    monkeypatch.setattr(call_cost, "least_seconds", lambda loop: 0.5)
    sizes = TimedProducts(1 << 20, 64, 128, "float32")
    monkeypatch.setattr(call_cost, "timed_products", lambda dtype: sizes)
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        actual = call_cost.measure_machine(dtype)
        (rows, inputs, outputs, _), product = calls[-2:]
        assert (rows, inputs * outputs * size) == (1, 1 << 20)
        assert product == (64, 128, 128, dtype)
        assert actual == (2 * (1 << 20), 2 * 2 * 64 * 128 * 128)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_turn_is_a_product_with_the_whole_kernel(monkeypatch, dtype):
    """Guards against another product than the one whose bytes and operations are counted."""
    kernels, counts = [], []

    def linear(values, kernel):
        kernels.append((kernel.shape, kernel.dtype.name))
        product = jnp.einsum("bti,oi->bto", values.astype(kernel.dtype), kernel)
        jax.debug.callback(lambda _: counts.append(product.shape), product.sum())
        return product.astype(jnp.float32)

    monkeypatch.setattr(call_cost, "linear", linear)
    loop = call_cost.product_loop(3, 8, 16, dtype)
    values = np.asarray(loop(jnp.int32(4)).astype(jnp.float32))
    jax.effects_barrier()
    assert counts == [(1, 3, 16)] * 4
    assert set(kernels) == {((16, 8), dtype)}
    assert np.isfinite(values).all()
    after = np.asarray(loop(jnp.int32(1)).astype(jnp.float32))
    assert (after != values).sum() == 1  # each product waits for the one before
