"""How to train: steps, optimiser, precision, checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from jspec.common.errors import check_among, check_range
from jspec.common.typing import Params
from jspec.training.texts import Rows
from jspec.training.trainee import Trainee

_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
      num_steps: updates.
      learning_rate: of AdamW, after the warm-up; it falls to a tenth along a cosine.
      warmup_steps: updates in which it rises from 0.
      weight_decay: of AdamW.
      max_norm: gradients are scaled down to this norm.
      accumulate: batches of one update.
      compute_dtype: that the parameters are rounded to in each step, "float32" or "bfloat16"; the
        optimiser keeps float32 ones.
      remat: "none" keeps everything that the backward pass needs; "products" keeps the outputs of
        matrix products and computes the rest again: less memory, more time. (On CPU XLA merges
        both computations again, and nothing is saved.)
      log_every: updates between two lines of metrics.
      evaluate_every: updates between two looks at held-out texts, each with a checkpoint.
      patience: looks without a better score before it stops; 0 never stops it.
      keep: latest checkpoints kept, besides the best one.
      seed: of initialisation and order.
    """

    num_steps: int = 1000
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.0
    max_norm: float = 0.5
    accumulate: int = 1
    compute_dtype: str = "float32"
    remat: str = "none"
    log_every: int = 20
    evaluate_every: int = 200
    patience: int = 0
    keep: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "accumulate", "log_every", "evaluate_every", "keep"):
            check_range(name, getattr(self, name), 1, 10**9)
        for name in ("warmup_steps", "patience", "seed"):
            check_range(name, getattr(self, name), 0, 10**9)
        check_range("learning_rate", self.learning_rate, 0, 10)
        check_range("max_norm", self.max_norm, 1e-6, 1e9)
        check_among("compute_dtype", self.compute_dtype, _DTYPES)
        check_among("remat", self.remat, ("none", "products"))

    def optimizer(self) -> optax.GradientTransformation:
        """Returns AdamW with clipped gradients and the schedule."""
        schedule = optax.warmup_cosine_decay_schedule(
            0.0,
            self.learning_rate,
            min(self.warmup_steps, self.num_steps - 1),
            self.num_steps,
            0.1 * self.learning_rate,
        )
        update = optax.chain(
            optax.clip_by_global_norm(self.max_norm),
            optax.adamw(schedule, b2=0.95, weight_decay=self.weight_decay),
        )
        if self.accumulate == 1:
            return update
        return optax.MultiSteps(update, self.accumulate).gradient_transformation()

    def apply_to(self, trainee: Trainee) -> Trainee:
        """Returns the trainee as it is computed: in which type, and what is kept on the way."""

        def rounded(params: Params) -> Params:
            return jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(self.compute_dtype)), params)

        def loss(params: Params, target_params: Params, rows: Rows) -> tuple[jax.Array, dict]:
            return trainee.loss(rounded(params), target_params, rows)

        def evaluate(params: Params, target_params: Params, rows: Rows) -> tuple[dict, jax.Array]:
            return trainee.evaluate(rounded(params), target_params, rows)

        if self.remat == "none":
            return trainee._replace(loss=loss, evaluate=evaluate)
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return trainee._replace(loss=jax.checkpoint(loss, policy=policy), evaluate=evaluate)
