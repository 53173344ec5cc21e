"""A small Llama as a trainee, which drafts as `--draft=FOLDER --drafter=model`."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jspec.common.errors import InputError, check_among, check_range, say
from jspec.common.typing import Params
from jspec.models import DecoderConfig, init_params
from jspec.models.families.hf_config import from_hf_config, to_hf_config
from jspec.training.config import Trainee, TrainingConfig, cast
from jspec.training.model_loss import LOSSES, boosted_loss, chain_metrics, compare, lazy_logits
from jspec.training.packing import Rows, compute_by_text, take_by_text
from jspec.training.texts import Text
from jspec.weights import Tokenizer
from jspec.weights.hf import save_hf
from jspec.weights.resolver import LoadedModel, load_model
from jspec.weights.vocabulary import shared_vocab_size, used_vocab_size

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
        the positions where they are wrong, and scored together with them; see `boosted_loss`.
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
        check_among("embeddings", self.embeddings, ("own", "copied", "shared"))
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
        if target.is_random:
            raise InputError(f"{target.name}: random weights have nothing to teach")
        config, size = draft_config(self, target.config), used_vocab_size(target)
        weights = {name: weight for name, weight in self.weights.items() if weight}
        outer = ("embedding", "final_norm", *([] if config.tie_embeddings else ["head"]))

        def loss(params: Params, frozen: Params, rows: Rows) -> tuple[jax.Array, dict]:
            whole = {name: frozen[name] for name in outer} | params
            draft_logits = lazy_logits(config, whole, rows, jnp.float32)
            of_target = lazy_logits(target.config, frozen, rows, frozen["embedding"].dtype)
            comparison = compare(draft_logits, of_target, jnp.asarray(rows.tokens), weights, size)
            if rows.is_known is None:
                metrics = chain_metrics(comparison, rows.is_scored(1), self.chain_steps)
                return metrics["losses"][0], metrics
            options = {"known_weight": self.known_weight, "num_steps": self.chain_steps}
            return boosted_loss(
                comparison, rows.is_scored(1), jnp.asarray(rows.is_known), **options
            )

        def save(params: Params, folder: pathlib.Path) -> None:
            assert isinstance(target.tokenizer, Tokenizer)  # only random weights have another kind
            save_hf(folder, config, cast(params, jnp.bfloat16), tokenizer=target.tokenizer)

        first = cast(_first_params(self, config, target, outer), jnp.float32)
        borrowed = {name: target.params[name] for name in outer if name not in first}
        return Trainee(first, target.params, loss, save, borrowed=borrowed)

    def make_fill(
        self, target: LoadedModel, layers: tuple[int, ...], texts: Sequence[Text]
    ) -> Callable[[Rows], Rows]:
        """Returns what marks positions that earlier drafts know, once; see `TrainingConfig`."""
        if self.states or not self.earlier:
            return super().make_fill(target, layers, texts)
        models = [
            target,
            *(load_model(name, dtype=self.dtype, quantization="none") for name in self.earlier),
        ]
        shared_sizes = [shared_vocab_size(target, draft) for draft in models[1:]]

        @jax.jit
        def agreement(params: Sequence[Params], rows: Rows) -> Bool[Array, "r t"]:
            of_target, *of_drafts = (
                lazy_logits(model.config, weights, rows, weights["embedding"].dtype)
                for model, weights in zip(models, params, strict=True)
            )
            is_known = [
                compare(logits, of_target, jnp.asarray(rows.tokens), {"kl": 1.0}, size).agreement
                for logits, size in zip(of_drafts, shared_sizes, strict=True)
            ]
            return jnp.any(jnp.stack(is_known), axis=0)

        run = functools.partial(agreement, [model.params for model in models])
        is_known_by_text = compute_by_text(
            run, texts, seq_len=self.seq_len, batch_size=self.batch_size
        )
        share = np.concatenate([marks[:-1] for marks in is_known_by_text.values()]).mean()
        say(f"earlier drafts agree with the target at {share:.1%} of the texts' positions")
        return lambda rows: rows._replace(is_known=take_by_text(is_known_by_text, rows))


def draft_config(training: DraftModelTraining, target: DecoderConfig) -> DecoderConfig:
    """Returns the shape of a draft model: the target's, where the run does not say otherwise.

    Raises:
      InputError: layers or embeddings of the target that do not fit it, or a config.json that
        cannot hold it.
    """
    sizes = {name: getattr(training, name) or getattr(target, name) for name in _SIZES}
    is_like_target = all(size == getattr(target, name) for name, size in sizes.items())
    layers, number, last = training.init_layers, training.num_layers, target.num_layers - 1
    if list(layers) != sorted(set(layers) & set(range(last + 1))):
        raise InputError(f"expected init_layers rising, from 0 to {last}, got {list(layers)}")
    if layers and not is_like_target:
        raise InputError(f"with init_layers, expected {', '.join(_SIZES)} to be 0 or the target's")
    if layers and number not in (0, len(layers)):
        raise InputError(f"with init_layers, expected num_layers 0 or {len(layers)}, got {number}")
    if not layers and number < 1:
        raise InputError("expected num_layers of at least 1, or init_layers")
    if training.embeddings != "own" and sizes["embed_dim"] != target.embed_dim:
        raise InputError(
            f"{training.embeddings} embeddings need the target's width, {target.embed_dim}; got "
            f"embed_dim {training.embed_dim}"
        )
    head_dim = target.head_dim if is_like_target else sizes["embed_dim"] // sizes["num_heads"]
    # Of noise nothing is of the target's family, whose files may not hold these sizes.
    shape = _chosen_layers(target, layers) if layers else target.as_llama()
    try:
        config = dataclasses.replace(
            shape,
            **sizes,
            num_layers=number or len(layers),
            head_dim=head_dim,
            tie_embeddings=training.embeddings == "own" or target.tie_embeddings,
            qkv_bias=target.qkv_bias and bool(layers),
            out_bias=target.out_bias and bool(layers),
            mlp_bias=target.mlp_bias and bool(layers),
        )
        read_back = from_hf_config(to_hf_config(config))
    except ValueError as error:
        raise InputError(f"no draft model of that shape: {error}") from None
    if read_back != config:
        changed = [
            name for name, value in vars(config).items() if getattr(read_back, name) != value
        ]
        raise InputError(
            f"no draft model of that shape: a {config.family} checkpoint cannot say its "
            + ", ".join(changed)
        )
    return config


def _chosen_layers(target: DecoderConfig, layers: Sequence[int]) -> DecoderConfig:
    """Returns the target's config with the numbers that some of its layers get in a draft."""

    def number(chosen: Sequence[int]) -> tuple[int, ...]:
        return tuple(index for index, layer in enumerate(layers) if layer in chosen)

    windowed = number(target.windowed_layers)
    return dataclasses.replace(
        target,
        window=target.window if windowed else None,
        windowed_layers=windowed,
        unrotated_layers=number(target.unrotated_layers),
        dense_layers=number(target.dense_layers),
        num_mtp_layers=0,
    )


def _first_params(
    training: DraftModelTraining, config: DecoderConfig, target: LoadedModel, outer: Sequence[str]
) -> Params:
    """Returns the parameters that are trained: all, or all but the `outer` ones."""
    first = init_params(config, jax.random.key(training.recipe.seed))
    for index, layer in enumerate(training.init_layers):
        first[f"layers_{index}"] = target.params[f"layers_{layer}"]
    if training.embeddings == "shared":
        return {name: leaf for name, leaf in first.items() if name not in outer}
    theirs = outer if training.embeddings == "copied" else ()
    return first | {name: target.params[name] for name in theirs}
