"""Times the GPU's products of few rows beside XLA's: `python scripts/gpu_products.py FILE.jsonl`.

Shapes are those of Llama 3.2 1B and 3B in bfloat16, with the norm before and the gate or the
residual after. A program multiplies by enough kernels, one after the other, that none is left in
the GPU's cache. A line says microseconds of a product, and GB/s of its kernel's bytes; FILE gets
them with date, versions and hardware. On other devices than a GPU it measures nothing.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common import cli
from jspec.common.errors import InputError
from jspec.common.text_table import format_table
from jspec.common.timing import timed
from jspec.generation.provenance import Recorder
from jspec.kernels.backend import run_options
from jspec.kernels.fused_block import multiply

_SHAPES = {  # outputs, inputs, what comes with it
    "1B gate, up": (16384, 2048, "norm silu"), "1B down": (2048, 8192, "residual"),
    "1B output": (2048, 2048, "residual"), "1B q, k, v": (3072, 2048, "norm"),
    "1B head": (128256, 2048, ""), "3B gate, up": (16384, 3072, "norm silu"),
    "3B down": (3072, 8192, "residual"),
}  # fmt: skip
_ROWS = 1, 5, 16
_BYTES = 4e8  # of kernels: eight times the largest cache
_TURNS, _REPEATS = 12, 5
_EPSILON = 1e-5
_FARTHEST = 0.02  # a result from XLA's, as a share of the largest


def main(path: str | None = None) -> None:
    """Measures, prints a table and writes the record, if there is a path."""
    if jax.default_backend() != "gpu":
        raise InputError(f"expected a GPU that JAX can use; its backend is {jax.default_backend()}")
    lines = [line for name in _SHAPES for rows in _ROWS for line in _measure(name, rows)]
    Recorder(path, {}).save({"lines": lines})
    rows = [[str(cell) for cell in line.values()] for line in lines]
    print(format_table(["", "rows", "by", "µs", "GB/s"], rows))


def _measure(name: str, num_rows: int) -> Iterator[dict[str, Any]]:
    outputs, inputs, parts = _SHAPES[name]
    count = max(1, int(_BYTES / (2 * outputs * inputs)))
    keys = jax.random.split(jax.random.key(0), count + 3)
    rows = jax.random.normal(keys[0], (num_rows, inputs))
    norm = 1 + jax.random.normal(keys[1], (inputs,), jnp.bfloat16) / 8 if "norm" in parts else None
    residual = jax.random.normal(keys[2], (num_rows, outputs)) if "residual" in parts else None
    kernels = [jax.random.normal(key, (outputs, inputs), jnp.bfloat16) / 50 for key in keys[3:]]
    found: dict[str, np.ndarray] = {}
    for by, product in {"jspec": multiply, "XLA": _by_xla}.items():
        run = _run_of(product, "silu" if "silu" in parts else None)
        results = run(rows, norm, residual, kernels)  # compiles
        found[by] = np.asarray(results[-1], np.float32)
        seconds = min(_seconds(run, rows, norm, residual, kernels) for _ in range(_REPEATS)) / count
        figures = {"us": round(1e6 * seconds, 1), "gb_s": round(2e-9 * outputs * inputs / seconds)}
        yield {"name": name, "rows": num_rows, "by": by} | figures
    distance = np.abs(found["jspec"] - found["XLA"]).max() / np.abs(found["XLA"]).max()
    if not distance <= _FARTHEST:
        raise InputError(f"{name}, {num_rows} rows: jspec's result is {distance:.1%} from XLA's")


def _run_of(product: Callable[..., Any], activation: str | None) -> Callable[..., Any]:
    @functools.partial(jax.jit, compiler_options=run_options())
    def run(rows: Any, norm: Any, residual: Any, kernels: list[Any]) -> list[Any]:
        own = functools.partial(product, norm=norm, epsilon=_EPSILON, activation=activation)
        return [own(rows, kernel, residual=residual) for kernel in kernels]

    return run


def _by_xla(
    rows: Any, kernel: Any, *, norm: Any, epsilon: float, activation: str | None, residual: Any
) -> Any:
    if norm is not None:
        squares = jnp.mean(rows * rows, axis=-1, keepdims=True)
        rows = rows * jax.lax.rsqrt(squares + epsilon) * norm.astype(jnp.float32)
    result = jnp.dot(rows.astype(jnp.bfloat16), kernel.T, preferred_element_type=jnp.float32)
    if activation is not None:
        gate, up = jnp.split(result, 2, axis=1)
        result = jax.nn.silu(gate) * up
    return result if residual is None else result + residual


def _seconds(run: Callable[..., Any], *operands: Any) -> float:
    def turns() -> Any:
        return [run(*operands) for _ in range(_TURNS)][-1]

    return timed(turns)[0] / _TURNS


if __name__ == "__main__":
    cli.run_main(main, max_arguments=1)
