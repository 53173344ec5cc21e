"""Sound from WAV files: one channel of 16-bit samples, 16,000 a second, by the standard library."""

import os
import wave

import numpy as np
from jaxtyping import Float32

from jspec.common.errors import InputError

RATE = 16_000  # samples a second, which models that hear expect
_BYTES = 2  # of a sample
_MAX_HOURS = 24


def read_wav(path: str | os.PathLike[str]) -> Float32[np.ndarray, "samples"]:
    """Returns the samples of a WAV file, from -1 to 1.

    Raises:
      InputError: no such file, none of WAV, one with several channels, another rate or width, a
        damaged file, a file without sound, or longer than a day; in a line.
    """
    name = os.fspath(path)
    try:
        with wave.open(name, "rb") as file:
            _check(name, file.getparams())
            count = file.getnframes()
            data = file.readframes(count)
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror}") from None
    except (wave.Error, EOFError) as error:
        why = str(error) or "it ends too early"
        raise InputError(
            f"{name}: expected a WAV file of whole samples, got another ({why})"
        ) from None
    if len(data) != count * _BYTES:
        missing = f"{count} samples as its header says, got {len(data) // _BYTES}"
        raise InputError(f"{name}: expected {missing}")
    return np.frombuffer(data, "<i2").astype(np.float32) / 2**15


def _check(name: str, params: wave._wave_params) -> None:
    seconds = params.nframes / max(params.framerate, 1)
    for what, wanted, got in (
        ("one channel", 1, params.nchannels),
        ("16-bit samples", _BYTES, params.sampwidth),
        (f"{RATE} samples a second", RATE, params.framerate),
    ):
        if got != wanted:
            got = {"16-bit samples": f"{8 * params.sampwidth}-bit"}.get(what, got)
            raise InputError(
                f"{name}: expected {what}, got {got}; `ffmpeg -i {name} -ac 1 -ar {RATE} "
                "-sample_fmt s16 new.wav` converts it"
            )
    if not 0 < seconds <= _MAX_HOURS * 3600:
        raise InputError(
            f"{name}: expected sound of above 0 s and up to {_MAX_HOURS} hours, got {seconds:.0f} s"
        )
