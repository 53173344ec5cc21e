"""Models by their name on a model hub, through huggingface_hub, its cache and offline mode."""

import pathlib

from jspec.errors import InputError

_PATTERNS = ["*.json", "*.jinja", "model*.safetensors", "tokenizer.model"]


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
    except Exception as error:  # the hub client and its transport raise all kinds
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"{name}: no such folder here, and not to be had from the hub: "
            f"{type(error).__name__}: {reason}"
        ) from None
