"""Weights rounded to 8-bit or 4-bit integers, one kernel at a time; norms and biases stay floats.

Symmetric, to the nearest. "int8": an output's largest weight becomes 127. "int4": integers up to 7
in groups of 32 inputs, each group with a multiplier, up to 18, of its output's scale: 7 · 18 = 126;
embedding and head are int8 even then, for 4 bits of theirs harm the logits most. See
`models.quantized` for how the integers are kept and multiplied.
"""

import functools
import math
from typing import TYPE_CHECKING, Any

from jspec.common.errors import InputError
from jspec.models.config import LlamaConfig
from jspec.weights.rules import Path, Rule, flatten, make_rules, nest

if TYPE_CHECKING:
    import jax

    from jspec.kernels.quantized import QuantizedKernel

KINDS = ("int8", "int4")
_TABLES = ("embedding", "head")
# The kernels, and how many trailing axes are inputs; see `layers.linear`.
_NUM_CONTRACTED = {
    "embedding": 1,
    "head": 1,
    "qkv": 1,
    "out": 3,
    "gate_up": 1,
    "down": 1,
    "fc": 1,
}
_LARGEST_MULTIPLIER = 18
_SCALE_BYTES = 4


def is_quantizable(rule: Rule) -> bool:
    """Returns whether a parameter is a kernel, and no norm or bias."""
    return num_contracted(rule.path) > 0


def num_contracted(path: Path) -> int:
    """Returns how many trailing axes of a parameter are inputs of a product; 0 if it is none's."""
    return _NUM_CONTRACTED.get(path[-1], 0)


def num_bytes(rule: Rule, kind: str | None, float_bytes: int) -> int:
    """Returns how many bytes a parameter takes.

    Args:
      rule: the parameter's.
      kind: how kernels are quantised; None leaves them floats.
      float_bytes: of a float.
    """
    from jspec.kernels.quantized import GROUP

    size = math.prod(rule.shape)
    if kind is None or not is_quantizable(rule):
        return size * float_bytes
    name = rule.path[-1]
    scales = _SCALE_BYTES * size // math.prod(rule.shape[-num_contracted(rule.path) :])
    if kind == "int8" or name in _TABLES:
        return size + scales
    return size // 2 + size // GROUP + scales


def check_kind(config: LlamaConfig, kind: str | None) -> None:
    """Checks that a model can be quantised so; None is no quantisation.

    Raises:
      InputError: no such kind, or a kernel's inputs do not divide into the groups of int4.
    """
    from jspec.kernels.quantized import GROUP

    if kind is not None and kind not in KINDS:
        raise InputError(f"expected the quantization {' or '.join(KINDS)}, got {kind!r}")
    for rule in make_rules(config) if kind == "int4" else ():
        if not is_quantizable(rule) or rule.path[-1] in _TABLES:
            continue
        num_inputs = math.prod(rule.shape[-num_contracted(rule.path) :])
        if num_inputs % GROUP:
            raise InputError(
                f"{'/'.join(rule.path)}: int4 expects inputs in groups of {GROUP}, "
                f"got {num_inputs}; int8 takes any number"
            )


def quantize(kernel: "jax.Array", path: Path, kind: str, dtype: Any) -> "QuantizedKernel":
    """Returns a kernel in integers, computed: the floats can go before the next are made.

    Args:
      kernel: floats, as `layers.linear` takes them.
      path: the parameter's, whose last name tells which axes are inputs, and a table.
      kind: "int8" or "int4"; see `check_kind`.
      dtype: of the model: bfloat16 or float32.
    """
    import jax
    import jax.numpy as jnp

    kind = "int8" if path[-1] in _TABLES else kind
    run = _quantizer()
    return jax.block_until_ready(run(kernel, num_contracted(path), kind, jnp.dtype(dtype)))


def quantize_leaves(leaves: dict[Path, Any], config: LlamaConfig, kind: str) -> dict[Path, Any]:
    """Returns the parameters quantised, taking each out of `leaves` before the next is made.

    So float arrays that nothing else refers to are freed one by one.

    Raises:
      InputError: see `check_kind`.
    """
    check_kind(config, kind)
    dtype = leaves["embedding",].dtype
    quantized = {}
    for rule in make_rules(config):
        leaf = leaves.pop(rule.path)
        quantized[rule.path] = (
            quantize(leaf, rule.path, kind, dtype) if is_quantizable(rule) else leaf
        )
    return quantized


def quantize_params(params: dict[str, Any], config: LlamaConfig, kind: str) -> dict[str, Any]:
    """Returns the parameters with every kernel in integers.

    Args:
      params: float parameters (see `rules.make_rules`); they are left alone.
      config: the model's.
      kind: "int8" or "int4".

    Raises:
      InputError: see `check_kind`.
    """
    return nest(quantize_leaves(flatten(params), config, kind))


def quantize_head_leaf(path: Path, leaf: "jax.Array", dtype: Any) -> Any:
    """Returns a parameter of a head of EAGLE-3, kernels in int8.

    Args:
      path: the parameter's.
      leaf: float32; one read from int8 becomes the same integers again.
      dtype: of what stays floats, and of the products but on CPU without C++.
    """
    if num_contracted(path):
        return quantize(leaf, path, "int8", dtype)
    return leaf.astype(dtype)


def dequantize(kernel: "QuantizedKernel") -> "jax.Array":
    """Returns the float32 array [*out, *in] that a kernel stands for."""
    import jax.numpy as jnp

    from jspec.kernels.quantized import quantized_rows

    ids = jnp.arange(kernel.scales.shape[0], dtype=jnp.int32)
    return quantized_rows(kernel, ids[None])[0].reshape(kernel.shape)


def refuse_quantized(params: dict[str, Any], where: Any) -> None:
    """Checks that parameters about to be written are floats.

    Raises:
      InputError: they are quantised.
    """
    from jspec.kernels.quantized import QuantizedKernel

    if any(isinstance(leaf, QuantizedKernel) for leaf in flatten(params).values()):
        raise InputError(f"{where}: expected float weights to write, got quantised ones")


@functools.cache
def _quantizer() -> Any:
    """Returns the jitted `(kernel, num_contracted, kind, dtype) -> QuantizedKernel`."""
    import jax
    import jax.numpy as jnp

    from jspec.kernels.quantized import QuantizedKernel

    def run(kernel: jax.Array, num_contracted: int, kind: str, dtype: Any) -> QuantizedKernel:
        num_inputs = math.prod(kernel.shape[-num_contracted:])
        weights = kernel.astype(jnp.float32).reshape(-1, num_inputs)
        to_integers = _to_int8 if kind == "int8" else _to_int4
        return QuantizedKernel(*to_integers(weights), kernel.shape, dtype)

    return jax.jit(run, static_argnums=(1, 2, 3))


def _scales(weights: "jax.Array", limit: int) -> "jax.Array":
    """Returns what makes each output's largest weight `limit`, [o]; 1 where all are 0."""
    import jax.numpy as jnp

    largest = jnp.max(jnp.abs(weights), axis=1)
    return jnp.where(largest == 0, 1.0, largest / limit)


def _to_int8(weights: "jax.Array") -> "tuple[jax.Array, jax.Array, None]":
    """Returns values [o i] and scales [o] for weights [o i]."""
    import jax.numpy as jnp

    scales = _scales(weights, 127)
    integers = jnp.clip(jnp.round(weights / scales[:, None]), -127, 127)
    return integers.astype(jnp.int8), scales, None


def _to_int4(weights: "jax.Array") -> "tuple[jax.Array, jax.Array, jax.Array]":
    """Returns packed values [o i/2], scales [o] and multipliers [o i/32] for weights [o i]."""
    import jax
    import jax.numpy as jnp

    from jspec.kernels.quantized import GROUP

    scales = _scales(weights, 7 * _LARGEST_MULTIPLIER)
    groups = (weights / scales[:, None]).reshape(len(weights), -1, GROUP)
    multipliers = jnp.ceil(jnp.max(jnp.abs(groups), axis=2) / 7)
    multipliers = jnp.clip(multipliers, 1, _LARGEST_MULTIPLIER)
    integers = jnp.clip(jnp.round(groups / multipliers[:, :, None]), -7, 7).astype(jnp.int8)
    low, high = jnp.split(integers, 2, axis=2)
    packed = (low & jnp.int8(15)) | (high << jnp.int8(4))
    values = jax.lax.bitcast_convert_type(packed, jnp.uint8).reshape(len(weights), -1)
    return values, scales, multipliers.astype(jnp.int8)
