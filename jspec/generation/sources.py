"""Requests to encoder-decoders: what the encoder reads, and what the decoder begins with."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec.common.errors import InputError, whole_number
from jspec.generation.prompts import encode_prompt
from jspec.generation.request import Request
from jspec.models.config import EncoderConfig
from jspec.weights.resolver import LoadedModel


def read_prompt(
    target: LoadedModel, request: Request, *, chat: bool | None, system: str | None
) -> tuple[list[int], np.ndarray | None]:
    """Returns the token ids with which the decoder's text begins, and the encoder's source.

    Of a decoder alone the first are the prompt's, and there is no source.

    Raises:
      InputError: see `encode_prompt`; or a source that the model cannot read.
    """
    encoder = target.config.encoder
    if encoder is None:
        if request.source is not None:
            raise InputError(f"expected no source, as {target.name} has no encoder; got one")
        return encode_prompt(target, request.prompt, chat=chat, system=system), None
    if encoder.is_audio:
        if request.source is None:
            raise InputError(f"{target.name} hears: expected sound, as `jspec transcribe` reads it")
        if isinstance(request.prompt, str):
            raise InputError("expected the prompt of a model that hears as token ids, got a text")
        prompt = encode_prompt(target, request.prompt, chat=chat, system=system)
        return prompt, _check_spectrogram(encoder, request.source)
    if request.source is None:
        source = encode_text(target, request.prompt, chat=chat, system=system)
        return [encoder.start_id], _check_text(encoder, source)
    prompt = encode_prompt(target, request.prompt, chat=chat, system=system)
    return prompt, _check_text(encoder, request.source)


def encode_text(
    target: LoadedModel, prompt: str | Sequence[int], *, chat: bool | None, system: str | None
) -> list[int]:
    """Returns the token ids of a prompt, see `encode_prompt`; of a source with its end."""
    ids, encoder = encode_prompt(target, prompt, chat=chat, system=system), target.config.encoder
    is_source = encoder is not None and not encoder.is_audio
    return _with_end(target, ids) if is_source and isinstance(prompt, str) else ids


def _with_end(target: LoadedModel, source: Sequence[int]) -> list[int]:
    """Returns a text's ids with the end that a model's sources have, once."""
    end = target.config.eos_ids[:1]
    return [*source] if tuple(source[-1:]) == end else [*source, *end]


def _check_text(encoder: EncoderConfig, source: Any) -> np.ndarray:
    if isinstance(source, str) or not np.iterable(source):
        raise InputError(f"expected the source as a list of token ids, got {source!r}")
    ids = [whole_number("a source's token id", token_id) for token_id in source]
    if not 1 <= len(ids) <= encoder.max_len:
        most = f"a source of 1 to {encoder.max_len} tokens, which the encoder reads"
        raise InputError(f"expected {most}, got {len(ids)}")
    return np.array(ids, np.int64)


def _check_spectrogram(encoder: EncoderConfig, source: Any) -> np.ndarray:
    wanted = 2 * encoder.max_len, encoder.num_mels
    got = getattr(source, "shape", source)
    if not isinstance(source, np.ndarray) or source.shape != wanted:
        raise InputError(f"expected a spectrogram of {list(wanted)}, frames and mels; got {got}")
    if not np.isfinite(source).all():
        raise InputError("expected a spectrogram of finite numbers, got others")
    return source.astype(np.float32)
