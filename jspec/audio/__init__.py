"""Speech to text: sound files, their spectrograms, and transcripts by an encoder-decoder."""

from jspec.audio.sound import RATE, log_mel, read_wav
from jspec.audio.transcriber import Segment, Transcriber

__all__ = ["RATE", "Segment", "Transcriber", "log_mel", "read_wav"]
