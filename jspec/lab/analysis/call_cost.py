"""Least bytes and operations of a model's call, and the rates of a machine."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.common.errors import InputError
from jspec.common.timing import Loop, TurnLoop, least_seconds
from jspec.kernels import timed_products
from jspec.models.config import DecoderConfig
from jspec.models.layers import linear
from jspec.weights.parameter import Parameter
from jspec.weights.quantize import check_kind, is_quantizable, num_bytes
from jspec.weights.tensor_names import parameter_table

_EMBEDDING = ("embedding",)
_WIDTH = 4096  # of the product by which reading is measured


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
