"""The states of a frozen target for packed texts, computed each time or once and kept on disk.

A file of a store holds outputs of some layers at the tokens of 128 texts, [n l d], in bfloat16. It
is named by a digest of all that it depends on: the target, the layers, the tokens. So one folder
serves many runs, a run that was killed goes on after the last whole file, and when texts are added
only theirs are computed.
"""

import contextlib
import functools
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jaxtyping import Array, Float, Float32

from jspec.common import processes
from jspec.common.errors import InputError
from jspec.common.progress import Progress
from jspec.common.typing import Params
from jspec.models import DecoderConfig
from jspec.models.layers import finish_logits, head_kernel, linear, look_up, normed_outputs
from jspec.training.packing import Rows, compute_by_text, packed_hidden, take_by_text
from jspec.training.texts import Text
from jspec.weights.resolver import LoadedModel

_TEXTS_A_FILE = 128
_SAMPLE = 1024  # numbers of each of the target's arrays that its digest is made of


class TargetStates(NamedTuple):
    """The states of a frozen target for a batch of rows.

    Attributes:
      embedded: the target's embeddings of the tokens, [b t d].
      features: its outputs at the feature layers, [b t l d].
      hidden: those of its last layer, normed, [b t d].
      logits: of the next token, among those that the drafter can propose, [b t u].
    """

    embedded: Float[Array, "b t d"]
    features: Float32[Array, "b t l d"]
    hidden: Float32[Array, "b t d"]
    logits: Float32[Array, "b t u"]


def target_states(
    config: DecoderConfig, params: Params, rows: Rows, ids: np.ndarray, layers: tuple[int, ...]
) -> TargetStates:
    """Returns the states of a target, which runs if the rows lack its outputs.

    The drafter can propose the tokens `ids`, [u]; `layers` are the feature layers and the last.
    """
    outputs = rows.outputs
    if outputs is None:
        outputs = packed_hidden(config, params, rows, params["embedding"].dtype, layers)
    outputs = jnp.asarray(outputs, jnp.float32)
    hidden = normed_outputs(config, params, outputs[:, :, -1])
    head = look_up(head_kernel(config, params), jnp.asarray(ids)[None])[0]
    embedded = look_up(params["embedding"], jnp.asarray(rows.tokens))
    logits = finish_logits(config, linear(hidden, head))
    return TargetStates(embedded, outputs[:, :, :-1], hidden, logits)


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
          InputError: the folder cannot be written, or a file in it is damaged.
        """
        config, dtype = target.config, target.params["embedding"].dtype
        shape = len(layers), config.embed_dim
        self._stored: dict[tuple[int, ...], np.ndarray] = {}  # a text's tokens -> [t l d]

        @jax.jit
        def run(params: Params, rows: Rows) -> Float[Array, "r t l d"]:
            return packed_hidden(config, params, rows, dtype, layers).astype(jnp.bfloat16)

        cut = [Text((), text.ids[:seq_len]) for text in texts]
        groups = [cut[first : first + _TEXTS_A_FILE] for first in range(0, len(cut), _TEXTS_A_FILE)]
        model, sizes = _digest_of(target, layers), {"seq_len": seq_len, "batch_size": batch_size}
        paths = [folder / f"{_digest_of_texts(model, group)}.npy" for group in groups]
        # The first of several processes writes, in a folder that all see.
        is_stored = processes.of_first(lambda: [path.exists() for path in paths])
        num_done = sum(is_stored)
        progress = Progress(len(paths), num_done, "hidden-state file")
        nothing = np.zeros([0, *shape], jnp.bfloat16)  # of a text without tokens
        for path, group, is_there in zip(paths, groups, is_stored, strict=True):
            if not is_there:
                by_text = compute_by_text(functools.partial(run, target.params), group, **sizes)
                whole = np.concatenate([by_text.get(text.ids, nothing) for text in group])
                processes.of_first(functools.partial(_write, path, whole))
                num_done += 1
                progress.show(num_done)
            ends = np.cumsum([len(text.ids) for text in group])
            outputs = np.split(_open(path, (int(ends[-1]), *shape)), ends[:-1])
            self._stored |= zip((text.ids for text in group), outputs, strict=True)

    def fill(self, rows: Rows) -> Rows:
        """Returns rows of the texts with the target's outputs, [r t l d]; 0 where padded."""
        return rows._replace(outputs=take_by_text(self._stored, rows))


def _open(path: pathlib.Path, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the bfloat16 numbers of a file, which are read when they are used."""
    try:
        return np.load(path, mmap_mode="r").view(jnp.bfloat16).reshape(shape)
    except (OSError, ValueError, EOFError) as error:
        reason = f"{error}; delete it, to compute it anew"
        raise InputError(f"cannot read {path}: {reason}") from None


def _write(path: pathlib.Path, outputs: np.ndarray) -> None:
    """Writes bfloat16 numbers to a file, which appears when it is complete."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob("*.partial"):  # of processes that have ended
            pid = leftover.stem.rpartition(".")[2]
            if not (pid.isdigit() and psutil.pid_exists(int(pid))):
                leftover.unlink(missing_ok=True)
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
        digest.update(processes.fetch(leaf.reshape(-1)[:_SAMPLE]).tobytes())
    return digest.hexdigest()


def _digest_of_texts(model: str, group: Sequence[Text]) -> str:
    arrays = [np.array(text.ids, np.int32) for text in group]
    parts = [len(ids).to_bytes(8, "little") + ids.tobytes() for ids in arrays]
    return hashlib.sha256(model.encode() + b"".join(parts)).hexdigest()[:32]
