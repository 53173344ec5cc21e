"""Sound from WAV files, by the standard library, and its log-mel spectrogram.

That is as Whisper reads it (arXiv 2212.04356, section 2.2):

    samples ─► frames of 25 ms, one every 10 ms ─► power of each frequency ─► mel bands ─► log10

The bands are Slaney's: evenly spaced up to 1 kHz and logarithmically above, as triangles of one
area. What is more than 8 below the loudest band is raised to that (80 dB), and all of it is scaled
to about -1 to 1.
"""

import functools
import os
import wave

import numpy as np
from jaxtyping import Float32

from jspec.common.errors import InputError

RATE = 16_000  # samples a second, which models that hear expect
_BYTES = 2  # of a sample
_MAX_HOURS = 24
HOP = 160  # samples between frames
_FRAME = 400  # samples of one
_FLOOR = 1e-10
_RANGE = 8.0
_BLOCK = 6000  # frames computed at a time: a minute
# Slaney's scale: 15 mels are 1 kHz, and from there on 27 mels multiply a frequency by 6.4.
_LINEAR_HZ, _LINEAR_MELS, _STEP = 1000.0, 15.0, np.log(6.4) / 27.0


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


def log_mel(
    samples: Float32[np.ndarray, "samples"], num_mels: int
) -> Float32[np.ndarray, "frames mels"]:
    """Returns the spectrogram of a sound: a frame for each whole 160 of its samples."""
    num_frames = len(samples) // HOP
    # Frames are centred: the first one begins before the sound, which is mirrored there.
    padded = np.pad(samples.astype(np.float32), _FRAME // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FRAME)[::HOP][:num_frames]
    window = np.hanning(_FRAME + 1)[:-1].astype(np.float32)
    filters = mel_filters(num_mels).astype(np.float32)
    bands = [
        np.square(np.abs(np.fft.rfft(frames[start : start + _BLOCK] * window))).astype(np.float32)
        @ filters.T
        for start in range(0, num_frames, _BLOCK)
    ]
    logs = np.log10(np.maximum(np.concatenate(bands), _FLOOR))
    return ((np.maximum(logs, logs.max() - _RANGE) + 4.0) / 4.0).astype(np.float32)


@functools.cache
def mel_filters(num_mels: int) -> np.ndarray:
    """Returns what each band takes of each frequency from 0 to 8 kHz, [mels frequencies]."""
    frequencies = np.fft.rfftfreq(_FRAME, 1 / RATE)
    highest = _LINEAR_MELS + np.log(RATE / 2 / _LINEAR_HZ) / _STEP
    corners = _hertz(np.linspace(0.0, highest, num_mels + 2))
    low, centre, high = (corners[i : i + num_mels, None] for i in range(3))
    rising, falling = (frequencies - low) / (centre - low), (high - frequencies) / (high - centre)
    return np.maximum(np.minimum(rising, falling), 0.0) * (2.0 / (high - low))


def _hertz(mels: np.ndarray) -> np.ndarray:
    above = np.maximum(mels - _LINEAR_MELS, 0.0)
    return np.minimum(mels, _LINEAR_MELS) * (_LINEAR_HZ / _LINEAR_MELS) * np.exp(_STEP * above)
