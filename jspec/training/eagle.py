"""A head of EAGLE-3 (arXiv 2503.01840) as a trainee, by training-time test.

A chain of drafts that begins after token i + 1 calls the head on (feature i, token i + 1), and then
on its own output in the feature's place. Step s of all chains is one call here:

    step 0   (f0 t1)  (f1 t2)  (f2 t3) ...     each sees the pairs up to its own
    step 1   (h0 t2)  (h1 t3)  (h2 t4) ...     each sees the pairs that its chain saw at step 0, and
    step 2   (h0 t3)  (h1 t4)  (h2 t5) ...     its own chain's later pairs

The tokens are the text's: a chain matters only as long as its drafts are accepted
(arXiv 2503.01840, section 3.2).
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

from jspec.common.errors import InputError, check_range
from jspec.common.typing import Params
from jspec.drafters.eagle_head import (
    EagleConfig,
    LoadedHead,
    default_feature_layers,
    fuse,
    init_eagle_params,
    load_eagle,
    save_eagle,
)
from jspec.kernels import apply_rope
from jspec.kernels.quantized import QuantizedKernel
from jspec.models import DecoderConfig
from jspec.models.layers import (
    FeedForward,
    RMSNorm,
    head_kernel,
    linear,
    look_up,
    rope_cos_sin,
    scaled,
)
from jspec.training.config import Trainee, TrainingConfig, cast
from jspec.training.heads import Heads, StepLogits, frequent_ids, make_heads_trainee
from jspec.training.packing import Rows, shift_left
from jspec.training.target_states import TargetStates
from jspec.training.texts import Text
from jspec.weights.quantize import dequantize
from jspec.weights.resolver import LoadedModel

_MASKED = -1e30
_FROM_THE_END = 2  # the layer of the target that a head begins as: of SmolLM2's 30 the 29th


@dataclasses.dataclass(frozen=True)
class EagleTraining(TrainingConfig):
    """A training run of a head of EAGLE-3.

    Attributes:
      vocab_size: tokens that the head can propose: the most frequent ones of the texts' answers.
      feature_layers: of the target; empty takes a low, a middle and a high layer.
      chain_steps: calls of each chain in training.
      chain_decay: weight of each call relative to the one before.
      freeze_head: leave the projection onto the vocabulary as it begins, the target's: cheaper, and
        rare tokens need not be learned from few examples.
      hidden_dim: inner width of its feed-forward; 0 takes that of the earlier head or the target.
      init_head: folder with a head to go on from, which may propose other tokens; empty begins with
        a layer of the target.
    """

    drafter: str = "eagle"
    vocab_size: int = 8192
    feature_layers: tuple[int, ...] = ()
    chain_steps: int = 4
    chain_decay: float = 0.8
    freeze_head: bool = False
    hidden_dim: int = 0
    init_head: str = ""

    def make_trainee(self, target: LoadedModel, texts: Sequence[Text]) -> Trainee:
        """Returns a head of the most frequent tokens; its layer is one of the target's in shape."""
        check_range("chain_steps", self.chain_steps, 1, 64)
        check_range("vocab_size", self.vocab_size, 1, 10**9)
        check_range("chain_decay", self.chain_decay, 0, 10)
        check_range("hidden_dim", self.hidden_dim, 0, 10**6)
        shape = target.config
        size, depth = shape.vocab_size, shape.num_layers
        earlier = self._load_earlier(shape)
        usual = earlier.config.feature_layers if earlier else default_feature_layers(depth)
        width = (earlier.config.layer if earlier else shape).hidden_dim
        layers = self.feature_layers or usual
        for layer in layers:
            check_range("feature_layers", layer, 0, depth)
        ids = frequent_ids(texts, size, self.vocab_size)
        layer = dataclasses.replace(
            shape.as_llama(), num_layers=1, vocab_size=len(ids), tie_embeddings=False,
            hidden_dim=self.hidden_dim or width,
        )  # fmt: skip
        config = EagleConfig(layer, size, layers, depth)
        first = _first_params(target, config, ids, self.recipe.seed)
        if earlier is not None:
            first = _go_on(first, earlier, ids)

        steps, decay = self.chain_steps, self.chain_decay

        def logits(params: Params, frozen: Params, states: TargetStates, rows: Rows) -> StepLogits:
            head, outputs = params["head"]["head"], unroll(config, params, rows, states, steps)
            if self.freeze_head:
                head = jax.lax.stop_gradient(head)
            return lambda step: linear(outputs[step], head)

        def save(params: Params, folder: pathlib.Path) -> None:
            stored = cast(params, jnp.bfloat16) | {"ids": jnp.asarray(ids)}
            save_eagle(folder, config, stored)

        heads = Heads(first, logits, save, ids, steps, decay, layers, is_frugal=False)
        return make_heads_trainee(target, heads)

    def _load_earlier(self, target: DecoderConfig) -> LoadedHead | None:
        """Returns the head to go on from, if any."""
        if not self.init_head:
            return None
        head = load_eagle(pathlib.Path(self.init_head), target, jnp.float32)
        shape = head.config
        if shape.has_input_norm or shape.has_output_norm or shape.has_residual_norm:
            raise InputError(
                f"{self.init_head}: expected a head of EAGLE-3 to go on from, found norms of "
                "EAGLE-3.1, which are not trained"
            )
        if shape.mask_id is not None or shape.has_embedding:
            raise InputError(
                f"{self.init_head}: expected a head of EAGLE-3 to go on from, found the mask or "
                "the embedding of a P-EAGLE, which are not trained"
            )
        wanted, layers = list(self.feature_layers), list(head.config.feature_layers)
        if wanted and wanted != layers:
            raise InputError(
                f"{self.init_head}: expected a head that reads layers {wanted} (feature_layers), "
                f"found {layers}"
            )
        return head


def _first_params(target: LoadedModel, config: EagleConfig, ids: np.ndarray, seed: int) -> Params:
    """Returns initial parameters: the last feature passes through a late layer of the target.

    The layer's weights for the embeddings begin as noise; the target's head reads its output.

    Raises:
      InputError: no head can begin as that layer.
    """
    params, theirs = init_eagle_params(config, jax.random.key(seed)), target.params
    number = max(target.config.num_layers - _FROM_THE_END, 0)
    if target.config.is_sparse(number) or target.config.norms == "post":
        is_sparse = target.config.is_sparse(number)
        obstacle = "experts" if is_sparse else "no norms before its halves"
        raise InputError(
            f"{target.name}: an EAGLE head begins as the target's layer {number}, "
            f"which has {obstacle}"
        )
    layer = theirs[f"layers_{number}"]
    width = config.layer.embed_dim
    noise = params["head"]["attention"]["qkv"][..., :width]
    qkv = jnp.concatenate([noise, layer["attention"]["qkv"].astype(jnp.float32)], axis=-1)
    head = {
        "attention": layer["attention"] | {"qkv": qkv},
        "embedding_norm": params["head"]["embedding_norm"],
        "feature_norm": layer["attention_norm"],
        "final_norm": theirs["final_norm"],
        "head": look_up(head_kernel(target.config, theirs), jnp.asarray(ids)[None])[0],
        "mlp": _in_width(params["head"]["mlp"], layer["mlp"]),
        "mlp_norm": layer["mlp_norm"],
    }
    # The head has no separate scale.
    head["head"] = scaled(head["head"], target.config.logits_scale)
    fc = jnp.zeros_like(params["fc"]).at[:, -width:].set(jnp.eye(width))
    # Biases and norms that a head does not have are left out.
    return {"fc": fc, "head": cast(_like(params["head"], head), jnp.float32)}


def _in_width(params: Params, theirs: Params) -> Params:
    """Returns the first units of a feed-forward, and, if there are too few, our noise as others."""

    def fit(noise: jax.Array, leaf: jax.Array) -> jax.Array:
        if leaf.ndim == 1:  # the bias of `down`: all others have the units on axis 1
            return leaf
        return jnp.concatenate([leaf, noise[:, leaf.shape[1] :]], axis=1)[:, : noise.shape[1]]

    return jax.tree.map(fit, params, _like(params, cast(theirs, jnp.float32)))


def _like(wanted: Params, params: Params) -> Params:
    """Returns those parameters that have a counterpart in another tree."""
    if not isinstance(wanted, dict):
        return params
    return {name: _like(leaf, params[name]) for name, leaf in wanted.items()}


def _go_on(first: Params, earlier: LoadedHead, ids: np.ndarray) -> Params:
    """Returns an earlier head's parameters; tokens new to it get those of `first`."""
    floats = jax.tree.map(
        lambda leaf: dequantize(leaf) if isinstance(leaf, QuantizedKernel) else leaf,
        earlier.params,
        is_leaf=lambda leaf: isinstance(leaf, QuantizedKernel),
    )
    rows = floats["head"]["head"]
    row_of = np.full(earlier.config.target_vocab_size, -1)  # of a token in the earlier head
    row_of[np.asarray(floats["ids"])] = np.arange(len(rows))
    earlier_rows = jnp.asarray(row_of[ids])
    head = jnp.where(earlier_rows[:, None] < 0, first["head"]["head"], rows[earlier_rows])
    params = {"fc": floats["fc"], "head": floats["head"] | {"head": head}}
    if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, first):
        raise InputError(
            f"{earlier.name}: expected a layer like the target's, of hidden_dim if that is given, "
            "found another shape"
        )
    return params


def unroll(
    config: EagleConfig,
    params: Params,
    rows: Rows,
    states: TargetStates,
    num_steps: int,
) -> list[Float32[Array, "b t d"]]:
    """Returns the head's outputs, normed, at every position and each of a chain's calls.

    From index i of those of step s the head predicts token i + 2 + s; the last 2 + s positions of a
    text have no meaning.
    """
    mlp, norm = FeedForward(config.layer), RMSNorm(config.layer.norm_epsilon)
    head, visible = params["head"], rows.visible()

    def normed(name: str, inputs: Array) -> Any:
        return norm.apply({"params": head[name]}, inputs)

    hidden = fuse(params, states.features)
    pairs, outputs = [], []
    for step in range(num_steps):
        tokens = shift_left(states.embedded.astype(jnp.float32), 1 + step)
        halves = [normed("embedding_norm", tokens), normed("feature_norm", hidden)]
        inputs = jnp.concatenate(halves, axis=-1)
        positions = jnp.asarray(rows.positions) + step
        queries, *pair = _project(config.layer, head["attention"], inputs, positions)
        pairs.append(pair)
        hidden = hidden + _attend(config.layer, head["attention"], queries, pairs, visible)
        hidden = hidden + mlp.apply({"params": head["mlp"]}, normed("mlp_norm", hidden))  # type: ignore
        outputs.append(normed("final_norm", hidden))
    return outputs


def _project(
    config: DecoderConfig, params: Params, inputs: Float32[Array, "b t i"], positions: Array
) -> tuple[Float32[Array, "b t k g h"], Float32[Array, "b t k h"], Float32[Array, "b t k h"]]:
    """Returns the queries, scaled, the keys and the values of one step."""
    b, t = inputs.shape[:2]
    k, g, h = config.num_kv_heads, config.num_groups, config.head_dim
    qkv = linear(inputs, params["qkv"])
    if config.qkv_bias:
        qkv += params["qkv_bias"]
    rope = rope_cos_sin(config, positions)
    rotated = apply_rope(qkv[:, :, :, : g + 1].reshape(b, t, k * (g + 1), h), *rope)
    rotated = rotated.reshape(b, t, k, g + 1, h)
    return rotated[:, :, :, :g] * h**-0.5, rotated[:, :, :, g], qkv[:, :, :, g + 1]


def _attend(
    config: DecoderConfig,
    params: Params,
    queries: Float32[Array, "b t k g h"],
    pairs: Sequence[Sequence[Float32[Array, "b t k h"]]],
    visible: Bool[Array, "b t t"],
) -> Float32[Array, "b t d"]:
    """Returns the attention to the pairs of step 0 that a position sees and to its chain."""
    # The softmax over both is assembled from its parts, so that no array holds all scores.
    (keys, values), *chain_pairs = pairs
    scores = jnp.einsum("btkgh,bskh->bkgts", queries, keys)
    scores = jnp.where(visible[:, None, None], scores, _MASKED)
    chain_scores = [
        jnp.einsum("btkgh,btkh->bkgt", queries, chain_keys)[..., None]
        for chain_keys, _ in chain_pairs
    ]
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, chain_scores, top))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1)
    mixed = jnp.einsum("bkgts,bskh->btkgh", weights, values)
    for score, (_, chain_values) in zip(chain_scores, chain_pairs, strict=True):
        weight = jnp.exp(score - top)[..., 0]
        total += weight
        mixed += jnp.einsum("bkgt,btkh->btkgh", weight, chain_values)
    mixed /= jnp.einsum("bkgt->btkg", total)[..., None]
    outputs = linear(mixed.reshape(*mixed.shape[:2], -1), params["out"])
    return outputs + params["out_bias"] if config.out_bias else outputs
