"""A small Llama as a trainee, which drafts as `--draft=FOLDER --drafter=model`."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jspec.common.errors import InputError, check_among, check_range
from jspec.common.typing import Params
from jspec.models import LlamaConfig, init_params
from jspec.training.boosting import boosted_loss, mark_known
from jspec.training.config import TrainingConfig
from jspec.training.model_loss import LOSSES, chain_metrics, compare, lazy_logits
from jspec.training.packing import Rows
from jspec.training.texts import Text
from jspec.training.trainee import Trainee
from jspec.weights import Tokenizer
from jspec.weights.hf import save_hf
from jspec.weights.resolver import LoadedModel, load_model
from jspec.weights.vocabulary import used_vocab_size

EMBEDDINGS = ("own", "copied", "shared")
_SIZES = ("embed_dim", "hidden_dim", "num_heads", "num_kv_heads")


@dataclasses.dataclass(frozen=True)
class DraftModelTraining(TrainingConfig):
    """A training run of a draft model.

    Attributes:
      init_layers: layers of the target that it begins as, in rising order; empty begins from noise.
        With any, it has the target's width.
      embeddings: "own" begins from noise; "copied" begins as the target's embedding, head and final
        norm; "shared" is those, and does not train them. The latter two need the target's width.
      num_layers: 0 for as many as `init_layers`.
      embed_dim: width; 0 for the target's, like the next three.
      hidden_dim: width of the feed-forward layers.
      num_heads: query heads.
      num_kv_heads: key and value heads.
      cross_entropy_weight: of the loss of that name in the sum; see `model_loss`.
      kl_weight: likewise.
      total_variation_weight: likewise.
      chain_steps: drafts of a round, for the score.
      earlier: draft models trained before, as `load_model` takes them. This one is then trained on
        the positions where they are wrong, and scored together with them; see `boosting`.
      known_weight: of positions where one of them agrees with the target, from 0, which leaves them
        out, to 1. Above 0 this one stays better at going on from its own drafts.
    """

    OUTPUT = "draft"

    drafter: str = "draft_model"
    init_layers: tuple[int, ...] = ()
    embeddings: str = "own"
    num_layers: int = 0
    embed_dim: int = 0
    hidden_dim: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    cross_entropy_weight: float = 0.0
    kl_weight: float = 1.0
    total_variation_weight: float = 0.0
    chain_steps: int = 4
    earlier: tuple[str, ...] = ()
    known_weight: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_among("embeddings", self.embeddings, EMBEDDINGS)
        check_range("chain_steps", self.chain_steps, 1, 64)
        check_range("known_weight", self.known_weight, 0, 1)
        if self.known_weight and not self.earlier:
            raise InputError("known_weight is about earlier drafts: expected some in earlier")
        if min(self.weights.values()) < 0 or not any(self.weights.values()):
            raise InputError(
                "expected weights of losses of at least 0, one of them above, got "
                + ", ".join(f"{name} {weight:g}" for name, weight in self.weights.items())
            )

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the losses by name."""
        return {name: getattr(self, f"{name}_weight") for name in LOSSES}

    def make_trainee(self, target: LoadedModel, texts: Sequence[Text]) -> Trainee:
        """Returns the draft model; see `TrainingConfig`."""
        del texts
        if target.is_random:
            raise InputError(f"{target.name}: random weights have nothing to teach")
        return _make_draft_trainee(self, draft_config(self, target.config), target)

    def make_fill(
        self, target: LoadedModel, trainee: Trainee, texts: Sequence[Text]
    ) -> Callable[[Rows], Rows]:
        """Returns what marks the positions that earlier drafts know; see `TrainingConfig`.

        Raises:
          InputError: an earlier draft cannot be loaded, or does not fit the target.
        """
        if self.states or not self.earlier:
            return super().make_fill(target, trainee, texts)
        earlier = [load_model(name, dtype=self.dtype) for name in self.earlier]
        sizes = {"seq_len": self.seq_len, "batch_size": self.batch_size}
        return mark_known(target, earlier, texts, **sizes)


def draft_config(training: DraftModelTraining, target: LlamaConfig) -> LlamaConfig:
    """Returns the shape of a draft model: the target's, where the run does not say otherwise.

    Raises:
      InputError: layers or embeddings of the target that do not fit it.
    """
    sizes = {name: getattr(training, name) or getattr(target, name) for name in _SIZES}
    is_like_target = all(size == getattr(target, name) for name, size in sizes.items())
    _check_beginning(training, target, is_like_target)
    head_dim = target.head_dim if is_like_target else sizes["embed_dim"] // sizes["num_heads"]
    try:
        return dataclasses.replace(
            target,
            **sizes,
            num_layers=training.num_layers or len(training.init_layers),
            head_dim=head_dim,
            tie_embeddings=training.embeddings == "own" or target.tie_embeddings,
            attention_bias=target.attention_bias and bool(training.init_layers),
            mlp_bias=target.mlp_bias and bool(training.init_layers),
        )
    except ValueError as error:
        raise InputError(f"no draft model of that shape: {error}") from None


def _check_beginning(
    training: DraftModelTraining, target: LlamaConfig, is_like_target: bool
) -> None:
    """Checks that what the draft begins as fits its shape."""
    layers, number = training.init_layers, training.num_layers
    last = target.num_layers - 1
    if list(layers) != sorted(set(layers) & set(range(last + 1))):
        raise InputError(f"expected init_layers rising, from 0 to {last}, got {list(layers)}")
    if layers and not is_like_target:
        raise InputError(f"with init_layers, expected {', '.join(_SIZES)} to be 0 or the target's")
    if layers and number not in (0, len(layers)):
        raise InputError(f"with init_layers, expected num_layers 0 or {len(layers)}, got {number}")
    if not layers and number < 1:
        raise InputError("expected num_layers of at least 1, or init_layers")
    if training.embeddings != "own" and training.embed_dim not in (0, target.embed_dim):
        raise InputError(
            f"{training.embeddings} embeddings need the target's width, {target.embed_dim}; got "
            f"embed_dim {training.embed_dim}"
        )


def _make_draft_trainee(
    training: DraftModelTraining, config: LlamaConfig, target: LoadedModel
) -> Trainee:
    """Returns a draft model of a shape to train."""
    vocab_size, steps = used_vocab_size(target), training.chain_steps
    dtype = target.params["embedding"].dtype
    weights = {name: weight for name, weight in training.weights.items() if weight}
    outer = ("embedding", "final_norm", *([] if config.tie_embeddings else ["head"]))
    first = init_params(config, jax.random.key(training.recipe.seed))
    for index, layer in enumerate(training.init_layers):
        first[f"layers_{index}"] = target.params[f"layers_{layer}"]
    if training.embeddings == "shared":
        first = {name: leaf for name, leaf in first.items() if name not in outer}
    elif training.embeddings == "copied":
        first |= {name: target.params[name] for name in outer}

    def whole(params: Params, target_params: Params) -> Params:
        """Returns the draft model's parameters: those trained and those shared."""
        return {name: target_params[name] for name in outer} | params

    def loss(params: Params, target_params: Params, rows: Rows) -> tuple[jax.Array, dict]:
        frozen = jax.lax.stop_gradient(target_params)
        found = compare(
            lazy_logits(config, whole(params, target_params), rows, jnp.float32),
            lazy_logits(target.config, frozen, rows, dtype),
            jnp.asarray(rows.tokens),
            weights,
            vocab_size,
        )
        if rows.is_known is None:
            metrics = chain_metrics(found, rows.is_scored(1), steps)
            return metrics["losses"][0], metrics
        known, weight = jnp.asarray(rows.is_known), training.known_weight
        return boosted_loss(found, rows.is_scored(1), known, known_weight=weight, num_steps=steps)

    def save(params: Params, folder: pathlib.Path) -> None:
        assert isinstance(target.tokenizer, Tokenizer)  # only random weights have another kind
        stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), whole(params, target.params))
        save_hf(folder, config, stored, tokenizer=target.tokenizer)

    floats = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), first)
    return Trainee(floats, loss, save)
