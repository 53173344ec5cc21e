"""Where the arrays of a training run lie: rows over `data`, parameters over `model`.

The programs are those of one device. XLA splits them as their arguments are split, and adds the
sums over devices, of gradients over `data` among them. Each of several processes reads the texts
and packs the same batches, but reads stored states only for its own rows.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.common.errors import InputError
from jspec.kernels import MODEL_AXIS
from jspec.models.sharding import DATA_AXIS, split_spec, spread_config
from jspec.training.packing import Rows
from jspec.weights.hf import read_config
from jspec.weights.resolver import LoadedModel, check_decoder, find_model, load_model
from jspec.weights.shards import put_whole


@dataclasses.dataclass(frozen=True)
class Placement:
    """The places on a mesh; without one all stays on the default device.

    Attributes:
      mesh: the devices, perhaps of several processes.
      fill: adds to rows of texts what was computed before; see `StateStore`.
    """

    mesh: Mesh | None = None
    fill: Callable[[Rows], Rows] = lambda rows: rows

    def load(self, name: str, dtype: str) -> LoadedModel:
        """Returns a model of floats, split as `put` says.

        Heads are never copied, as on a mesh that generates: a copy would be trained apart. Where
        the devices do not divide the model, the host's memory holds the whole model for a while.
        """
        path = None if self.mesh is None else find_model(name)
        if self.mesh is None or (path is not None and path.is_dir() and self._divides(path)):
            loaded = load_model(name, dtype=dtype, quantization="none", mesh=self.mesh)
            check_decoder(loaded, "in training")
            return dataclasses.replace(loaded, mesh=None)  # its programs are those of one device
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            model = load_model(name, dtype=dtype, quantization="none")
        check_decoder(model, "in training")
        return dataclasses.replace(model, params=self.put(model.params))

    def _divides(self, folder: pathlib.Path) -> bool:
        assert self.mesh is not None
        config = read_config(folder)
        try:
            return spread_config(config, self.mesh.shape[MODEL_AXIS]) == config
        except InputError:
            return False

    def check(self, batch_size: int) -> None:
        """Raises an `InputError` where the devices do not divide the rows of a batch."""
        count = 1 if self.mesh is None else self.mesh.shape[DATA_AXIS]
        if batch_size % count:
            raise InputError(f"expected a batch_size that data:{count} divides, got {batch_size}")

    def put(self, params: Any) -> Any:
        """Returns parameters, or an optimiser's state of them, split as a model's are."""
        if self.mesh is None:
            return params
        return jax.tree.map(_put, params, self._of(params))

    def keep(self, params: Any) -> Any:
        """Says in a program that a result is split as `put` splits it."""
        if self.mesh is None:
            return params
        return jax.lax.with_sharding_constraint(params, self._of(params))

    def share(self, values: Any) -> Any:
        """Says in a program that all devices get a result, so that each process can read it."""
        if self.mesh is None:
            return values
        return jax.lax.with_sharding_constraint(values, NamedSharding(self.mesh, PartitionSpec()))

    def put_rows(self, rows: Rows) -> Rows:
        """Returns rows, filled and each on its row of the mesh; a process fills its own alone."""
        if self.mesh is None:
            return self.fill(rows)
        sharding, number = NamedSharding(self.mesh, PartitionSpec(DATA_AXIS)), len(rows.tokens)
        places = sharding.addressable_devices_indices_map((number,)).values()
        spans = [place[0].indices(number) for place in places if place is not None]
        begin, end = min(first for first, _, _ in spans), max(last for _, last, _ in spans)

        def put(local: np.ndarray) -> jax.Array:
            def part(index: Any) -> np.ndarray:  # slices
                first, last, _ = index[0].indices(number)
                return local[first - begin : last - begin]

            return jax.make_array_from_callback((number, *local.shape[1:]), sharding, part)

        return jax.tree.map(put, self.fill(rows.pick(slice(begin, end))))

    def _of(self, params: Any) -> Any:
        assert self.mesh is not None
        mesh = self.mesh

        def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            name = getattr(path[-1], "key", "")
            return NamedSharding(mesh, split_spec(name, leaf.shape, mesh.shape[MODEL_AXIS]))

        return jax.tree_util.tree_map_with_path(of, params)


def _put(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns an array on the mesh; if it has devices of several processes, each puts its parts."""
    if sharding.is_fully_addressable or not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    return put_whole(leaf, sharding)


ON_ONE = Placement()  # device
