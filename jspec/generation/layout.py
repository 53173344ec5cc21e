"""Programs over a mesh of devices: every device runs the whole of them on its own shard.

    params    target, draft model: by the table of `models.sharding`        heads: on every device
    state     rows: over `data`      caches of these models: heads over `model`    else: everywhere

Only products of the target join what the devices of a row of the mesh hold. All that follows from
its logits (noise, acceptance, drafts, tables) each of them computes for itself, from equal numbers,
and so to the same bits. Rows of the mesh share nothing: each ends its rounds by itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

from jspec.common.errors import InputError
from jspec.common.memory import Budget, CacheSize, device_name, tree_bytes
from jspec.generation.rows import page_spec, state_specs
from jspec.kernels import MODEL_AXIS, devices_per_memory
from jspec.models.sharding import DATA_AXIS, join_products, parameter_specs
from jspec.sampling.settings import Switches
from jspec.speculation.beam import BeamState
from jspec.speculation.plain import insert
from jspec.speculation.types import ModelParams, SpecState
from jspec.weights.resolver import LoadedModel
from jspec.weights.shards import is_placed, place_everywhere, spread_params

_EVERYWHERE = PartitionSpec()
Results = Callable[[Any, PartitionSpec], Any]  # specs of a state, and of its rows -> of results


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where the arrays of a target's programs lie.

    Attributes:
      mesh: the devices, or None: all is on the default device, and every method changes nothing.
      target: the `PartitionSpec` of each parameter of the target.
      draft: that of each of the drafter's.
    """

    mesh: Mesh | None
    target: Any = _EVERYWHERE
    draft: Any = _EVERYWHERE

    @classmethod
    def of(cls, target: LoadedModel, draft: Any = None) -> Self:
        """Returns the layout of a target's programs; the drafter's parameters may be split."""
        mesh = target.mesh
        if mesh is None:
            return cls(None)
        specs = jax.tree.map(
            lambda leaf: leaf.sharding.spec if is_placed(leaf, mesh) else _EVERYWHERE, draft
        )
        return cls(mesh, parameter_specs(target.params, mesh.shape[MODEL_AXIS]), specs)

    @property
    def shape(self) -> dict[str, int] | None:
        """The devices along each axis of the mesh."""
        return None if self.mesh is None else dict(self.mesh.shape)

    def budget(self, params: ModelParams, cache_size: CacheSize) -> Budget:
        """Returns what the programs run on, and the memory that they take, of all together."""
        name = device_name(1 if self.mesh is None else self.mesh.size)
        return Budget(name, tree_bytes(params), cache_size)

    def spread(
        self, function: Callable[..., Any], results: Results = lambda state, rows: state
    ) -> Any:
        """Returns the function as each device runs it on its shards of the arguments.

        Of these `ModelParams` and states are split as above; the others are the same everywhere.
        """
        if self.mesh is None:
            return function

        def spread(*arguments: Any) -> Any:
            states = (value for value in arguments if isinstance(value, SpecState | BeamState))
            state = next(states, None)
            return jax.shard_map(
                lambda *shards: function(*map(self._joined, shards)),
                mesh=self.mesh,
                in_specs=tuple(map(self._specs, arguments)),
                out_specs=results(self._specs(state), self._rows(state)),
                check_vma=False,  # what is equal on all devices is not declared to be
            )(*arguments)

        return spread

    def program_in(self, traced: Any) -> Any:
        """Returns the jaxpr that each device runs, of a function that was spread and traced."""
        jaxpr = traced.jaxpr.jaxpr
        spread = (eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map")
        return jaxpr if self.mesh is None else next(spread)

    def make(self, function: Callable[[int, int, Switches], SpecState]) -> Any:
        """Returns a function that makes an empty state as each device makes its own shard."""
        mesh = self.mesh
        if mesh is None:
            return function

        def spread(batch_size: int, capacity: int, switches: Switches) -> SpecState:
            make_shard = functools.partial(function, self.own_rows(batch_size), capacity, switches)
            specs = state_specs(jax.eval_shape(make_shard), self._row_axis(batch_size))
            return jax.shard_map(
                make_shard, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False
            )()

        return spread

    def begin_beams(self, read: SpecState, *arguments: Any, **sizes: int) -> BeamState:
        """Returns the state of a beam search; see `BeamState.begin`."""
        begin = functools.partial(BeamState.begin, **sizes)
        shapes = jax.eval_shape(begin, read, *arguments)
        return self.spread(begin, lambda *_: self._specs(shapes))(read, *arguments)

    def insert(self, state: SpecState, row: Int32[Array, ""], prefilled: SpecState) -> SpecState:
        """Replaces a row where it lies; see `plain.insert`."""

        def put(state: SpecState, row: Array, prefilled: SpecState) -> SpecState:
            # On another device the row is one past the last. There the last is replaced by itself.
            place, num_own = place_of(row, state), len(state.last_token)
            take = functools.partial(
                jax.lax.dynamic_slice_in_dim, start_index=place, slice_size=1, axis=0
            )
            row_state = jax.tree.map(
                lambda new, old: jnp.where(place < num_own, new, take(old)), prefilled, state
            )
            return insert(state, place, row_state)

        place_of = self._place_of(state)
        return self.spread(insert if self.mesh is None else put)(state, row, prefilled)

    def at_row(self, function: Callable[[SpecState, Array], SpecState]) -> Any:
        """Returns a function of a state and a row, which drops what falls past the last row."""

        def spread(state: SpecState, row: Array) -> SpecState:
            place_of = self._place_of(state)
            run = self.spread(lambda shard, row: function(shard, place_of(row, shard)))
            return run(state, row)

        return function if self.mesh is None else spread

    def stacked(self, state: Any, rows: PartitionSpec) -> Any:
        """Returns the specs of what `run_rounds` returns, its count made an array [1]."""
        return state, PartitionSpec(None, *rows), rows

    def _place_of(self, state: SpecState) -> Callable[[Array, SpecState], Array]:
        """Returns the function from a row to its place among a device's own rows."""
        if not self._row_axis(len(state.last_token)):
            return lambda row, shard: row

        def place_of(row: Array, shard: SpecState) -> Array:
            num_own = len(shard.last_token)
            place = row - jax.lax.axis_index(DATA_AXIS) * num_own
            return jnp.where((place >= 0) & (place < num_own), place, num_own)

        return place_of

    def own_rows(self, num_rows: int) -> int:
        """Returns how many of a state's rows a device has: all, or those of its row of the mesh."""
        mesh = self.mesh if self._row_axis(num_rows) else None
        return num_rows if mesh is None else num_rows // mesh.shape[DATA_AXIS]

    def _row_axis(self, num_rows: int) -> tuple[str, ...]:
        # A single row, such as a prompt that is read, is on every row of the mesh.
        return (DATA_AXIS,) * (self.mesh is not None and num_rows % self.mesh.shape[DATA_AXIS] == 0)

    def _rows(self, state: Any) -> PartitionSpec:
        if not isinstance(state, SpecState):  # of a search, whose beams change places, or none
            return _EVERYWHERE
        return PartitionSpec(*self._row_axis(len(state.last_token)))

    def _specs(self, argument: Any) -> Any:
        if isinstance(argument, ModelParams):
            return ModelParams(self.target, self.draft)
        if isinstance(argument, SpecState | BeamState):
            return state_specs(argument, tuple(self._rows(argument)))
        return _EVERYWHERE

    def _joined(self, argument: Any) -> Any:
        if self.mesh is None or not isinstance(argument, ModelParams):
            return argument
        count = self.mesh.shape[MODEL_AXIS]
        pairs = zip(argument, (self.target, self.draft), strict=True)
        return ModelParams(*(join_products(params, specs, count) for params, specs in pairs))

    def place(self, tree: Any) -> Any:
        """Returns arrays on every device."""
        return tree if self.mesh is None else place_everywhere(tree, self.mesh)

    @property
    def num_sharing(self) -> int:
        """Number of this process's devices that share one memory."""
        return 1 if self.mesh is None else devices_per_memory()

    def num_bytes(self, argument: SpecState | ModelParams) -> int:
        """Returns the bytes that a state or parameters, or their shapes, take in one memory."""
        return tree_bytes(self.own_shapes(argument)) * self.num_sharing

    def empty_pages(self, shape: Sequence[int], dtype: Any, *, is_split: bool) -> Array:
        """Returns pages of keys or values [p k page h] of one layer, whose heads may be split."""
        where = None if self.mesh is None else NamedSharding(self.mesh, page_spec(is_split))
        return jnp.zeros(shape, dtype, device=where)

    def own_shapes(self, argument: SpecState | ModelParams) -> Any:
        """Returns the shapes of one device's part; without a mesh, the argument itself."""
        if self.mesh is None:
            return argument
        return jax.tree.map(
            lambda leaf: leaf.update(shape=leaf.sharding.shard_shape(leaf.shape), sharding=None),
            self.shapes(argument),
        )

    def shapes(self, argument: Any) -> Any:
        """Returns the shapes of an argument of a program, or of several, as they lie on devices."""
        mesh = self.mesh
        if mesh is None:
            return argument
        if type(argument) is tuple:
            return tuple(map(self.shapes, argument))

        def of(spec: PartitionSpec, part: Any) -> Any:
            sharding = NamedSharding(mesh, spec)
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part
            )

        specs = self._specs(argument)  # one may stand for a whole tree
        return jax.tree.map(
            of, specs, argument, is_leaf=lambda node: isinstance(node, PartitionSpec)
        )


def place_model(model: LoadedModel, mesh: Mesh | None) -> LoadedModel:
    """Returns a draft model split as a target is, or on every device where it cannot be."""
    if mesh is None or model.mesh == mesh:
        return model
    try:
        config, params = spread_params(model.config, model.params, mesh)
    except InputError:  # heads or blocks that the devices do not divide
        return dataclasses.replace(model, params=place_everywhere(model.params, mesh))
    return dataclasses.replace(model, config=config, params=params, mesh=mesh)
