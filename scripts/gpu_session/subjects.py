"""What is measured: the shapes of Llama 3.2 with random weights, and a tiny pair for exactness."""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Iterable

import jax

from jspec.common.errors import InputError
from jspec.common.user_cache import cache_dir
from jspec.generation.request import SamplingParams
from jspec.lab.auditing.subject import Subject
from jspec.lab.auditing.subject import cast as cast_model
from jspec.models import PRESETS, DecoderConfig
from jspec.weights.published import MODELS, PublishedModel
from jspec.weights.random_weights import random_params
from jspec.weights.resolver import LoadedModel
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.tiny_models import CONFIG, make_model, peaked_params

SIZES = "1b", "3b"
_REHEARSED = DecoderConfig(  # sizes that kernels for few tokens take
    vocab_size=512, embed_dim=64, hidden_dim=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=32, max_seq_len=4352,
)  # fmt: skip
_PIECE = 1 << 24


def shape_of(size: str, *, is_rehearsal: bool) -> DecoderConfig:
    """Returns the shape of Llama-3.2-1B or -3B, or a tiny shape. No token ends a text."""
    config = _REHEARSED if is_rehearsal else PRESETS[f"llama3.2-{size}"]
    return dataclasses.replace(config, eos_ids=())


def random_model(
    config: DecoderConfig, name: str, *, quantization: str | None = None
) -> LoadedModel:
    """Returns a model of random weights in bfloat16, or rounded."""
    params = random_params(config, 0, "bfloat16", quantization)
    tokenizer = ByteTokenizer(config.vocab_size, config.bos_id, config.eos_ids)
    return LoadedModel(config, params, tokenizer, name, True, quantization)


@functools.cache
def llama(size: str, *, is_rehearsal: bool, quantization: str | None = None) -> LoadedModel:
    """Returns the model of a size, the same one at every call."""
    config = shape_of(size, is_rehearsal=is_rehearsal)
    return random_model(config, f"random:llama3.2-{size}", quantization=quantization)


def peaked_subject(rule: str, settings: SamplingParams, dtype: str = "float32") -> Subject:
    """Returns a tiny pair with peaked distributions, of which the draft is the target disturbed."""
    config = dataclasses.replace(CONFIG, num_layers=1)
    target, draft = (
        cast_model(make_model(config, params=peaked_params(config, disturbance=size)), dtype)
        for size in (0.0, 0.05)
    )
    return Subject(target, draft, "model", 2, rule, settings)


def join_models(folder: pathlib.Path) -> list[str]:
    """Puts published models into jspec's cache, from whole files or from parts of them.

    The parts of FILE are FILE.00, FILE.01 and so on, as `split -b 40M -d FILE FILE.` makes them.
    Length and checksum are compared before the file gets its name.

    Returns:
      A line for each model of which the folder holds anything: what became of it.

    Raises:
      InputError: the folder is none, or what is there has another checksum.
    """
    check_models(str(folder))
    lines = []
    for model in MODELS.values():
        whole = folder / model.file
        parts = [whole] if whole.is_file() else sorted(folder.glob(f"{model.file}.[0-9][0-9]"))
        if parts:
            lines.append(f"{model.name}: {_join(model, parts)}")
    return lines


def check_models(folder: str) -> None:
    """Refuses what is no folder as --models."""
    if not pathlib.Path(folder).is_dir():
        raise InputError(f"expected a folder in --models, got {folder}")


def check_backend(*, is_rehearsal: bool) -> str:
    """Returns the name of JAX's backend: a GPU's, except in a rehearsal.

    Raises:
      InputError: there is no GPU that JAX can use.
    """
    backend = jax.default_backend()
    if backend != "gpu" and not is_rehearsal:
        raise InputError(
            f"expected a GPU that JAX can use, or --rehearse; its backend is {backend}"
        )
    return backend


def has_model(name: str) -> bool:
    """Returns whether a published model is in jspec's cache."""
    return (cache_dir() / "models" / MODELS[name].file).is_file()


def _join(model: PublishedModel, parts: list[pathlib.Path]) -> str:
    goal = cache_dir() / "models" / model.file
    if goal.is_file():
        return "is in the cache already"
    num_bytes = sum(part.stat().st_size for part in parts)
    if num_bytes != model.num_bytes:
        return f"left out: expected {model.num_bytes} bytes, got {num_bytes} in {len(parts)} parts"
    goal.parent.mkdir(parents=True, exist_ok=True)
    digest, new = hashlib.sha256(), goal.with_name(f"{goal.name}.new")
    try:
        with new.open("wb") as file:
            for piece in _pieces(parts):
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() != model.sha256:
            expected = f"{model.file} of SHA-256 {model.sha256}"
            raise InputError(f"expected {expected} in --models, got {digest.hexdigest()}")
        new.replace(goal)
    finally:
        new.unlink(missing_ok=True)
    return f"put together from {len(parts)} parts"


def _pieces(parts: Iterable[pathlib.Path]) -> Iterable[bytes]:
    for part in parts:
        with part.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece
