"""One name for every kind of model: a folder, a file, a hub name, a preset, random weights."""

import dataclasses
import os
import pathlib
import re
import sys
from typing import Any

import jax

from jspec.common.errors import InputError
from jspec.models.config import PRESETS, LlamaConfig
from jspec.weights import smollm2
from jspec.weights.tokenizers.byte_tokenizer import ByteTokenizer
from jspec.weights.tokenizers.tokenizer import TokenizerLike

_RANDOM = "random:"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.jinja", "model*.safetensors", "tokenizer.model", "merges.txt"]
_NO_NETWORK = "no network (or offline mode), and not in the hub's cache"
# What to do about an error of huggingface_hub, by its class or a base of it.
_HUB_ADVICE = {
    "GatedRepoError": "accept its licence on huggingface.co, then `hf auth login`",
    "RepositoryNotFoundError": "check the name, or `hf auth login` if it is private",
    "HFValidationError": "its name is not one that the hub allows",
    "OfflineModeIsEnabled": _NO_NETWORK,
    "LocalEntryNotFoundError": _NO_NETWORK,
}

_Loaded = tuple[LlamaConfig, dict[str, Any], TokenizerLike]


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
      config: its shape; `eos_ids` include the tokenizer's and the generation config's.
      params: the parameters on the default device (see `tensor_names.parameter_table`).
      tokenizer: its tokenizer.
      name: the name that it was loaded by.
      source: "hf", "gguf", "orbax", "hub", "preset" or "random".
      quantization: "int8" or "int4" if the weights were rounded (see `weights.quantize`), which
        makes it a different model from the one of that name; None if they are the checkpoint's.
    """

    config: LlamaConfig
    params: dict[str, Any]
    tokenizer: TokenizerLike
    name: str
    source: str
    quantization: str | None = None

    @property
    def is_random(self) -> bool:
        """Whether the weights are random."""
        return self.source == "random"


def _load_gguf(path: pathlib.Path, dtype: Any, quantization: str | None) -> _Loaded:
    from jspec.weights.gguf.build_tokenizer import build_tokenizer
    from jspec.weights.gguf_parameters import load_gguf

    config, params, file = load_gguf(path, dtype, quantization)
    return config, params, build_tokenizer(file)


def _is_orbax(folder: pathlib.Path) -> bool:
    return (folder / "params").is_dir()


def _load_folder(folder: pathlib.Path, dtype: Any, quantization: str | None) -> _Loaded:
    from jspec.weights.tokenizers.load_tokenizer import load_tokenizer

    if _is_orbax(folder):
        from jspec.weights.orbax_checkpoint import load_orbax as load
    else:
        from jspec.weights.hf import load_hf as load
    config, params = load(folder, dtype, quantization)
    return config, params, load_tokenizer(folder)


def _load_random(name: str, dtype: Any, quantization: str | None) -> _Loaded:
    from jspec.weights.random_weights import random_params

    print(
        f"jspec: WARNING: {name} has RANDOM WEIGHTS, its text is noise: good for timing only",
        file=sys.stderr,
        flush=True,
    )
    preset, seed = _parse_random(name)
    config = PRESETS[preset]
    params = random_params(config, seed, dtype, quantization)
    tokenizer = ByteTokenizer(config.vocab_size, bos_id=config.bos_id, eos_ids=config.eos_ids)
    return config, params, tokenizer


def _parse_random(name: str) -> tuple[str, int]:
    """Returns the preset and the seed."""
    preset, _, seed = name.removeprefix(_RANDOM).partition(":")
    if preset not in PRESETS or not (seed == "" or seed.isdecimal()):
        raise InputError(
            f"expected random:<preset> or random:<preset>:<seed> with a preset among "
            f"{', '.join(PRESETS)}; got {name!r}"
        )
    return preset, int(seed or 0)


def _fetch_from_hub(name: str) -> pathlib.Path:
    """Returns the folder of a hub model, after downloading what is not in huggingface_hub's cache.

    Raises:
      InputError: no such model, no access, or no network and not in the cache.
    """
    import huggingface_hub

    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # of the client, and of a transport that depends on its version
        kinds = (kind.__name__ for kind in type(error).__mro__)
        advice = next((_HUB_ADVICE[kind] for kind in kinds if kind in _HUB_ADVICE), None)
        advice = advice or f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"
        raise InputError(
            f"{name}: no such folder here, and not to be had from the hub: {advice}"
        ) from None


def model_name(spec: str | os.PathLike[str]) -> str:
    """Returns the name or path of a model as a text.

    Raises:
      InputError: it is neither a text nor a path.
    """
    if not isinstance(spec, str | os.PathLike):
        raise InputError(f"expected a model's name or folder as a text or a path, got {spec!r}")
    return os.fspath(spec)


def check_device() -> None:
    """Checks that JAX has a device; this starts JAX if it has not started yet.

    Raises:
      InputError: there is none, for example with JAX_PLATFORMS=cuda and no GPU.
    """
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # with `cuda` jax may raise either
        reason = " ".join(str(error).split())[:200]
        asked = f"with JAX_PLATFORMS={jax.config.values['jax_platforms']}"
        raise InputError(
            f"expected a device that JAX can use, got none {asked}{reason and f' ({reason})'}"
        ) from None


def load_model(
    spec: str | os.PathLike[str], *, dtype: Any = "bfloat16", quantization: str | None = None
) -> LoadedModel:
    """Loads a model by name.

    Args:
      spec: a folder (Hugging Face's safetensors, or Orbax as `scripts/convert_weights.py` writes
        it), a .gguf file, `smollm2-135m-instruct`, a hub name `organisation/model`, or
        `random:<preset>[:<seed>]`.
      dtype: bfloat16 or float32, of every parameter that is not quantised.
      quantization: "int8" or "int4" rounds every kernel to integers, which makes it another model
        (see `weights.quantize`); None keeps the floats.

    Raises:
      InputError: no such model, or a value that jspec cannot honour; one line.
    """
    name = model_name(spec)
    source, path = find_model(name)
    check_device()
    try:
        if path is None:
            config, params, tokenizer = _load_random(name, dtype, quantization)
        else:
            load = _load_gguf if path.is_file() else _load_folder
            config, params, tokenizer = load(path, dtype, quantization)
    except OSError as error:  # of the system, such as "Permission denied"
        where = error.filename or path
        raise InputError(f"{where}: cannot be read: {error.strerror or error}") from None
    eos_ids = tuple(dict.fromkeys((*config.eos_ids, *tokenizer.eos_ids)))
    config = dataclasses.replace(config, eos_ids=eos_ids)
    return LoadedModel(config, params, tokenizer, name, source, quantization)


def find_model(spec: str) -> tuple[str, pathlib.Path | None]:
    """Returns the source of a model and its folder or file, without loading it.

    A hub model or the preset is downloaded unless it is there; random weights have no path.

    Args:
      spec: see `load_model`.

    Raises:
      InputError: no such model; one line.
    """
    try:
        path = pathlib.Path(spec).expanduser()
    except RuntimeError as error:  # ~nobody
        raise InputError(f"no model {spec!r}: {error}") from None
    if spec.startswith(_RANDOM):
        _parse_random(spec)
        return "random", None
    if spec == smollm2.NAME:
        return "preset", smollm2.fetch()
    if spec and path.is_dir():
        return "orbax" if _is_orbax(path) else "hf", path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"{path}: cannot be read: No such file or directory")
        return "gguf", path
    if _HUB_NAME.fullmatch(spec):
        return "hub", _fetch_from_hub(spec)
    raise InputError(
        f"no model {spec!r}: expected an existing folder, a .gguf file, {smollm2.NAME}, a hub "
        f"name like organisation/model, or random:<preset> with one of {', '.join(PRESETS)}"
    )
