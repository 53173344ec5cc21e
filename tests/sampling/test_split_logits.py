"""Draws of 8 devices, each with its part of the logits, against those from all of them."""

from tests.meshes import run_on_devices

_PROGRAM = """
from jspec.kernels import MODEL_AXIS, SplitLogits, first_largest
from jspec.models.sharding import make_mesh
from jspec.sampling.distribution import sample, sampling_probs
from jspec.sampling.settings import SamplingSettings, Switches
from jax.sharding import PartitionSpec
import jax, jax.numpy as jnp, numpy as np

def settings_of(rows, switches):
    columns = zip(*rows)
    kinds = jnp.float32, jnp.int32, jnp.float32, jnp.float32
    return SamplingSettings(*map(jnp.array, columns, kinds), switches=switches)

def split(function, *arguments):
    def own(logits, *others):
        return function(SplitLogits(logits, 8), *others)
    specs = PartitionSpec(None, None, MODEL_AXIS), *[PartitionSpec()] * (len(arguments) - 1)
    mesh = make_mesh("model:8")
    out = {"out_specs": PartitionSpec(), "check_vma": False}
    return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=specs, **out))(*arguments)

def draw(logits, settings, gumbel):
    return sample(sampling_probs(logits, settings), gumbel)

random = np.random.default_rng(0)
logits = np.round(random.normal(size=(6, 40, 1024)) * 4) / 4  # most rows have ties
logits = logits.astype(np.float32)
logits[:, 20:, :128] += 5  # there one device has more of the best than it sends
logits[:, 0, 17], logits[:, 1], logits[:, 2, 3], logits[:, 3, 1:] = np.nan, -np.inf, np.inf, -np.inf
gumbel = random.gumbel(size=logits.shape).astype(np.float32)
outputs = {}
ids, largest = split(first_largest, logits)
expected, same = first_largest(jnp.asarray(logits))
outputs["largest"] = bool((ids == expected).all()) and np.array_equal(largest, same, equal_nan=True)
best = logits == np.max(logits, -1, keepdims=True)
owners = best.reshape(6, 40, 8, 128).any(-1).sum(-1)
outputs["ties"] = int((owners > 1).sum())
# No more tokens than a device has, and more; all; those of a row that draws nothing.
rows = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 1.0, 0.3)]
for name, last, switches in (
    ("plain", 0, Switches()), ("few", 3, Switches(top_k=True, min_p=True)),
    ("many", 100, Switches(top_k=True, min_p=True)), ("top_p", 5, Switches(top_k=True, top_p=True)),
):
    some = [*rows, (2.0, last, 1.0, 0.0), (2.0, 3, 0.7, 0.0)]
    settings = settings_of(some, switches)
    drawn = split(draw, logits, settings, gumbel)
    expected = draw(jnp.asarray(logits), settings, gumbel)
    outputs[name] = int((drawn != expected).sum())
    outputs[name + " kinds"] = len(set(np.asarray(drawn).flat))
report(outputs)
"""


def test_draws_from_parts_are_those_from_all():
    """Ties over devices go to the lowest id; filters keep the same tokens; NaN is no distribution.

    Parts see the same noise. What they draw differs only where two tokens come within rounding.
    """
    actual = run_on_devices(_PROGRAM)
    assert actual["largest"]
    assert actual["ties"] > 20, "there are ties to break"
    for name in ("plain", "few", "many", "top_p"):
        assert actual[name] == 0, name
        assert actual[name + " kinds"] > 50, "draws differ"
