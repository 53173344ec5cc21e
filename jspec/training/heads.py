"""Heads on the target's last hidden state as trainees, alone or together with their target.

Alone, the target stays as it is (Medusa-1). Trained together (Medusa-2), ANOTHER TARGET comes out:

    loss = KL(original || trained) + heads_weight · (the heads' loss)     arXiv 2401.10774, 2.2.2

The first term is the paper's L_LM by self-distillation (its section 2.3.2), which keeps the change
small. The heads' loss is the one of heads alone, to the distribution of the target as it is by
then. No gradient flows through that distribution: the target can become easier to predict only
through its hidden states. The paper takes the texts' own tokens instead.

The trained target is `original + target_rate · change`, and the change begins at 0. The steps of
AdamW do not depend on the size of gradients, so the target moves at `target_rate` times the
learning rate of the heads, and weight decay draws it back to the original.

The heads come from a run of their own (the paper's first stage): untrained heads have large
gradients, which would spoil the target.
"""

import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jspec.common.new_folder import new_folder
from jspec.common.typing import Params
from jspec.models.layers import head_kernel
from jspec.training.chain_loss import chain_loss, masked_mean, target_steps
from jspec.training.model_loss import LazyLogits, compare, lazy_logits
from jspec.training.packing import Rows
from jspec.training.target_states import TargetStates, make_states, read_layers
from jspec.training.trainee import Trainee
from jspec.weights import Tokenizer
from jspec.weights.hf import save_hf
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import used_vocab_size

TARGET = "target"  # the folder of the trained target, beside that of its heads
_HEADS, _CHANGE = "heads", "change"


class Heads(NamedTuple):
    """Heads to train.

    Attributes:
      params: before the first step.
      logits: (params, target's parameters, normed last hidden states) -> head's index -> logits.
      save: (params in bfloat16, folder) -> None: writes them.
      num: number of heads.
      decay: weight of each head's loss relative to the one before.
    """

    params: Params
    logits: Callable[
        [Params, Params, Float32[Array, "b t d"]], Callable[[int], Float32[Array, "b t v"]]
    ]
    save: Callable[[Params, pathlib.Path], None]
    num: int
    decay: float

    def loss(
        self, params: Params, target_params: Params, states: TargetStates, rows: Rows
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the cross-entropy to the target's distribution, and metrics.

        Papers take the cross-entropy to the texts' own tokens; this is its mean over the tokens
        that the target might have written there.
        """
        logits = self.logits(params, target_params, states.hidden)
        steps = target_steps(rows, jax.lax.stop_gradient(states))
        return chain_loss(logits, steps, num_steps=self.num, decay=self.decay, is_frugal=True)

    def save_rounded(self, params: Params, folder: pathlib.Path) -> None:
        """Writes the heads in bfloat16."""
        self.save(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), folder)


def make_heads_trainee(target: LoadedModel, heads: Heads) -> Trainee:
    """Returns heads to train on a target that stays as it is."""
    states_of = make_states(target, np.arange(target.config.vocab_size), ())

    def loss(params: Params, target_params: Params, rows: Rows) -> tuple[jax.Array, dict]:
        states = jax.lax.stop_gradient(states_of(target_params, rows))
        return heads.loss(params, target_params, states, rows)

    return Trainee(heads.params, loss, heads.save_rounded, read_layers(target.config, ()))


def make_joint_trainee(
    target: LoadedModel, heads: Heads, *, heads_weight: float, target_rate: float
) -> Trainee:
    """Returns heads and their target to train together; see the module's docstring.

    Besides the heads' metrics there are, of the next token, `target_kl`, the loss's first term in
    nats, and `target_agreement`, how often trained and original target find the same token best.

    Args:
      target: the original; the trained one goes to the folder `TARGET` beside the heads.
      heads: as the first stage trained them.
      heads_weight: of the heads' loss, the paper's lambda 0.
      target_rate: steps of the target relative to those of the heads.
    """
    shape, vocab_size = target.config, used_vocab_size(target)
    dtype = target.params["embedding"].dtype
    states_of = make_states(target, np.arange(shape.vocab_size), ())

    def loss(params: Params, target_params: Params, rows: Rows) -> tuple[jax.Array, dict]:
        original = jax.lax.stop_gradient(target_params)
        trained = move(original, params[_CHANGE], target_rate)
        states = states_of(trained, rows)
        value, metrics = heads.loss(params[_HEADS], trained, states, rows)
        found = compare(
            LazyLogits(states.hidden, head_kernel(shape, trained)),
            lazy_logits(shape, original, rows, dtype),
            jnp.asarray(rows.tokens),
            {"kl": 1.0},
            vocab_size,
        )
        own = {
            "target_kl": masked_mean(found.loss, rows.is_scored(1)),
            "target_agreement": masked_mean(found.agreement, rows.is_scored(1)),
        }
        return own["target_kl"] + heads_weight * value, metrics | own

    def save(params: Params, folder: pathlib.Path) -> None:
        trained = move(target.params, params[_CHANGE], target_rate)
        _save_target(folder.parent / TARGET, target, trained)
        heads.save_rounded(params[_HEADS], folder)

    change = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), target.params)
    return Trainee({_HEADS: heads.params, _CHANGE: change}, loss, save)


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
        stored = jax.tree.map(lambda leaf, own: own.astype(leaf.dtype), target.params, trained)
        with new_folder(folder) as partial:
            save_hf(partial, target.config, stored, tokenizer=target.tokenizer)
            (partial / "README.md").write_text(f"# A changed target\n\n{note}\n", encoding="utf-8")
    print(f"jspec: WARNING: {folder}: {note}", file=sys.stderr, flush=True)
