"""What a frozen target computes of packed texts, asked each time or once and kept on disk.

    FOLDER/3f62….npy    outputs of some of its layers at the tokens of 128 texts, [n l d], bfloat16
    FOLDER/a01c….npy    the same of the next 128

A file is named by a digest of all that it depends on: the target, the layers, the tokens. So one
folder serves many runs, a run that was killed goes on after the last whole file, and when texts are
added only theirs are computed.
"""

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence
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
from jspec.models.layers import head_kernel, linear, look_up, normed_outputs
from jspec.training.packing import Rows, compute_by_text, packed_hidden, take_by_text
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


def read_layers(config: LlamaConfig, feature_layers: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the layers whose outputs `make_states` needs: the feature layers and the last one."""
    return (*feature_layers, config.num_layers)


def make_reader(
    config: LlamaConfig, layers: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> Callable[[Params, Rows], Float[Array, "b t l d"]]:
    """Returns (a model's parameters, rows) -> outputs of its layers, in a type; see `ApplyFn`."""

    def read(params: Params, rows: Rows) -> Float[Array, "b t l d"]:
        cache_dtype = params["embedding"].dtype
        return packed_hidden(config, params, rows, cache_dtype, layers).astype(dtype)

    return jax.jit(read)


def make_states(
    target: LoadedModel, ids: np.ndarray, feature_layers: tuple[int, ...]
) -> Callable[[Params, Rows], TargetStates]:
    """Returns (the target's parameters, rows) -> its states; it runs if rows lack its outputs.

    Args:
      target: the model.
      ids: tokens that the drafter can propose, [u].
      feature_layers: see `EagleConfig`.
    """
    config = target.config
    read = make_reader(config, read_layers(config, feature_layers), jnp.float32)

    def states_of(params: Params, rows: Rows) -> TargetStates:
        outputs = read(params, rows) if rows.outputs is None else jnp.asarray(rows.outputs)
        outputs = outputs.astype(jnp.float32)
        hidden = normed_outputs(config, params, outputs[:, :, -1])
        head = look_up(head_kernel(config, params), jnp.asarray(ids)[None])[0]
        return TargetStates(
            embedded=look_up(params["embedding"], jnp.asarray(rows.tokens)),
            features=outputs[:, :, :-1],
            hidden=hidden,
            logits=linear(hidden, head),
        )

    return jax.jit(states_of)


class StateStore:
    """The target's outputs at the tokens of texts, on disk; `fill` adds them to rows."""

    def __init__(
        self,
        folder: pathlib.Path,
        target: LoadedModel,
        layers: tuple[int, ...],
        texts: Sequence[Text],
        seq_len: int,
        batch_size: int,
    ) -> None:
        """Computes what is not there yet.

        Args:
          folder: of the files.
          target: the model.
          layers: those whose outputs are stored; see `ApplyFn`.
          texts: all texts of the rows to fill.
          seq_len: tokens of a row; longer texts are cut.
          batch_size: rows computed at a time.

        Raises:
          InputError: the folder cannot be written, or a file in it is damaged.
        """
        self._target, self._shape = target, (len(layers), target.config.embed_dim)
        self._sizes = {"seq_len": seq_len, "batch_size": batch_size}
        self._read = make_reader(target.config, layers, dtype=jnp.bfloat16)
        self._stored: dict[bytes, np.ndarray] = {}  # a text's tokens -> [t l d]
        ids = [np.array(text.ids[:seq_len], np.int32) for text in texts]
        groups = [ids[first : first + _TEXTS_A_FILE] for first in range(0, len(ids), _TEXTS_A_FILE)]
        model = _digest_of(target, layers)
        paths = [folder / f"{_digest_of_texts(model, group)}.npy" for group in groups]
        num_done = sum(path.exists() for path in paths)
        progress = Progress(len(paths), num_done, "file of hidden states")
        for path, group in zip(paths, groups, strict=True):
            if not path.exists():
                self._write(path, group)
                num_done += 1
                progress.show(num_done, 0)
            self._open(path, group)

    def fill(self, rows: Rows) -> Rows:
        """Returns rows of the texts with the target's outputs, [r t l d]; 0 where padded."""
        zeros = np.zeros([*rows.tokens.shape, *self._shape], jnp.bfloat16)
        return rows._replace(outputs=take_by_text(self._stored, rows, zeros))

    def _open(self, path: pathlib.Path, group: Sequence[np.ndarray]) -> None:
        ends = np.cumsum([len(ids) for ids in group])
        wanted = (int(ends[-1]), *self._shape)
        try:
            outputs = np.load(path, mmap_mode="r")
            if outputs.shape != wanted or outputs.dtype != np.uint16:
                found = f"{outputs.shape} of {outputs.dtype}"
                raise ValueError(f"expected {wanted} numbers of uint16, found {found}")
        except (OSError, ValueError, EOFError) as error:
            reason = f"{error}; delete it, to compute it anew"
            raise InputError(f"cannot read {path}: {reason}") from None
        for ids, end in zip(group, ends, strict=True):
            # NumPy knows no bfloat16: the file holds the same bits as uint16.
            self._stored[ids.tobytes()] = outputs[end - len(ids) : end].view(jnp.bfloat16)

    def _write(self, path: pathlib.Path, group: Sequence[np.ndarray]) -> None:
        """Computes a file, which appears when it is complete."""
        found = compute_by_text(
            lambda rows: self._read(self._target.params, rows),
            [tuple(ids.tolist()) for ids in group],
            **self._sizes,
        )
        nothing = np.zeros([0, *self._shape], jnp.bfloat16)  # of a text without tokens
        outputs = np.concatenate([found.get(ids.tobytes(), nothing) for ids in group])
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(path.parent)
            with partial.open("wb") as file:
                np.save(file, outputs.view(np.uint16))
            partial.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise InputError(
                f"cannot write {path}: {error.strerror or error}; the same command goes on from it"
            ) from None


def _remove_leftovers(folder: pathlib.Path) -> None:
    """Removes the unfinished files of processes that have ended."""
    for partial in folder.glob("*.partial"):
        pid = partial.stem.rpartition(".")[2]
        if not (pid.isdigit() and psutil.pid_exists(int(pid))):
            partial.unlink(missing_ok=True)


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
