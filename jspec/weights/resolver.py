"""One name for every kind of model: a folder, a file, a hub name, a preset, random weights."""

import dataclasses
import os
import pathlib
import re
from typing import Any

import jax
import numpy as np

from jspec.common.errors import InputError, say
from jspec.common.typing import Params
from jspec.common.user_cache import is_offline
from jspec.kernels import MODEL_AXIS, check_device, has_fast_packed_products
from jspec.models.config import PRESETS, DecoderConfig
from jspec.models.sharding import shard_config
from jspec.weights.published import MODELS, fetch
from jspec.weights.quantize import PACKED, PACKED_KINDS, check_kind, holds_compact
from jspec.weights.tokenizers.tokenizer import ByteTokenizer, TokenizerLike, load_tokenizer

_RANDOM = "random:"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.jinja", "model*.safetensors", "*.model", "merges.txt"]
_NO_NETWORK = "no network (or offline mode), and not in the hub's cache"
# What to do about an error of huggingface_hub, by its class or a base of it.
_HUB_ADVICE = {
    "GatedRepoError": "accept its licence on huggingface.co, then `hf auth login`",
    "RepositoryNotFoundError": "check the name, or `hf auth login` if it is private",
    "HFValidationError": "its name is not one that the hub allows",
    "OfflineModeIsEnabled": _NO_NETWORK,
    "LocalEntryNotFoundError": _NO_NETWORK,
}

_Loaded = tuple[DecoderConfig, Params, TokenizerLike]


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
      config: its shape; `eos_ids` include the tokenizer's and the generation config's.
      params: the parameters on the default device (see `tensor_names.parameter_table`).
      tokenizer: its tokenizer.
      name: the name that it was loaded by.
      is_random: whether the weights are random.
      mesh: the devices that its layers are split over; None for the default device.
      quantization: one of `quantize.KINDS` if the weights were rounded (see there), which makes it
        a different model from the one of that name; "packed" if they stay as they are in a GGUF
        file; "packed_a8" if products also round their inputs, which is another model, too; None if
        they are the checkpoint's in floats.
      is_quantization_chosen: whether nobody asked for it: it is faster on this device.
    """

    config: DecoderConfig
    params: Params = dataclasses.field(repr=False)
    tokenizer: TokenizerLike
    name: str
    is_random: bool = False
    quantization: str | None = None
    mesh: jax.sharding.Mesh | None = dataclasses.field(default=None, repr=False)
    is_quantization_chosen: bool = False

    @property
    def own_config(self) -> DecoderConfig:
        """The config by which each device computes: without a mesh, that of the model."""
        mesh = self.mesh
        return self.config if mesh is None else shard_config(self.config, mesh.shape[MODEL_AXIS])


# A format's files are imported when a model in it is loaded.
def _read(
    path: pathlib.Path, dtype: Any, quantization: str | None, mesh: jax.sharding.Mesh | None
) -> _Loaded:
    """Returns the model of a file or a folder; on a mesh floats are read by each device's share."""
    if path.is_file():
        from jspec.weights.gguf import load_gguf
        from jspec.weights.tokenizers.gguf_tokenizer import build_tokenizer

        config, params, file = load_gguf(path, dtype, quantization)
        return config, params, build_tokenizer(file)
    mesh = mesh if quantization is None else None
    if (path / "params").is_dir():
        from jspec.weights.orbax_checkpoint import load_orbax

        config, params = load_orbax(path, dtype, quantization, mesh)
    elif (path / "model.bin").is_file() and not (path / "model.safetensors").exists():
        from jspec.weights.ctranslate2 import load_ctranslate2

        config, params = load_ctranslate2(path, dtype, quantization)
    else:
        from jspec.weights.hf import load_hf

        config, params = load_hf(path, dtype, quantization, mesh)
    return config, params, load_tokenizer(path)


def _make_random(name: str, dtype: Any, quantization: str | None) -> _Loaded:
    from jspec.weights.random_weights import random_params

    say(f"jspec: WARNING: {name} has RANDOM WEIGHTS, its text is noise: good for timing only")
    preset, seed = _parse_random(name)
    config = PRESETS[preset]
    params = random_params(config, seed, dtype, quantization)
    return config, params, ByteTokenizer(config.vocab_size, config.bos_id, config.eos_ids)


def _parse_random(name: str) -> tuple[str, int]:
    preset, _, seed = name.removeprefix(_RANDOM).partition(":")
    if preset not in PRESETS or not (seed == "" or seed.isdecimal()):
        known = ", ".join(PRESETS)
        raise InputError(f"expected random:<preset>[:<seed>], a preset of {known}; got {name!r}")
    return preset, int(seed or 0)


def _fetch_from_hub(name: str) -> pathlib.Path:
    """Returns the folder of a hub model, downloaded unless huggingface_hub has it in its cache."""
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=_HUB_FILES, local_files_only=is_offline()
        )
        return pathlib.Path(folder)
    except Exception as error:  # of the client, and of a transport that depends on its version
        kinds = (kind.__name__ for kind in type(error).__mro__)
        advice = next((_HUB_ADVICE[kind] for kind in kinds if kind in _HUB_ADVICE), None)
        if is_offline():
            advice = "not in the hub's cache, and --offline or JSPEC_OFFLINE=1 forbids the download"
        advice = advice or f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"
        where = f"{name}: no such folder here, and the hub does not give it"
        raise InputError(f"{where}: {advice}") from None


def model_name(spec: str | os.PathLike[str]) -> str:
    """Returns the name or path of a model as a text.

    Raises:
      InputError: it is neither a text nor a path.
    """
    if not isinstance(spec, str | os.PathLike):
        raise InputError(f"expected a model's name or folder as a text or a path, got {spec!r}")
    return os.fspath(spec)


def load_model(
    spec: str | os.PathLike[str],
    *,
    dtype: Any = "bfloat16",
    quantization: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> LoadedModel:
    """Loads a model by name.

    Args:
      spec: a folder (Hugging Face's safetensors, or Orbax as `scripts/convert_weights.py` writes
        it), a .gguf file, a name in `published.MODELS` (`smollm2-135m-instruct` and others), a
        hub name `organisation/model`, or `random:<preset>[:<seed>]`.
      dtype: bfloat16 or float32, of every parameter that is not quantised.
      quantization: "int8", "int4" or "q4_0" rounds every kernel, which makes it another model (see
        `weights.quantize`; "q4_0" leaves what a GGUF file holds in as few bits); "packed" leaves a
        GGUF file's weights as they are; "packed_a8" does, and rounds the inputs of each product to
        8 bits; "none" makes them floats. None or "auto" is "packed" for a
        .gguf file where that is fast, else "none". A model with experts is always floats.
      mesh: devices to split the layers over (`models.sharding`); a .gguf file's weights become
        floats there where nobody says "packed". Of floats in safetensors each process reads its own
        slices, of an Orbax folder the chunks that these are in; all else it reads whole.

    Raises:
      InputError: no such model, or a value that jspec cannot honour; one line.
    """
    name = model_name(spec)
    path = find_model(name)
    check_device()
    is_asked = quantization not in (None, "auto")
    if not is_asked:
        is_file = path is not None and path.suffix == ".gguf"
        quantization = PACKED if is_file and has_fast_packed_products() else None
    quantization = None if quantization == "none" else quantization
    if mesh is not None and not is_asked:
        quantization = None
    try:
        if quantization in PACKED_KINDS and path is not None and path.is_file():
            quantization = _unless_experts(quantization, path, is_asked)
        if path is None:
            config, params, tokenizer = _make_random(name, dtype, quantization)
        else:
            config, params, tokenizer = _read(path, dtype, quantization, mesh)
        if mesh is not None:  # what lies there already stays
            from jspec.weights.shards import spread_params

            config, params = spread_params(config, params, mesh)
    except OSError as error:  # of the system, such as "Permission denied"
        where = error.filename or path
        raise InputError(f"{where}: cannot be read: {error.strerror or error}") from None
    if quantization in PACKED_KINDS and not holds_compact(params):
        quantization = None  # a file of floats
    eos_ids = tuple(dict.fromkeys((*config.eos_ids, *tokenizer.eos_ids)))
    config = dataclasses.replace(config, eos_ids=eos_ids)
    return LoadedModel(config, params, tokenizer, name, path is None, quantization, mesh=mesh)


def has_mtp_layer(target: str | os.PathLike[str] | LoadedModel) -> bool:
    """Returns whether a target has a layer for multi-token prediction; it need not be loaded.

    Of a hub name that is not in the hub's cache config.json is downloaded. What cannot be read has
    none: to load it says why.
    """
    if isinstance(target, LoadedModel):
        return target.config.num_mtp_layers > 0
    name = model_name(target)
    try:
        folder = pathlib.Path(name).expanduser()
        if not folder.is_dir() and name not in MODELS and _HUB_NAME.fullmatch(name):
            import huggingface_hub

            folder = pathlib.Path(
                huggingface_hub.hf_hub_download(name, "config.json", local_files_only=is_offline())
            ).parent
        from jspec.weights.hf import read_config

        return read_config(folder).num_mtp_layers > 0
    except Exception:  # of a file, or of the hub's client and its transport
        return False


def _unless_experts(kind: str, path: pathlib.Path, is_asked: bool) -> str | None:
    """Returns the kind, or None where a GGUF file has experts, which are used as floats.

    Raises:
      InputError: packed weights of experts were asked for.
    """
    from jspec.weights.gguf import GgufFile, read_gguf_config

    config, _ = read_gguf_config(GgufFile(path))
    if not config.num_experts:
        return kind
    if is_asked:
        check_kind(config, kind)
    say(f"jspec: {path.name} has experts: its weights become floats, which take more memory")
    return None


def find_model(spec: str) -> pathlib.Path | None:
    """Returns the folder or file of a model, without loading it; None for random weights.

    A hub or published model is downloaded unless it is there; see `load_model` for `spec`.

    Raises:
      InputError: no such model; one line.
    """
    try:
        path = pathlib.Path(spec).expanduser()
    except RuntimeError as error:  # ~nobody
        raise InputError(f"no model {spec!r}: {error}") from None
    if spec.startswith(_RANDOM):
        _parse_random(spec)
        return None
    if spec and path.is_dir():
        return path
    if spec in MODELS:
        return fetch(spec)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"{path}: cannot be read: No such file or directory")
        return path
    if path.suffix == ".safetensors":  # which a hub name may end with, too
        folder = path.parent if path.parent.name else path.absolute().parent  # not "."
        raise InputError(f"expected a model's folder, got a file of weights: give {folder}")
    if _HUB_NAME.fullmatch(spec):
        return _fetch_from_hub(spec)
    raise InputError(
        f"no model {spec!r}: expected an existing folder, a .gguf file, {', '.join(MODELS)}, a "
        f"hub name like organisation/model, or random:<preset> with one of {', '.join(PRESETS)}"
    )


def have_same_encoder(target: LoadedModel, draft: LoadedModel) -> bool:
    """Returns whether a draft's encoder gives what the target's gives, weight by weight.

    So it is where a draft was trained on the frozen encoder of its target, as distilled Whispers
    are.
    """
    encoder = target.config.encoder
    if encoder is None or encoder != draft.config.encoder:
        return False
    if target.config.embed_dim != draft.config.embed_dim:
        return False
    parts = [(model.params["encoder"], model.params["embedding"]) for model in (target, draft)]
    if encoder.is_audio:  # its encoder looks nothing up
        parts = [of_encoder for of_encoder, _ in parts]
    (leaves, structure), (others, other_structure) = map(jax.tree.flatten, parts)
    return structure == other_structure and all(
        target_leaf.shape == draft_leaf.shape
        and np.array_equal(np.asarray(target_leaf), np.asarray(draft_leaf))
        for target_leaf, draft_leaf in zip(leaves, others, strict=True)
    )


def check_decoder(model: LoadedModel, where: str) -> None:
    """Checks that a model is a decoder alone; raises InputError for an encoder-decoder."""
    if model.config.encoder is not None:
        programs = "jspec transcribe" if model.config.encoder.is_audio else "jspec generate"
        raise InputError(
            f"expected a decoder alone {where}, got {model.name}, an encoder-decoder, with which "
            f"{programs} answers"
        )
