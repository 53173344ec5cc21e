"""What a frozen target says of every token of texts, computed once and kept on disk.

    FOLDER/3f62….npy    outputs of some of its layers at the tokens of 128 texts, [n l d], bfloat16
    FOLDER/a01c….npy    the same of the next 128

A shard is named after all that it follows from: the target, the layers, the tokens. So one folder
serves many runs, a run that was killed goes on behind the last whole shard, and when texts are
added only theirs are computed.
"""

import contextlib
import hashlib
import os
import pathlib
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.errors import InputError
from jspec.common.progress import format_seconds
from jspec.training.target_states import make_reader
from jspec.training.texts import Rows, Text, iterate_rows, pack, spans
from jspec.weights.resolver import LoadedModel

_SHARD = 128  # texts
_SAMPLE = 1024  # numbers of each of the target's arrays that its name is made of


class StateStore:
    """The target's outputs at the tokens of texts; `fill` adds them to rows."""

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
        """Computes what is not there yet.

        Args:
          folder: is made if need be.
          target: the model.
          layers: whose outputs; see `ApplyFn`.
          texts: all that will be asked for.
          seq_len: tokens of a row at most; what is longer is cut.
          batch_size: rows computed at a time.

        Raises:
          InputError: the folder cannot be written, or a shard in it is damaged.
        """
        self._target, self._layers, self._folder = target, layers, folder
        self._seq_len, self._batch_size = seq_len, batch_size
        self._read = make_reader(target.config, layers, dtype=jnp.bfloat16)
        self._shards: list[np.ndarray] = []
        self._places: dict[bytes, tuple[int, int]] = {}  # of a text's tokens: shard, first token
        ids = [np.array(text.ids[:seq_len], np.int32) for text in texts]
        groups = [ids[first : first + _SHARD] for first in range(0, len(ids), _SHARD)]
        name = _name_of(target, layers)
        progress = _Progress(len(ids))
        for group in groups:
            path = folder / f"{_name_of_texts(name, group)}.npy"
            if not path.exists():
                self._write(path, group)
                progress.say(group)
            self._open(path, group)

    def fill(self, rows: Rows) -> Rows:
        """Returns rows of the texts with the target's outputs, [r t l d]; 0 where no text is."""
        shape = len(self._layers), self._target.config.embed_dim
        outputs = np.zeros([*rows.tokens.shape, *shape], jnp.bfloat16)
        for row, place, key in spans(rows):
            shard, first = self._places[key]
            stored = self._shards[shard][first : first + place.stop - place.start]
            outputs[row, place] = stored.view(jnp.bfloat16)
        return rows._replace(outputs=outputs)

    def _open(self, path: pathlib.Path, group: Sequence[np.ndarray]) -> None:
        first = 0
        for ids in group:
            self._places[ids.tobytes()] = len(self._shards), first
            first += len(ids)
        wanted = first, len(self._layers), self._target.config.embed_dim
        try:
            shard = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"cannot read {path}: {error}; without it it is made anew") from None
        if shard.shape != wanted or shard.dtype != np.uint16:
            raise InputError(
                f"{path}: expected {list(wanted)} numbers of 2 bytes, found {list(shard.shape)} of "
                f"{shard.dtype}; without it it is made anew"
            )
        self._shards.append(shard)

    def _write(self, path: pathlib.Path, group: Sequence[np.ndarray]) -> None:
        """Computes a shard; the file is there when it is complete."""
        places, end = {}, 0
        for ids in group:
            places[ids.tobytes()] = end
            end += len(ids)
        found = np.zeros([end, len(self._layers), self._target.config.embed_dim], jnp.bfloat16)
        longest_first = sorted(group, key=len, reverse=True)
        rows = pack([Text((), tuple(ids.tolist())) for ids in longest_first], self._seq_len)
        for batch in iterate_rows(rows, self._batch_size):
            outputs = np.asarray(self._read(self._target.params, batch))
            for row, place, key in spans(batch):
                first = places[key]
                found[first : first + place.stop - place.start] = outputs[row, place]
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(path.parent)
            with partial.open("wb") as file:
                np.save(file, found.view(np.uint16))
            partial.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise InputError(
                f"cannot write {path}: {error.strerror or error}; the same command goes on from it"
            ) from None


def _remove_leftovers(folder: pathlib.Path) -> None:
    """Removes what runs that were killed had half written: files of processes that are no more."""
    for partial in folder.glob("*.partial"):
        number = partial.stem.rpartition(".")[2]
        try:
            os.kill(int(number), 0)
        except (ProcessLookupError, ValueError):
            partial.unlink(missing_ok=True)
        except OSError:
            pass  # another user's, and alive


class _Progress:
    """Says how far the target is."""

    def __init__(self, num_texts: int) -> None:
        self._begin, self._num_texts = time.monotonic(), num_texts
        self._done = self._num_tokens = 0

    def say(self, group: Sequence[np.ndarray]) -> None:
        self._done += len(group)
        self._num_tokens += sum(map(len, group))
        seconds = time.monotonic() - self._begin
        left = seconds / self._done * (self._num_texts - self._done)
        rate = self._num_tokens / seconds
        print(f"the target's states: {self._num_tokens} tokens, {rate:.0f} a second, at most "
              f"about {format_seconds(left)} left", file=sys.stderr, flush=True)  # fmt: skip


def _name_of(target: LoadedModel, layers: tuple[int, ...]) -> str:
    """Returns a name of a model and some of its layers: some of its numbers decide it."""
    digest = hashlib.sha256(repr((target.config, layers)).encode())
    for leaf in jax.tree.leaves(target.params):
        digest.update(np.asarray(leaf.reshape(-1)[:_SAMPLE]).tobytes())
    return digest.hexdigest()


def _name_of_texts(name: str, group: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256(name.encode())
    for ids in group:
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return digest.hexdigest()[:32]
