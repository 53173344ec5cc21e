"""What a frozen target computes of packed texts, asked each time or once and kept on disk.

A file of a store holds the outputs of some layers at the tokens of one text, [t l d], in bfloat16.
It is named by a digest of all that it depends on: the target, the layers, the tokens. So one folder
serves many runs, a run that was killed goes on after the last whole file, and when texts are added
only theirs are computed.
"""

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jspec.common.errors import InputError
from jspec.common.progress import Progress
from jspec.common.typing import Params
from jspec.models import LlamaConfig
from jspec.models.layers import head_kernel, linear, look_up, normed_outputs
from jspec.training.packing import Rows, iterate_rows, pack, packed_hidden
from jspec.training.texts import Text
from jspec.weights.resolver import LoadedModel

_SAMPLE = 1024  # numbers of each of the target's arrays that its digest is made of


class TargetStates(NamedTuple):
    """What a frozen target computes of a batch of rows.

    Attributes:
      embedded: the target's embeddings of the tokens, [b t d].
      features: its outputs at the feature layers, [b t l d].
      hidden: those of its last layer, normed, [b t d].
      logits: of the token after each, among those that the drafter can propose, [b t u].
    """

    embedded: Float[Array, "b t d"]
    features: Float32[Array, "b t l d"]
    hidden: Float32[Array, "b t d"]
    logits: Float32[Array, "b t u"]


def target_states(
    config: LlamaConfig, params: Params, rows: Rows, ids: np.ndarray, layers: tuple[int, ...]
) -> TargetStates:
    """Returns the states of a target, which runs if the rows lack its outputs.

    The drafter can propose the tokens `ids`, [u]; `layers` are the feature layers and the last one.
    """
    outputs = rows.outputs
    if outputs is None:
        outputs = packed_hidden(config, params, rows, params["embedding"].dtype, layers)
    outputs = jnp.asarray(outputs, jnp.float32)
    hidden = normed_outputs(config, params, outputs[:, :, -1])
    head = look_up(head_kernel(config, params), jnp.asarray(ids)[None])[0]
    embedded = look_up(params["embedding"], jnp.asarray(rows.tokens))
    return TargetStates(embedded, outputs[:, :, :-1], hidden, linear(hidden, head))


class StateStore:
    """The target's outputs at the tokens of texts, on disk; `fill` adds them to rows."""

    def __init__(
        self,
        folder: pathlib.Path,
        target: LoadedModel,
        layers: tuple[int, ...],
        texts: Sequence[Text],
        *,
        seq_len: int,
        batch_size: int,
    ) -> None:
        """Computes the outputs of `layers`, see `ApplyFn`, that are not in the folder yet.

        `texts` are those of all rows to fill, cut to `seq_len` tokens.

        Raises:
          InputError: the folder cannot be written.
        """
        config, dtype = target.config, target.params["embedding"].dtype
        self._folder, self._shape = folder, (len(layers), config.embed_dim)
        self._model = _digest_of(target, layers)

        @jax.jit
        def run(params: Params, rows: Rows) -> Float[Array, "r t l d"]:
            return packed_hidden(config, params, rows, dtype, layers).astype(jnp.bfloat16)

        # A text with no tokens has no outputs; longest first, so that rows are packed tightly.
        cut = sorted({text.ids[:seq_len] for text in texts} - {()}, key=len, reverse=True)
        missing = [ids for ids in cut if not self._path(np.array(ids, np.int32)).exists()]
        num_done = len(cut) - len(missing)
        progress = Progress(len(cut), num_done, "file of hidden states")
        packed = pack([Text((), ids) for ids in missing], seq_len)
        for rows in iterate_rows(packed, batch_size):
            outputs = np.asarray(run(target.params, rows))
            for span in _spans(rows):
                _write(self._path(rows.tokens[span]), outputs[span])
                num_done += 1
            progress.show(num_done)

    def fill(self, rows: Rows) -> Rows:
        """Returns rows of the texts with the target's outputs, [r t l d]; 0 where padded.

        Raises:
          InputError: a file is damaged.
        """
        outputs = np.zeros([*rows.tokens.shape, *self._shape], jnp.bfloat16)
        for span in _spans(rows):
            path = self._path(rows.tokens[span])
            try:
                outputs[span] = np.load(path).view(jnp.bfloat16).reshape(outputs[span].shape)
            except (OSError, ValueError, EOFError) as error:
                reason = f"{error}; delete it, to compute it anew"
                raise InputError(f"cannot read {path}: {reason}") from None
        return rows._replace(outputs=outputs)

    def _path(self, ids: np.ndarray) -> pathlib.Path:
        digest = hashlib.sha256(self._model.encode() + ids.tobytes())
        return self._folder / f"{digest.hexdigest()[:32]}.npy"


def _spans(rows: Rows) -> Iterator[tuple[int, slice]]:
    """Yields where each text is, as an index (row, tokens)."""
    for row, text in enumerate(rows.text):
        for number in range(1, text.max() + 1):
            first, last = np.flatnonzero(text == number)[[0, -1]]
            yield row, slice(int(first), int(last) + 1)


def _write(path: pathlib.Path, outputs: np.ndarray) -> None:
    """Writes bfloat16 numbers to a file, which appears when it is complete."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.save(file, outputs.view(np.uint16))  # NumPy knows no bfloat16: the same bits
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; the same command goes on from it"
        ) from None


def _digest_of(target: LoadedModel, layers: tuple[int, ...]) -> str:
    """Returns a digest of a model and some of its layers, made of a sample of its weights."""
    digest = hashlib.sha256(repr((target.config, layers)).encode())
    for leaf in jax.tree.leaves(target.params):
        digest.update(np.asarray(leaf.reshape(-1)[:_SAMPLE]).tobytes())
    return digest.hexdigest()
