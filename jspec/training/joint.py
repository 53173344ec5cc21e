"""Heads and their target trained together, the second stage of Medusa-2: ANOTHER TARGET comes out.

    loss = KL(original || trained) + heads_weight · (the heads' loss)     arXiv 2401.10774, 2.2.2

The first term is the paper's L_LM by self-distillation (its section 2.3.2): the frozen original's
distribution of every token of its own answers, which keeps the change small. The heads' loss is
that of `heads.make_heads_trainee`, to the distribution of the target as it is by then, without a
gradient through that distribution: a target cannot make itself easier to foretell by what it says
there, only by its hidden states. The paper takes the texts' own tokens for it.

The trained target is `original + target_rate · change`, and the change begins at 0. The steps of
AdamW do not depend on the size of gradients, so the target moves at `target_rate` times the
learning rate of the heads, and weight decay draws it back to the original.

The first stage, heads alone, is a run of its own, with whose heads this one begins: at first heads
have large gradients, which would spoil the target.
"""

import pathlib
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.errors import InputError
from jspec.common.new_folder import new_folder
from jspec.common.typing import Params
from jspec.models.outputs import head_kernel
from jspec.training.chain_loss import chain_loss, report, see_everywhere, weigh
from jspec.training.draft_loss import Sight, compare, masked_mean
from jspec.training.heads import SayFn
from jspec.training.packed import packed_hidden, places_of
from jspec.training.target_states import make_states
from jspec.training.texts import Rows
from jspec.training.trainee import Trainee
from jspec.weights import Tokenizer
from jspec.weights.hf import save_hf
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import used_vocab_size

TARGET = "target"  # the folder of the trained target, beside that of its heads
_HEADS, _CHANGE = "heads", "change"


def make_joint_trainee(
    target: LoadedModel,
    heads: Params,
    say: SayFn,
    save: Callable[[Params, pathlib.Path], None],
    *,
    num_heads: int,
    decay: float,
    heads_weight: float,
    target_rate: float,
) -> Trainee:
    """Returns heads and a target to train; see `make_heads_trainee` for what is not said here.

    Beside the heads' metrics stand, of the next token, `target_kl`, the loss's first term in nats,
    and `target_agreement`, how often the trained target finds the same token best as the original.

    Args:
      target: what the trained target begins as.
      heads: as the first stage left them.
      say: what the heads say.
      save: writes the heads; the target goes beside them, to `TARGET`.
      num_heads: how many there are.
      decay: weight of each head's loss relative to the one before.
      heads_weight: of the heads' loss, the paper's lambda 0.
      target_rate: steps of the target relative to those of the heads.
    """
    shape, vocab_size = target.config, used_vocab_size(target)
    dtype = target.params["embedding"].dtype
    states_of = make_states(target, np.arange(shape.vocab_size), ())

    def loss(params: Params, target_params: Params, rows: Rows) -> tuple[jax.Array, dict]:
        original = jax.lax.stop_gradient(target_params)
        trained = moved(original, params[_CHANGE], target_rate)
        states = states_of(trained, rows)
        of_heads, metrics = chain_loss(
            say(params[_HEADS], trained, states.hidden),
            see_everywhere(jax.lax.stop_gradient(states)),
            num_steps=num_heads,
            decay=decay,
            is_frugal=True,
        )
        found = compare(
            Sight(states.hidden, head_kernel(shape, trained)),
            Sight(packed_hidden(shape, original, rows, dtype), head_kernel(shape, original)),
            jnp.roll(states.tokens, -1, axis=1),
            {"kl": 1.0},
            vocab_size,
        )
        is_scored = jnp.roll(states.is_scored, -1, axis=1) & places_of(rows).has_ahead(1)
        divergence = masked_mean(found.loss, is_scored)
        own = {"target_kl": divergence, "target_agreement": masked_mean(found.agreement, is_scored)}
        return divergence + heads_weight * of_heads, report(metrics) | own

    def evaluate(params: Params, target_params: Params, rows: Rows) -> tuple[dict, jax.Array]:
        return weigh(loss(params, target_params, rows)[1], rows)

    def store(params: Params, folder: pathlib.Path) -> None:
        trained = moved(target.params, params[_CHANGE], target_rate)
        _save_target(folder.parent / TARGET, target, trained)
        save(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params[_HEADS]), folder)

    change = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), target.params)
    return Trainee({_HEADS: heads, _CHANGE: change}, loss, evaluate, store)


def moved(original: Params, change: Params, rate: float) -> Params:
    """Returns `original + rate · change`, rounded as the change is."""

    def move(leaf: jax.Array, by: jax.Array) -> jax.Array:
        return (leaf.astype(jnp.float32) + rate * by.astype(jnp.float32)).astype(by.dtype)

    return jax.tree.map(move, original, change)


def _save_target(folder: pathlib.Path, target: LoadedModel, trained: Params) -> None:
    """Writes the trained target in the original's type, and says loudly what it is.

    One that is there is left: a run that was killed before it wrote the heads made the same.

    Raises:
      InputError: the folder cannot be written.
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


def check_changeable(target: LoadedModel, states: str) -> None:
    """Checks that a target may be trained.

    Args:
      target: the model.
      states: the run's field of that name.

    Raises:
      InputError: it is noise, or what it says is taken from disk.
    """
    if target.is_random:
        raise InputError(
            f"{target.name}: random weights have no distribution that is worth keeping"
        )
    if states:
        raise InputError(
            f"expected no states with train_target, got {states}: what is on disk is what the "
            "target said before it changed"
        )
