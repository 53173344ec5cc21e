"""Where the arrays of a training run lie: rows over `data`, parameters over `model`.

The programs are those of one device. XLA splits them as their arguments are split, and adds the
sums over devices, of gradients over `data` among them.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.common.errors import InputError
from jspec.kernels import MODEL_AXIS
from jspec.models.sharding import DATA_AXIS, split_spec
from jspec.training.packing import Rows
from jspec.weights.resolver import LoadedModel, load_model


@dataclasses.dataclass(frozen=True)
class Placement:
    """The places on a mesh; without one all stays on the default device."""

    mesh: Mesh | None = None

    def load(self, name: str, dtype: str) -> LoadedModel:
        """Returns a model of floats; it passes the host's memory whole, and is split as `put` says.

        Heads are never copied, as on a mesh that generates: a copy would be trained apart.
        """
        if self.mesh is None:
            return load_model(name, dtype=dtype, quantization="none")
        with jax.default_device(jax.devices("cpu")[0]):
            model = load_model(name, dtype=dtype, quantization="none")
        return dataclasses.replace(model, params=self.put(model.params))

    def check(self, batch_size: int) -> None:
        """Raises an `InputError` where the devices do not divide the rows of a batch."""
        count = 1 if self.mesh is None else self.mesh.shape[DATA_AXIS]
        if batch_size % count:
            raise InputError(f"expected a batch_size that data:{count} divides, got {batch_size}")

    def put(self, params: Any) -> Any:
        """Returns parameters, or an optimiser's state of them, split as a model's are."""
        return params if self.mesh is None else jax.device_put(params, self._of(params))

    def keep(self, params: Any) -> Any:
        """Says in a program that a result is split as `put` splits it."""
        if self.mesh is None:
            return params
        return jax.lax.with_sharding_constraint(params, self._of(params))

    def put_rows(self, rows: Rows) -> Rows:
        """Returns rows, each on its row of the mesh."""
        if self.mesh is None:
            return rows
        return jax.device_put(rows, NamedSharding(self.mesh, PartitionSpec(DATA_AXIS)))

    def _of(self, params: Any) -> Any:
        assert self.mesh is not None
        mesh = self.mesh

        def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            name = getattr(path[-1], "key", "")
            return NamedSharding(mesh, split_spec(name, leaf.shape, mesh.shape[MODEL_AXIS]))

        return jax.tree_util.tree_map_with_path(of, params)


ON_ONE = Placement()  # device
