"""Speech to text: sound files, their spectrograms, and transcripts by an encoder-decoder."""

from jspec.audio.spectrogram import log_mel
from jspec.audio.transcriber import Segment, Transcriber
from jspec.audio.wav import RATE, read_wav

__all__ = ["RATE", "Segment", "Transcriber", "log_mel", "read_wav"]
