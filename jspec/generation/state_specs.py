"""How a state lies on a mesh: its rows over `data`, the heads of its caches over `model`."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from jspec.kernels import MODEL_AXIS
from jspec.models import KVCache
from jspec.models.paged_cache import PagedKVCache


def state_specs(state: Any, rows: tuple[str, ...]) -> Any:
    """Returns the spec of each leaf of a state whose rows are split over these axes, or none."""

    def of(part: Any) -> Any:
        layer = PartitionSpec(*rows)
        if isinstance(part, PagedKVCache):
            layer = page_spec(part.is_split)
        elif isinstance(part, KVCache) and part.is_split:
            layer = PartitionSpec(*(rows or (None,)), MODEL_AXIS)
        return jax.tree.map(lambda leaf: layer if leaf.ndim == 4 else PartitionSpec(*rows), part)

    return jax.tree.map(of, state, is_leaf=lambda part: isinstance(part, KVCache))


def page_spec(is_split: bool) -> PartitionSpec:
    """Returns the spec of a layer's pages, whose heads are split or not.

    Each row of the mesh has room for all of them. All read every prompt, into the same pages; what
    an answer adds is written by the row of the mesh that it is in, and read by no other.
    """
    return PartitionSpec(None, MODEL_AXIS) if is_split else PartitionSpec()
