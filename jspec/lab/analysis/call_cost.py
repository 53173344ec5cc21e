"""Whether a draft model pays for a target, computed from their configs and a machine's two rates.

A call over w tokens a row reads every weight once, whatever w is, and the cache of every row; it
computes with every weight for every token. It takes at least

    seconds = max(bytes / bandwidth, operations / rate)

(the roofline model, doi 10.1145/1498765.1498785). At small w the bytes decide: verifying is nearly
free, and a draft costs its share of the target's bytes, the paper's c (Leviathan et al., arXiv
2211.17192, Def. 3.7). Where w times the batch is large the operations decide, and speculation stops
paying. Launches, norms, sampling and the like come on top of both sides and are left out.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.common.errors import InputError
from jspec.common.timing import Loop, TurnLoop, least_seconds
from jspec.kernels import timed_products
from jspec.lab.analysis.theory import break_even_alpha, walltime_improvement
from jspec.models.config import PRESETS, DecoderConfig
from jspec.models.layers import linear
from jspec.weights.hf import read_config
from jspec.weights.parameter import Parameter
from jspec.weights.published import SMOLLM2
from jspec.weights.quantize import check_kind, is_quantizable, num_bytes
from jspec.weights.tensor_names import parameter_table

_EMBEDDING = ("embedding",)
_WIDTH = 4096  # of the product by which reading is measured

_FIRST_CALL_WIDTH = 2  # a draft model's first call of a round; see `drafters.model`
_FLOAT_BYTES = {"bfloat16": 2, "float32": 4}
_SAME_SHAPE = {SMOLLM2: "smollm2-135m"}


@dataclasses.dataclass(frozen=True)
class CallCost:
    """Bytes and operations of a model's calls.

    Attributes:
      config: its shape, of dense layers; a windowed layer reads no more than its window.
      bytes_per_weight: None for what `quantization` and `float_bytes` say.
      quantization: one of `quantize.KINDS` or None.
      float_bytes: of a float, the cache's among them: 2 for bfloat16, 4 for float32.
    """

    config: DecoderConfig
    bytes_per_weight: float | None = None
    quantization: str | None = None
    float_bytes: int = 2

    def __post_init__(self) -> None:
        if self.config.num_experts:
            raise InputError("a call's cost expects a model without experts")
        check_kind(self.config, self.quantization)

    @functools.cached_property
    def weight_bytes(self) -> float:
        """Bytes of the weights that every call reads."""
        rules = streamed_rules(self.config)
        if self.bytes_per_weight is not None:
            return self.bytes_per_weight * sum(math.prod(rule.shape) for rule in rules)
        return sum(num_bytes(rule, self.quantization, self.float_bytes) for rule in rules)

    @functools.cached_property
    def num_multiplied(self) -> int:
        """Weights that every token is multiplied with: norms and biases are not."""
        rules = filter(is_quantizable, streamed_rules(self.config))
        return sum(math.prod(rule.shape) for rule in rules)

    @property
    def slot_bytes(self) -> int:
        """Bytes that keys and values of one token take in the caches of all layers."""
        return self.config.num_layers * self._layer_slot_bytes

    @property
    def _layer_slot_bytes(self) -> int:
        return 2 * self.config.num_kv_heads * self.config.head_dim * self.float_bytes

    def _num_slots(self, width: int, context: int) -> int:
        """Returns the slots that a row's call reads, summed over the layers."""
        windows = map(self.config.window_of, range(self.config.num_layers))
        # A window holds the token itself, and the call's other tokens count with its width.
        return sum(width + min(context, window or context) for window in windows)

    def call_bytes(self, width: int, *, context: int, batch_size: int = 1) -> float:
        """Returns the bytes that a call on `width` tokens a row, after `context` others, moves."""
        num_slots = batch_size * self._num_slots(width, context)
        return self.weight_bytes + num_slots * self._layer_slot_bytes

    def call_operations(self, width: int, *, context: int, batch_size: int = 1) -> float:
        """Returns the floating-point operations of a call; see `call_bytes`.

        For every token 2 a weight, and in attention, for every head and slot, 2 a dimension for the
        score and 2 for the mean of the values.
        """
        config = self.config
        attended = config.num_heads * config.head_dim * self._num_slots(width, context)
        return batch_size * width * (2 * self.num_multiplied + 4 * attended)


def streamed_rules(config: DecoderConfig) -> list[Parameter]:
    """Returns the parameters that every call of a model reads.

    An input embedding that is not the head as well is left out: only the tokens' rows of it are
    looked up.
    """
    rules = parameter_table(config)
    if config.tie_embeddings:
        return rules
    return [rule for rule in rules if rule.path != _EMBEDDING]


class Machine(NamedTuple):
    """The most a machine does in a second: bytes of weights read, floating-point operations.

    A multiplication and an addition are two.
    """

    bandwidth: float
    flop_rate: float


def measure_machine(dtype: str) -> Machine:
    """Measures the default device, by the products that a model of that dtype consists of."""
    num_bytes, rows, width, *_ = timed_products(dtype)
    outputs = num_bytes // jnp.dtype(dtype).itemsize // _WIDTH
    reading = least_seconds(product_loop(1, _WIDTH, outputs, dtype))
    computing = least_seconds(product_loop(rows, width, width, dtype))
    return Machine(num_bytes / reading, 2 * rows * width**2 / computing)


def product_loop(rows: int, inputs: int, outputs: int, dtype: str) -> Loop:
    """Returns a loop over products of `rows` rows with one kernel, [outputs, inputs]."""
    keys = jax.random.split(jax.random.key(0))
    # Random, because a chip's clock depends on how many bits change.
    kernel = inputs**-0.5 * jax.random.normal(keys[0], [outputs, inputs], dtype)
    # In the type that needs no conversion, which in a model is a part of the norms.
    rows_dtype = timed_products(dtype).rows_dtype
    values = jax.random.normal(keys[1], [1, rows, inputs], rows_dtype)

    def turn(kernel: jax.Array, values: jax.Array) -> jax.Array:
        # The barrier keeps every output, and the next product waits for it.
        outputs = jax.lax.optimization_barrier(linear(values, kernel))
        return values.at[0, 0, 0].set(outputs[0, 0, 0].astype(values.dtype))

    return TurnLoop(turn, kernel, values)


@dataclasses.dataclass(frozen=True)
class PairCost:
    """Least costs of rounds of a draft model and a target, in plain decoding steps.

    `context` are the tokens in each row's caches.
    """

    target: CallCost
    draft: CallCost
    machine: Machine
    context: int = 0
    batch_size: int = 1

    def seconds(self, model: CallCost, width: int) -> float:
        """Returns the least seconds of a call of a model over `width` tokens a row."""
        sizes = {"context": self.context, "batch_size": self.batch_size}
        reading = model.call_bytes(width, **sizes) / self.machine.bandwidth
        return max(reading, model.call_operations(width, **sizes) / self.machine.flop_rate)

    @property
    def plain_seconds(self) -> float:
        """Of a plain decoding step."""
        return self.seconds(self.target, 1)

    @property
    def cost_ratio(self) -> float:
        """The paper's c: a decoding step of the draft."""
        return self.seconds(self.draft, 1) / self.plain_seconds

    def drafting_cost(self, number: int) -> float:
        """Returns what drafting this many tokens costs: a call for each token."""
        if number == 0:
            return 0.0
        first = self.seconds(self.draft, _FIRST_CALL_WIDTH)
        return (first + (number - 1) * self.seconds(self.draft, 1)) / self.plain_seconds

    def verify_cost(self, number: int) -> float:
        """Returns what verifying this many drafts costs."""
        return self.seconds(self.target, number + 1) / self.plain_seconds

    def costs(self, number: int) -> tuple[float, float]:
        """Returns what each of this many drafts costs, and what verifying them costs."""
        return self.drafting_cost(number) / max(number, 1), self.verify_cost(number)

    def improvement(self, alpha: float, number: int) -> float:
        """Returns the speed over plain decoding's (Thm 3.8 with these costs)."""
        return walltime_improvement(alpha, number, *self.costs(number))


def predict_table(predict: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns what to expect of a pair, one row for each number of drafts.

    `predict` has the fields of `experiments.spec.PairSpec`, already checked: `bandwidth` in bytes
    and `flop_rate` in operations a second, None to measure them here.

    Raises:
      InputError: no such model, or models that do not fit.
    """
    dtype, alphas = predict["dtype"], predict["alphas"]
    given = [predict["bandwidth"], predict["flop_rate"]]
    measured = measure_machine(dtype) if None in given else given
    rates = [own if rate is None else rate for rate, own in zip(given, measured, strict=True)]
    target, draft = (_make_cost(predict, side, dtype) for side in ("target", "draft"))
    if size := predict["draft_vocab_size"]:
        draft = dataclasses.replace(draft, config=_with_head(draft.config, size))
    if target.config.vocab_size != draft.config.vocab_size:
        raise InputError(
            f"expected draft and target of one vocabulary, got {draft.config.vocab_size} and "
            f"{target.config.vocab_size} ids"
        )
    pair = PairCost(target, draft, Machine(*rates), predict["context"], predict["batch_size"])
    rows = []
    for number in predict["numbers"]:
        costs = pair.drafting_cost(number), pair.verify_cost(number)
        speeds = [pair.improvement(alpha, number) for alpha in alphas]
        rows.append([number, *costs, break_even_alpha(number, *pair.costs(number)), *speeds])
    names = [f"speed at alpha {alpha:g}" for alpha in alphas]
    return {
        "columns": ["drafts a round", "drafting", "verifying", "break-even alpha", *names],
        "units": ["tokens", "plain steps", "plain steps", "",
                  *["times plain decoding's"] * len(alphas)],
        "rows": rows,
        "notes": _describe(pair, predict),
    }  # fmt: skip


def load_config(name: str) -> DecoderConfig:
    """Returns the config of a preset or a Hugging Face folder; an `InputError` if it is neither."""
    preset = _SAME_SHAPE.get(name, name.removeprefix("random:"))
    if preset in PRESETS:
        return PRESETS[preset]
    folder = pathlib.Path(name)
    if not folder.is_dir():
        raise InputError(f"expected a preset among {', '.join(PRESETS)} or a folder, got {name!r}")
    return read_config(folder)


def _make_cost(predict: Mapping[str, Any], side: str, dtype: str) -> CallCost:
    kind = predict[f"{side}_quantization"]
    return CallCost(
        load_config(predict[side]),
        bytes_per_weight=predict[f"{side}_bytes_per_weight"],
        quantization=None if kind == "none" else kind,
        float_bytes=_FLOAT_BYTES[dtype],
    )


def _with_head(config: DecoderConfig, size: int) -> DecoderConfig:
    """Returns the config of a draft model with a head of its own; see `draft_vocab_size`."""
    if size > config.vocab_size:
        most = config.vocab_size
        raise InputError(f"expected draft_vocab_size of at most {most}, got {size}")
    return dataclasses.replace(config, tie_embeddings=False, head_size=size)


def _describe(pair: PairCost, predict: Mapping[str, Any]) -> list[str]:
    names = "bandwidth", "flop_rate"
    origins = ["measured here" if predict[name] is None else "given" for name in names]
    return [
        f"{side} {predict[side]}: {model.weight_bytes / 1e9:.3g} GB of weights a call, "
        f"{model.slot_bytes / 1e3:.3g} kB of cache a token; "
        f"{pair.seconds(model, 1) * 1e3:.3g} ms a decoding step at least"
        for side, model in (("target", pair.target), ("draft", pair.draft))
    ] + [
        f"machine: {pair.machine.bandwidth / 1e9:.4g} GB/s ({origins[0]}), "
        f"{pair.machine.flop_rate / 1e9:.4g} GFLOP/s ({origins[1]}); context of "
        f"{pair.context} tokens, batch of {pair.batch_size}",
        f"cost ratio c = {pair.cost_ratio:.3f}; plain decoding: at most "
        f"{pair.batch_size / pair.plain_seconds:.4g} tokens/s",
    ]
