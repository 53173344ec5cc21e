"""Heads of Medusa (arXiv 2401.10774) as a trainee, alone (Medusa-1) or with their target.

Trained together (Medusa-2), ANOTHER TARGET comes out:

    loss = KL(original || trained) + heads_weight · (the heads' loss)     section 2.2.2

The first term is the paper's L_LM by self-distillation (its section 2.3.2), which keeps the change
small. The heads' loss is that of heads alone, to the distribution of the target as it is by then.
No gradient flows through it: the target gets easier to predict only through its hidden states.

The trained target is `original + target_rate · change`, and the change begins at 0. The steps of
AdamW do not depend on the size of gradients, so the target moves at `target_rate` times the
learning rate of the heads, and weight decay draws it back to the original.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.errors import InputError, check_range, say
from jspec.common.new_files import new_folder
from jspec.common.typing import Params
from jspec.drafters.medusa import (
    MedusaConfig,
    init_medusa_params,
    load_medusa,
    medusa_logits,
    save_medusa,
)
from jspec.models.layers import head_kernel
from jspec.training.chain_loss import masked_mean
from jspec.training.config import Trainee, TrainingConfig, cast
from jspec.training.heads import Heads, StepLogits, make_heads_trainee
from jspec.training.model_loss import LazyLogits, compare, lazy_logits
from jspec.training.packing import Rows
from jspec.training.target_states import TargetStates, target_states
from jspec.training.texts import Text
from jspec.weights import Tokenizer
from jspec.weights.hf import save_hf
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import used_vocab_size

_TARGET = "target"  # the folder of the trained target, beside that of its heads
_HEADS, _CHANGE = "heads", "change"


@dataclasses.dataclass(frozen=True)
class MedusaTraining(TrainingConfig):
    """A training run of heads of Medusa.

    Attributes:
      num_heads: number of heads, one for each draft of a round.
      num_layers: residual blocks of each head.
      decay: weight of each head's loss relative to the one before.
      init_head: folder with heads of that shape to begin with; empty begins with the target's head.
      train_target: Medusa-2: train the target as well, beginning with heads of the first stage
        (`init_head`). IT BECOMES ANOTHER MODEL, which is written to `target/` beside `head/`.
      heads_weight: of the heads' loss beside the target's, with `train_target`: the paper's lambda
        0; 0.2 is the value of the authors' own recipe, and a fourth that of the next field.
      target_rate: steps of the target relative to those of the heads, with `train_target`.
    """

    drafter: str = "medusa"
    num_heads: int = 4
    num_layers: int = 1
    decay: float = 0.8
    init_head: str = ""
    train_target: bool = False
    heads_weight: float = 0.2
    target_rate: float = 0.25

    def make_trainee(self, target: LoadedModel, texts: Sequence[Text]) -> Trainee:
        """Returns the heads, with the target if that is trained; see `TrainingConfig`."""
        check_range("num_heads", self.num_heads, 1, 64)
        check_range("num_layers", self.num_layers, 1, 64)
        check_range("decay", self.decay, 0, 10)
        shape, ids = target.config, np.arange(target.config.vocab_size)
        config = MedusaConfig(shape.embed_dim, shape.vocab_size, self.num_heads, self.num_layers)

        def logits(params: Params, frozen: Params, states: TargetStates, rows: Rows) -> StepLogits:
            return lambda index: medusa_logits(config, params[f"head_{index}"], states.hidden)

        def save(params: Params, folder: pathlib.Path) -> None:
            name = str(folder.parent / _TARGET) if self.train_target else target.name
            save_medusa(folder, config, cast(params, jnp.bfloat16), shape, base_model=name)

        first = self._first_heads(config, target)
        heads = Heads(first, logits, save, ids, self.num_heads, self.decay)
        return (self._make_joint if self.train_target else make_heads_trainee)(target, heads)

    def _first_heads(self, config: MedusaConfig, target: LoadedModel) -> Params:
        """Returns heads that predict as the target's own does, or those of a folder, in float32."""
        if not self.init_head:
            return init_medusa_params(config, head_kernel(target.config, target.params))  # type: ignore
        heads = load_medusa(pathlib.Path(self.init_head), target.config, jnp.float32)
        if heads.config != config:
            raise InputError(
                f"{self.init_head}: expected num_heads {config.num_heads} and num_layers "
                f"{config.num_layers}, found {heads.config.num_heads} and {heads.config.num_layers}"
            )
        return heads.params

    def _make_joint(self, target: LoadedModel, heads: Heads) -> Trainee:
        """Returns heads and their target to train together; see the module's docstring.

        Its own metrics, of the next token, are `target_kl`, the loss's first term in nats, and
        `target_agreement`, how often trained and original target find the same token best.
        """
        check_range("heads_weight", self.heads_weight, 0, 100)
        check_range("target_rate", self.target_rate, 0, 10)
        if target.is_random:
            raise InputError(f"{target.name}: random weights have no distribution worth keeping")
        if not self.init_head:  # the gradients of untrained heads are large
            raise InputError(
                "train_target expects init_head, the heads of a run without it: untrained ones "
                "would spoil the target"
            )
        shape, vocab_size = target.config, used_vocab_size(target)
        dtype = target.params["embedding"].dtype

        def loss(params: Params, target_params: Params, rows: Rows) -> tuple[jax.Array, dict]:
            original = jax.lax.stop_gradient(target_params)
            trained = move(original, params[_CHANGE], self.target_rate)
            states = target_states(shape, trained, rows, heads.ids, (shape.num_layers,))
            value, metrics = heads.loss(params[_HEADS], trained, states, rows)
            before = lazy_logits(shape, original, rows, dtype)
            after = LazyLogits(states.hidden, head_kernel(shape, trained), shape)
            comparison = compare(after, before, jnp.asarray(rows.tokens), {"kl": 1.0}, vocab_size)
            distance = masked_mean(comparison.loss, rows.is_scored(1))
            agreement = masked_mean(comparison.agreement, rows.is_scored(1))
            metrics |= {"target_kl": distance, "target_agreement": agreement}
            return distance + self.heads_weight * value, metrics

        def save(params: Params, folder: pathlib.Path) -> None:
            trained = move(params[_TARGET], params[_CHANGE], self.target_rate)
            _save_target(folder.parent / _TARGET, target, trained)
            heads.save(params[_HEADS], folder)

        change = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), target.params)
        first, borrowed = {_HEADS: heads.params, _CHANGE: change}, {_TARGET: target.params}
        return Trainee(first, target.params, loss, save, borrowed=borrowed)


def move(original: Params, change: Params, rate: float) -> Params:
    """Returns `original + rate · change`, rounded to the change's type."""

    def move_leaf(leaf: jax.Array, by: jax.Array) -> jax.Array:
        return (leaf.astype(jnp.float32) + rate * by.astype(jnp.float32)).astype(by.dtype)

    return jax.tree.map(move_leaf, original, change)


def _save_target(folder: pathlib.Path, target: LoadedModel, trained: Params) -> None:
    """Writes the trained target in the original's type, with a warning that it is another model.

    A folder that exists is left: a run that was killed before it wrote the heads made the same.
    """
    assert isinstance(target.tokenizer, Tokenizer)  # only random weights have another kind
    note = (
        f"this is ANOTHER MODEL than {target.name}, as which it began: its answers differ. It was "
        "changed by joint training with heads of Medusa (arXiv 2401.10774, section 2.2.2); "
        "metrics.jsonl beside it says how much (target_kl, target_agreement). The heads trained "
        "with it belong to it alone: speculative decoding with them gives the text of this model."
    )
    if not folder.exists():
        stored = jax.tree.map(lambda leaf, value: value.astype(leaf.dtype), target.params, trained)
        with new_folder(folder) as partial:
            save_hf(partial, target.config, stored, tokenizer=target.tokenizer)
            (partial / "README.md").write_text(f"# A changed target\n\n{note}\n", encoding="utf-8")
    say(f"jspec: WARNING: {folder}: {note}")
