"""Models by their name on a model hub, through huggingface_hub, its cache and offline mode."""

import pathlib

from jspec.common.errors import InputError

_PATTERNS = ["*.json", "*.jinja", "model*.safetensors", "tokenizer.model", "merges.txt"]


def fetch(name: str) -> pathlib.Path:
    """Returns the folder of a hub model, downloading what is not in the cache yet.

    Args:
      name: `organisation/model`.

    Raises:
      InputError: no such model, no access, or no network and not in the cache.
    """
    import huggingface_hub

    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:  # of the client, and of a transport that its version chooses
        raise InputError(
            f"{name}: no such folder here, and not to be had from the hub: {_advice(error)}"
        ) from None


def _advice(error: Exception) -> str:
    """Returns in a few words what to do; the client's own messages fill a page."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "accept its licence on huggingface.co, then `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "check the name, or `hf auth login` if it is private"
    if isinstance(error, errors.HFValidationError):
        return "its name is not one that the hub allows"
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return "no network (or offline mode), and not in the hub's cache"
    reason = " ".join(str(error).split())
    return f"{type(error).__name__}: {reason[:60]}"
