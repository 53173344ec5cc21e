"""A head of EAGLE-3 (arXiv 2503.01840) as a trainee."""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.errors import InputError, check_range
from jspec.common.typing import Params
from jspec.drafters.heads.eagle_checkpoint import LoadedHead, load_eagle, save_eagle
from jspec.drafters.heads.eagle_module import EagleConfig, default_feature_layers, init_eagle_params
from jspec.kernels.quantized import QuantizedKernel
from jspec.models import LlamaConfig
from jspec.models.layers import look_up
from jspec.models.outputs import head_kernel
from jspec.training.chain_loss import report, weigh
from jspec.training.eagle_loss import eagle_loss, known_tokens
from jspec.training.target_states import make_states, read_layers
from jspec.training.texts import Rows, Text, most_frequent
from jspec.training.trainee import Trainee
from jspec.training.training import Training
from jspec.weights.quantize import dequantize
from jspec.weights.resolver import LoadedModel

_FROM_THE_END = 2  # the layer of the target that a head begins as: of SmolLM2's 30 the 29th


@dataclasses.dataclass(frozen=True)
class EagleTraining(Training):
    """A training run of a head of EAGLE-3; see `Training`.

    Attributes:
      vocab_size: tokens that the head can propose: the most frequent ones of what it learns from.
      feature_layers: of the target; empty takes a low, a middle and a high one.
      chain_steps: calls of each chain in training.
      chain_decay: weight of each call relative to the one before.
      freeze_head: leave the projection onto the vocabulary as it begins, the target's: cheaper, and
        rare tokens need not be learned from few examples.
      init_head: folder with a head to go on from, whose tokens may be others; empty begins with a
        layer of the target.
    """

    OUTPUT = "head"

    drafter: str = "eagle"
    vocab_size: int = 8192
    feature_layers: tuple[int, ...] = ()
    chain_steps: int = 4
    chain_decay: float = 0.8
    freeze_head: bool = False
    init_head: str = ""

    def make_trainee(self, target: LoadedModel, texts: Sequence[Text]) -> Trainee:
        """Returns the head of the most frequent tokens; see `Training.make_trainee`."""
        check_range("chain_steps", self.chain_steps, 1, 64)
        check_range("vocab_size", self.vocab_size, 1, 10**9)
        size = target.config.vocab_size
        ids = most_frequent(texts, size, min(self.vocab_size, size))
        earlier = self._find_earlier(target.config)
        usual = default_feature_layers(target.config.num_layers)
        layers = tuple(self.feature_layers) or (earlier.config.feature_layers if earlier else usual)
        for layer in layers:
            check_range("feature_layers", layer, 0, target.config.num_layers)
        check_range("chain_decay", self.chain_decay, 0, 10)
        print(f"the head can propose {len(ids)} tokens, {_coverage(texts, ids):.1%} of the texts",
              file=sys.stderr, flush=True)  # fmt: skip
        return make_eagle_trainee(
            target,
            eagle_config(target.config, vocab_size=len(ids), feature_layers=layers),
            ids,
            num_steps=self.chain_steps,
            decay=self.chain_decay,
            seed=self.recipe.seed,
            freeze_head=self.freeze_head,
            earlier=earlier,
        )

    def _find_earlier(self, target: LlamaConfig) -> LoadedHead | None:
        """Returns the head to go on from, if there is one."""
        if not self.init_head:
            return None
        found = load_eagle(pathlib.Path(self.init_head), target, jnp.float32)
        wanted, layers = list(self.feature_layers), list(found.config.feature_layers)
        if wanted and wanted != layers:
            raise InputError(
                f"{self.init_head}: expected a head that reads layers {wanted} (feature_layers), "
                f"found {layers}"
            )
        return found


def _coverage(texts: Sequence[Text], ids: np.ndarray) -> float:
    answers = np.concatenate([np.array(text.answer, int) for text in texts])
    return float(np.isin(answers, ids).mean())


def eagle_config(
    target: LlamaConfig, *, vocab_size: int, feature_layers: tuple[int, ...]
) -> EagleConfig:
    """Returns the shape of a head for a target: its layer is one of the target's.

    Args:
      target: the target.
      vocab_size: tokens that the head can propose.
      feature_layers: see `EagleConfig`.
    """
    layer = dataclasses.replace(target, num_layers=1, vocab_size=vocab_size, tie_embeddings=False)
    return EagleConfig(layer, target.vocab_size, feature_layers, target.num_layers)


def make_eagle_trainee(
    target: LoadedModel,
    config: EagleConfig,
    ids: np.ndarray,
    *,
    num_steps: int,
    decay: float,
    seed: int,
    freeze_head: bool = False,
    earlier: LoadedHead | None = None,
) -> Trainee:
    """Returns a head to train, which begins as a layer of the target on its last features.

    Args:
      target: the frozen target.
      config: the head's.
      ids: tokens that the head can propose, [u].
      num_steps: calls of each chain in training.
      decay: weight of each call relative to the one before.
      seed: of the initial parameters.
      freeze_head: see `EagleTraining`.
      earlier: a head to go on from, float32 or int8.
    """
    states_of = make_states(target, ids, config.feature_layers)
    is_known = known_tokens(config, jnp.asarray(ids))

    def loss(params: Params, target_params: Params, rows: Rows) -> tuple[jax.Array, dict]:
        states = jax.lax.stop_gradient(states_of(target_params, rows))
        if freeze_head:
            params = params | {"head": _frozen(params["head"], "head")}
        value, metrics = eagle_loss(
            params, states, config=config, is_known=is_known, num_steps=num_steps, decay=decay
        )
        return value, report(metrics)

    def evaluate(params: Params, target_params: Params, rows: Rows) -> tuple[dict, jax.Array]:
        return weigh(loss(params, target_params, rows)[1], rows)

    def save(params: Params, folder: pathlib.Path) -> None:
        stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        save_eagle(folder, config, stored | {"ids": jnp.asarray(ids)})

    first = _first_params(target, config, ids, seed)
    if earlier is not None:
        first = _go_on(first, earlier, ids)
    layers = read_layers(target.config, config.feature_layers)
    return Trainee(first, loss, evaluate, save, layers)


def _frozen(params: Params, name: str) -> Params:
    """Returns parameters of which one is not trained."""
    return params | {name: jax.lax.stop_gradient(params[name])}


def _first_params(target: LoadedModel, config: EagleConfig, ids: np.ndarray, seed: int) -> Params:
    """Returns initial parameters: the last feature passes through a late layer of the target.

    What the layer does with the embeddings begins as noise; the target's head reads what comes out.
    """
    params = init_eagle_params(config, jax.random.key(seed))
    width = config.layer.embed_dim
    theirs = target.params
    layer = theirs[f"layers_{max(target.config.num_layers - _FROM_THE_END, 0)}"]
    noise = params["head"]["attention"]["qkv"][..., :width]
    qkv = jnp.concatenate([noise, layer["attention"]["qkv"].astype(jnp.float32)], axis=-1)
    head = {
        "attention": layer["attention"] | {"qkv": qkv},
        "embedding_norm": params["head"]["embedding_norm"],
        "feature_norm": layer["attention_norm"],
        "final_norm": theirs["final_norm"],
        "head": look_up(head_kernel(target.config, theirs), jnp.asarray(ids)[None])[0],
        "mlp": layer["mlp"],
        "mlp_norm": layer["mlp_norm"],
    }
    head = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), head)
    fc = jnp.zeros_like(params["fc"]).at[:, -width:].set(jnp.eye(width))
    return {"fc": fc, "head": head}


def _go_on(first: Params, earlier: LoadedHead, ids: np.ndarray) -> Params:
    """Returns an earlier head's parameters; of tokens that it cannot propose, the first ones."""
    floats = jax.tree.map(_as_floats, earlier.params, is_leaf=_is_quantized)
    rows = floats["head"]["head"]
    places = np.full(earlier.config.target_vocab_size, -1)
    places[np.asarray(floats["ids"])] = np.arange(len(rows))
    own = jnp.asarray(places[ids])
    head = jnp.where(own[:, None] < 0, first["head"]["head"], rows[own])
    params = {"fc": floats["fc"], "head": floats["head"] | {"head": head}}
    if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, first):
        raise InputError(f"{earlier.name}: expected a layer like the target's, found another shape")
    return params


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedKernel)


def _as_floats(leaf: Any) -> jax.Array:
    return dequantize(leaf) if _is_quantized(leaf) else leaf
