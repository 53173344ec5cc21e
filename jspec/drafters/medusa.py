"""Heads on the target's last hidden state propose (Medusa, arXiv 2401.10774): a chain or a tree.

    target   | ... tn-1  tn | last |          `last` came from the hidden state at tn
    heads    |           tn | head 0: d1 | head 1: d2 | head 2: d3

Head i was trained for the token i + 2 positions after the one whose hidden state it reads: residual
blocks x + silu(W x + b) on the normed output of the last layer, and its own head over the
vocabulary. It does not depend on earlier drafts, and is drawn like any other draft.

With `tree_depth` every head's best tokens are combined with those of the heads before, in a tree of
one shape: that which promises the most by how often a head's token of each rank is kept
(section 2.3.3). `scripts/medusa_rates.py` measures these shares on calibration texts.

A folder holds, as published ones do,

```
  config.json                medusa_num_heads, medusa_num_layers
  medusa_lm_head.safetensors
    {i}.{j}.linear.weight    [D, D]   residual block j of head i
    {i}.{j}.linear.bias      [D]
    {i}.{n}.weight           [V, D]   its head; n is the number of its blocks
  medusa_rates.json          {"rates": [[rank 0, rank 1, ...] of head 0, ...]}, if measured
```
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json, save_json
from jspec.common.typing import Params, RowCounts, RowTokens
from jspec.drafters.chain import ChainDrafter
from jspec.drafters.head_folder import HeadFormat, HeadSizes, load_head, save_head
from jspec.drafters.memory import ReadingLastOutput
from jspec.drafters.spec import BuiltDrafter, DrafterSpec, certain_tree_shape
from jspec.drafters.trees import best_static_tree, propose_grown
from jspec.models.config import DecoderConfig
from jspec.models.layers import linear
from jspec.sampling.distribution import best_tokens
from jspec.speculation.acceptance.tree import best_tree
from jspec.speculation.types import Kind, Proposal, RoundInputs
from jspec.weights.parameter import Parameter, one_tensor

_KEYS = {"num_heads": "medusa_num_heads", "num_layers": "medusa_num_layers"}


@dataclasses.dataclass(frozen=True)
class MedusaConfig(HeadSizes):
    """The shape of the heads.

    Attributes:
      embed_dim: width of the target's residual stream.
      vocab_size: of the target.
      num_heads: how many there are.
      num_layers: residual blocks of each head.
    """

    embed_dim: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1


def medusa_logits(
    config: MedusaConfig, params: Params, hidden: Float[Array, "b t d"]
) -> Float32[Array, "b t v"]:
    """Returns one head's logits from the target's last hidden states, normed."""
    # Residual sums in float32, whatever the weights' type.
    x = hidden.astype(jnp.float32)
    for layer in range(config.num_layers):
        block = params[f"layer_{layer}"]
        x = x + jax.nn.silu(linear(x, block["kernel"]) + block["bias"].astype(jnp.float32))
    return linear(x, params["head"])


def init_medusa_params(config: MedusaConfig, head: Float[Array, "v d"]) -> dict[str, Any]:
    """Returns heads that all predict what the target's own head predicts of the next token.

    They are `head_0`, `head_1`, ..., each with `layer_0`, ... (`kernel` [d d], `bias` [d]), which
    add nothing and are free to learn, and `head` [v d], the target's own; float32.
    """
    d = config.embed_dim

    def one_head() -> dict[str, Any]:
        blocks = {
            f"layer_{layer}": {"kernel": jnp.zeros([d, d]), "bias": jnp.zeros([d])}
            for layer in range(config.num_layers)
        }
        # Each head has its own vocabulary matrix, which begins as the target's.
        return blocks | {"head": head.astype(jnp.float32)}

    return {f"head_{index}": one_head() for index in range(config.num_heads)}


def medusa_rules(config: MedusaConfig) -> list[Parameter]:
    """Returns the table from the heads' tensors to their parameters."""
    d, rules = config.embed_dim, []
    for index in range(config.num_heads):
        head = f"head_{index}"
        for layer in range(config.num_layers):
            block, name = (head, f"layer_{layer}"), f"{index}.{layer}.linear"
            rules.append(one_tensor((*block, "kernel"), f"{name}.weight", (d, d)))
            rules.append(one_tensor((*block, "bias"), f"{name}.bias", (d,)))
        name = f"{index}.{config.num_layers}.weight"
        rules.append(one_tensor((head, "head"), name, (config.vocab_size, d)))
    return rules


def _read_config(
    raw: dict[str, Any], target: DecoderConfig, tensors: Mapping[str, np.ndarray]
) -> MedusaConfig:
    num_heads, num_layers = raw[_KEYS["num_heads"]], raw.get(_KEYS["num_layers"], 1)
    if type(num_heads) is int:
        # Published folders may hold more heads than their config.json says: all are taken.
        num_heads = max(num_heads, len({name.partition(".")[0] for name in tensors}))
    return MedusaConfig(target.embed_dim, target.vocab_size, num_heads, num_layers)


def _sizes(config: MedusaConfig, tensors: Mapping[str, np.ndarray]) -> list[tuple[str, Any, int]]:
    # What the first head's own shape says of the target, if it is there.
    head = tensors.get(f"0.{config.num_layers}.weight")
    if head is None or head.ndim != 2:
        return []
    vocab_size, width = head.shape
    return [("width", width, config.embed_dim), ("vocabulary", vocab_size, config.vocab_size)]


_FORMAT = HeadFormat(
    what="heads of Medusa",
    file="medusa_lm_head.safetensors",
    architecture="MedusaModel",
    keys=_KEYS,
    read_config=_read_config,
    rules=medusa_rules,
    sizes=_sizes,
)
load_medusa = functools.partial(load_head, _FORMAT)
save_medusa = functools.partial(save_head, _FORMAT)


Rates = tuple[tuple[float, ...], ...]

FILE = "medusa_rates.json"
NUM_RANKS = 16  # the most that `tree_branches` may ask for
# Without a file: what rank 0 of a head is kept, less for each head, and what each rank is of that.
_FIRST, _NEXT_HEAD, _NEXT_RANK = 0.5, 0.7, 0.35


def read_rates(folder: pathlib.Path, num_heads: int) -> Rates:
    """Returns the rates of a folder's heads; assumed ones where it has none.

    Raises:
      InputError: the file holds something else, or rates of another number of heads.
    """
    path = folder / FILE
    if not path.exists():
        first = [_FIRST * _NEXT_HEAD**head for head in range(num_heads)]
        return tuple(tuple(rate * _NEXT_RANK**rank for rank in range(NUM_RANKS)) for rate in first)
    raw = read_json(path)
    rates: Rates = ()
    with contextlib.suppress(KeyError, TypeError, ValueError):  # which leaves no rates
        rates = tuple(tuple(map(float, of_head)) for of_head in raw["rates"])
    is_good = [of_head and min(of_head) >= 0 and sum(of_head) <= 1.001 for of_head in rates]
    # A later head may never have been right; without the first there is no tree.
    if len(rates) != num_heads or not all(is_good) or not any(next(iter(rates), ())):
        raise InputError(f"{path}: expected rates of {num_heads} heads, of 0 to 1 by rank")
    return rates


def save_rates(folder: pathlib.Path, rates: Sequence[Sequence[float]]) -> pathlib.Path:
    """Writes the rates beside the heads; returns the file.

    Raises:
      InputError: it cannot be written.
    """
    path = folder / FILE
    save_json(path, {"rates": np.round(np.asarray(rates, float), 5).tolist()})
    return path


@dataclasses.dataclass(frozen=True)
class MedusaDrafter(ReadingLastOutput, ChainDrafter):
    """Proposes a chain to which every head adds one token, or a tree of the heads' best tokens.

    Attributes:
      config: of the heads, of which there are at least as many as drafts.
      target: the target's shape.
      rates: of trees: how often the tokens of each rank are kept, by head.
    """

    config: MedusaConfig = dataclasses.field(kw_only=True)
    target: DecoderConfig = dataclasses.field(kw_only=True)
    rates: Rates = dataclasses.field(default=(), kw_only=True)
    kind = Kind("medusa", 0.6, 0.5, is_certain=True)

    def propose(
        self, params: Params, state: Float32[Array, "b d"], inputs: RoundInputs
    ) -> tuple[Proposal, Float32[Array, "b d"]]:
        """Asks the heads in turn, in a loop on the device, for as long as any is wanted."""
        if self.shape is not None:
            return propose_grown(self, params, state, inputs)
        hidden = self.read(inputs.view.params, state)
        # `lax.switch` needs one branch a head, as each has its own parameters.
        heads = [
            functools.partial(medusa_logits, self.config, params[f"head_{index}"])
            for index in range(self.num_draft_tokens)
        ]

        def ask(index: Int32[Array, ""], token: RowTokens) -> tuple[Array, Int32[Array, ""]]:
            # Heads that nobody asks are not computed.
            logits = jax.lax.switch(index, heads, hidden)
            return logits[:, 0, : self.vocab_size], index + 1

        # The memory is the head's index: no head needs what another has drawn.
        proposal, _, _ = self.draw_chain(ask, ask, jnp.int32(0), inputs)
        return proposal, state

    def grow(
        self, params: Params, inputs: RoundInputs, wanted: RowCounts, state: Float32[Array, "b d"]
    ) -> tuple[Proposal, Float32[Array, "b d"]]:
        """Asks all heads that the tree has a level for."""
        assert self.shape is not None
        size, depth, branches, _ = self.shape
        few = [of_head[:branches] for of_head in self.rates[:depth]]
        tree = best_static_tree(few, size)
        hidden, levels = self.read(inputs.view.params, state), []
        for index, width in enumerate(tree.widths):
            logits = medusa_logits(self.config, params[f"head_{index}"], hidden)
            levels.append(best_tokens(logits[..., : self.vocab_size], width)[:, 0])
        pairs = zip(tree.depths, tree.ranks, strict=True)
        nodes = jnp.stack([levels[level - 1][:, rank] for level, rank in pairs], axis=1)
        scores = jnp.broadcast_to(jnp.asarray(tree.scores, jnp.float32), nodes.shape)
        if self.min_confidence > 0:  # the least probability of a path, as in trees that grow
            scores = jnp.where(scores >= jnp.log(self.min_confidence), scores, -jnp.inf)
        parents = jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), nodes.shape)
        # A vocabulary has more tokens than a head is asked for: none of them is NO_TOKEN.
        return best_tree(nodes, scores, parents, size, wanted, max_depth=depth), state


def build(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter over trained heads."""
    target, folder, shape = spec.target_config, spec.head_folder("medusa"), certain_tree_shape(spec)
    heads = load_medusa(folder, target, spec.dtype)
    rates: Rates = ()
    if shape is None:
        # A chain cannot be longer than there are heads.
        spec = spec.with_at_most(heads.config.num_heads)
    else:
        rates = read_rates(folder, heads.config.num_heads)
    fields = spec.chain_fields | {"shape": shape, "rates": rates}
    return BuiltDrafter(MedusaDrafter(**fields, config=heads.config, target=target), heads.params)
