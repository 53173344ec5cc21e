"""What a frozen target computes of packed texts, asked each time or once and kept on disk.

    FOLDER/3f62….npy    outputs of some of its layers at the tokens of 128 texts, [n l d], bfloat16
    FOLDER/a01c….npy    the same of the next 128

A file is named by a digest of all that it depends on: the target, the layers, the tokens. So one
folder serves many runs, a run that was killed goes on after the last whole file, and when texts are
added only theirs are computed.
"""

import contextlib
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jaxtyping import Array, Float, Float32

from jspec.common.errors import InputError
from jspec.common.progress import Progress
from jspec.common.typing import Params
from jspec.models import LlamaConfig
from jspec.models.layers import linear, look_up
from jspec.models.outputs import head_kernel, normed_outputs
from jspec.training.packing import Rows, iterate_rows, pack, packed_hidden
from jspec.training.texts import Text
from jspec.weights.resolver import LoadedModel

_TEXTS_A_FILE = 128
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


def make_states(
    config: LlamaConfig, ids: np.ndarray, layers: tuple[int, ...]
) -> Callable[[Params, Rows], TargetStates]:
    """Returns (the target's parameters, rows) -> its states; it runs if rows lack its outputs.

    The drafter can propose the tokens `ids`, [u]; `layers` are the feature layers and the last one.
    """

    def states_of(params: Params, rows: Rows) -> TargetStates:
        outputs = rows.outputs
        if outputs is None:
            outputs = _outputs(config, params, rows, layers)
        outputs = jnp.asarray(outputs, jnp.float32)
        hidden = normed_outputs(config, params, outputs[:, :, -1])
        head = look_up(head_kernel(config, params), jnp.asarray(ids)[None])[0]
        return TargetStates(
            embedded=look_up(params["embedding"], jnp.asarray(rows.tokens)),
            features=outputs[:, :, :-1],
            hidden=hidden,
            logits=linear(hidden, head),
        )

    return jax.jit(states_of)


def _outputs(
    config: LlamaConfig, params: Params, rows: Rows, layers: tuple[int, ...]
) -> Float32[Array, "b t l d"]:
    return packed_hidden(config, params, rows, params["embedding"].dtype, layers)


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

        `texts` are all texts of the rows to fill, cut to `seq_len` tokens; `batch_size` rows are
        computed at a time.

        Raises:
          InputError: the folder cannot be written, or a file in it is damaged.
        """
        self._seq_len, self._batch_size = seq_len, batch_size
        self._params, self._shape = target.params, (len(layers), target.config.embed_dim)
        self._run = jax.jit(functools.partial(_outputs, target.config, layers=layers))
        self._stored: dict[bytes, np.ndarray] = {}  # a text's tokens -> [t l d]
        digest = _digest_of(target, layers)
        groups = [texts[i : i + _TEXTS_A_FILE] for i in range(0, len(texts), _TEXTS_A_FILE)]
        tokens = [[np.array(text.ids[:seq_len], np.int32) for text in group] for group in groups]
        paths = [folder / f"{_digest_of_texts(digest, group)}.npy" for group in tokens]
        num_done = sum(path.exists() for path in paths)
        progress = Progress(len(paths), num_done, "file of hidden states")
        for path, group, ids in zip(paths, groups, tokens, strict=True):
            ends = np.cumsum([len(one) for one in ids])
            if not path.exists():
                _write(path, self._compute(group, ids))
                num_done += 1
                progress.show(num_done)
            outputs = _read(path, (int(ends[-1]), *self._shape))
            parts = np.split(outputs, ends[:-1])
            self._stored |= zip(map(np.ndarray.tobytes, ids), parts, strict=True)

    def fill(self, rows: Rows) -> Rows:
        """Returns rows of the texts with the target's outputs, [r t l d]; 0 where padded."""
        outputs = np.zeros([*rows.tokens.shape, *self._shape], jnp.bfloat16)
        for span in _spans(rows):
            outputs[span] = self._stored[rows.tokens[span].tobytes()]
        return rows._replace(outputs=outputs)

    def _compute(self, texts: Sequence[Text], ids: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the outputs at the tokens of texts, one after another, [n l d]."""
        found = {b"": np.zeros([0, *self._shape], jnp.bfloat16)}  # a text may have no tokens
        longest_first = sorted(texts, key=lambda text: len(text.ids), reverse=True)
        for rows in iterate_rows(pack(longest_first, self._seq_len), self._batch_size):
            outputs = np.asarray(self._run(self._params, rows).astype(jnp.bfloat16))
            found |= {rows.tokens[span].tobytes(): outputs[span] for span in _spans(rows)}
        return np.concatenate([found[one.tobytes()] for one in ids])


def _spans(rows: Rows) -> Iterator[tuple[int, slice]]:
    """Yields where each text is, as an index (row, tokens)."""
    for row, text in enumerate(rows.text):
        for number in np.unique(text[text > 0]):
            first, last = np.flatnonzero(text == number)[[0, -1]]
            yield row, slice(int(first), int(last) + 1)


def _read(path: pathlib.Path, shape: tuple[int, ...]) -> np.ndarray:
    """Opens a file of bfloat16 numbers of a shape; they stay on the disk until they are read."""
    try:
        return np.load(path, mmap_mode="r").reshape(shape).view(jnp.bfloat16)
    except (OSError, ValueError, EOFError) as error:
        reason = f"{error}; delete it, to compute it anew"
        raise InputError(f"cannot read {path}: {reason}") from None


def _write(path: pathlib.Path, outputs: np.ndarray) -> None:
    """Writes bfloat16 numbers to a file, which appears when it is complete."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in path.parent.glob("*.partial"):
            pid = other.stem.rpartition(".")[2]
            if not (pid.isdigit() and psutil.pid_exists(int(pid))):  # its process was killed
                other.unlink(missing_ok=True)
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


def _digest_of_texts(model: str, group: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256(model.encode())
    for ids in group:
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return digest.hexdigest()[:32]
