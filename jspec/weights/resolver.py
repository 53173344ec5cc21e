"""One name for every kind of model: a folder, a file, a hub name, a preset, random weights."""

import dataclasses
import os
import pathlib
import re
import sys
from typing import Any, NamedTuple

from jspec.common.errors import InputError
from jspec.models.config import PRESETS, LlamaConfig
from jspec.weights import smollm2
from jspec.weights.tokenizers.tokenizer import TokenizerLike

_RANDOM = "random:"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
      config: its shape; `eos_ids` include the tokenizer's and the generation config's.
      params: the parameters, on the default device (see `rules.make_rules`).
      tokenizer: its tokenizer.
      name: what it was asked for by.
      source: "hf", "gguf", "orbax", "hub", "preset" or "random".
      quantization: "int8" or "int4" (see `weights.quantize`): then it is another model than the one
        of that name; None as the checkpoint has it.
    """

    config: LlamaConfig
    params: dict[str, Any]
    tokenizer: TokenizerLike
    name: str
    source: str
    quantization: str | None = None

    @property
    def is_random(self) -> bool:
        """Whether the weights mean nothing."""
        return self.source == "random"


class _Form(NamedTuple):
    """In what form weights are wanted; see `load_model`."""

    dtype: Any
    quantization: str | None


def _make(
    name: str,
    source: str,
    config: LlamaConfig,
    params: dict[str, Any],
    tokenizer: TokenizerLike,
    form: _Form,
) -> LoadedModel:
    """Merges the ids that end a text."""
    eos_ids = tuple(dict.fromkeys((*config.eos_ids, *tokenizer.eos_ids)))
    config = dataclasses.replace(config, eos_ids=eos_ids)
    return LoadedModel(config, params, tokenizer, name, source, form.quantization)


def _load_gguf(name: str, source: str, path: pathlib.Path, form: _Form) -> LoadedModel:
    from jspec.weights.gguf.tokenizer import build_tokenizer
    from jspec.weights.gguf_parameters import load_gguf

    config, params, file = load_gguf(path, *form)
    return _make(name, source, config, params, build_tokenizer(file), form)


def _load_folder(name: str, source: str, folder: pathlib.Path, form: _Form) -> LoadedModel:
    from jspec.weights.tokenizers.files import load_tokenizer

    if (folder / "params").is_dir():
        from jspec.weights.orbax_checkpoint import load_orbax as load

        source = "orbax"
    else:
        from jspec.weights.hf import load_hf as load
    config, params = load(folder, *form)
    return _make(name, source, config, params, load_tokenizer(folder), form)


def _load_random(name: str, form: _Form) -> LoadedModel:
    from jspec.weights.random_weights import random_params
    from jspec.weights.tokenizers.byte_tokenizer import ByteTokenizer

    print(
        f"jspec: WARNING: {name} has RANDOM WEIGHTS, its text is noise: good for timing only",
        file=sys.stderr,
        flush=True,
    )
    preset, seed = _parse_random(name)
    config = PRESETS[preset]
    params = random_params(config, seed, *form)
    tokenizer = ByteTokenizer(config.vocab_size, bos_id=config.bos_id, eos_ids=config.eos_ids)
    return _make(name, "random", config, params, tokenizer, form)


def _parse_random(name: str) -> tuple[str, int]:
    """Returns the preset and the seed."""
    preset, _, seed = name.removeprefix(_RANDOM).partition(":")
    if preset not in PRESETS or not (seed == "" or seed.isdecimal()):
        raise InputError(
            f"expected random:<preset> or random:<preset>:<seed> with a preset among "
            f"{', '.join(PRESETS)}; got {name!r}"
        )
    return preset, int(seed or 0)


def _expand(spec: str) -> pathlib.Path:
    try:
        return pathlib.Path(spec).expanduser()
    except RuntimeError as error:  # ~nobody
        raise InputError(f"no model {spec!r}: {error}") from None


def model_name(spec: str | os.PathLike[str]) -> str:
    """Returns what a model is asked for by, as a text.

    Raises:
      InputError: it is none.
    """
    if not isinstance(spec, str | os.PathLike):
        raise InputError(f"expected a model's name or folder as a text or a path, got {spec!r}")
    return os.fspath(spec)


def check_device() -> None:
    """Checks that JAX has a device: it is started here, if it is not yet.

    Raises:
      InputError: it has none, such as with JAX_PLATFORMS=cuda where there is no GPU.
    """
    import jax

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
      quantization: "int8" or "int4" to round every kernel to integers, which makes it another model
        (see `weights.quantize`); None leaves it alone.

    Raises:
      InputError: no such model, or it cannot be honoured; one line.
    """
    spec = model_name(spec)
    (source, path), form = find_model(spec), _Form(dtype, quantization)
    check_device()
    load = _load_gguf if source in ("preset", "gguf") else _load_folder
    try:
        if path is None:
            return _load_random(spec, form)
        return load(spec, source, path, form)
    except OSError as error:  # of the system, such as "Permission denied"
        where = error.filename or path
        raise InputError(f"{where}: cannot be read: {error.strerror or error}") from None


def find_model(spec: str) -> tuple[str, pathlib.Path | None]:
    """Returns the source of a model and its folder or file, without loading it.

    One of a hub, or the preset, is fetched if it is not here yet; random weights lie nowhere.

    Args:
      spec: see `load_model`.

    Raises:
      InputError: no such model; one line.
    """
    path = _expand(spec)
    if spec.startswith(_RANDOM):
        _parse_random(spec)
        return "random", None
    if spec == smollm2.NAME:
        return "preset", smollm2.fetch()
    if spec and path.is_dir():
        return "hf", path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"{path}: cannot be read: No such file or directory")
        return "gguf", path
    if _HUB_NAME.fullmatch(spec):
        from jspec.weights.hub import fetch

        return "hub", fetch(spec)
    raise InputError(
        f"no model {spec!r}: expected an existing folder, a .gguf file, {smollm2.NAME}, a hub "
        f"name like organisation/model, or random:<preset> with one of {', '.join(PRESETS)}"
    )
