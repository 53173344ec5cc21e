"""Transcripts of long sound: window after window of 30 s, each a request to a Generator.

    seconds    0                            30                           60
    windows    [ segment | segment | seg... ]
                                   [ segment | segment | ...          ]

A window's transcript says with timestamps where its segments are. Where the last one is not
finished the next window begins at its start, else after the window (arXiv 2212.04356, section 4.5).
Windows are independent requests: no text of one is the prompt of the next, and nothing is decoded
twice at a higher temperature.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from jspec.audio.sound import HOP, RATE, log_mel
from jspec.audio.timestamps import SECONDS, SpecialTokens, timestamp_processor
from jspec.common.errors import InputError, check_among
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.generation.result import Result
from jspec.sampling.settings import Processor
from jspec.weights.resolver import LoadedModel

_FRAMES_A_TIME = round(SECONDS * RATE / HOP)  # spectrogram frames in a timestamp


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of a transcript, mostly a sentence.

    Attributes:
      start: where it begins, in seconds.
      end: and ends.
      text: what is said.
      token_ids: its tokens, timestamps included.
    """

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]


class Window(NamedTuple):
    """What was decoded of one window: its segments and the result of the request."""

    segments: list[Segment]
    result: Result


def processors_of(target: LoadedModel) -> list[Processor]:
    """Returns the processors with which a Generator of that model writes transcripts.

    Raises:
      InputError: the model does not hear.
    """
    tokens, encoder = special_tokens(target), target.config.encoder
    assert encoder is not None
    return [timestamp_processor(tokens, encoder.never_first_ids)]


def special_tokens(target: LoadedModel) -> SpecialTokens:
    """Returns the special tokens of a model that hears; raises InputError for another."""
    encoder = target.config.encoder
    if encoder is None or not encoder.is_audio:
        raise InputError(f"expected a model that hears, such as a Whisper; got {target.name}")
    return SpecialTokens.of(target.tokenizer, encoder.start_id, target.config.vocab_size)


class Transcriber:
    """Writes transcripts with a Generator that has `processors_of` its target.

    Args:
      generator: the models and the drafter.
      language: such as "en"; None has the model say it, from the first window.
      task: "transcribe", or "translate" for a text in English.

    Raises:
      InputError: a model that does not hear, or a language or task that it does not know.
    """

    def __init__(
        self, generator: Generator, language: str | None = None, task: str = "transcribe"
    ) -> None:
        """Prepares the prompt; nothing is computed yet."""
        self._generator, self._target = generator, generator.target
        self._tokens = special_tokens(self._target)
        tokens = self._tokens
        check_among("task", task, ("transcribe", "translate"))
        if task != "transcribe" and not tokens.tasks:
            raise InputError(f"{self._target.name} knows English alone: expected task transcribe")
        if language is not None and tokens.languages:
            check_among("language", language, tuple(tokens.languages))
        elif language not in (None, "en"):
            raise InputError(f"{self._target.name} knows English alone: got language {language!r}")
        self.language, self._task = language, task

    def run(
        self, samples: Float32[np.ndarray, "samples"], settings: SamplingParams
    ) -> Iterator[Window]:
        """Yields the windows of a sound, 16,000 samples a second, in order.

        `settings` say how tokens are drawn; the language is in `language` from the first on.
        """
        encoder = self._target.config.encoder
        assert encoder is not None
        size = 2 * encoder.max_len
        # As much silence follows as the last window may reach over.
        frames = log_mel(np.pad(samples, (0, size * HOP)), encoder.num_mels)
        end, begin = len(samples) // HOP, 0
        forbidden = {*settings.forbidden_token_ids, *encoder.never_ids, *self._tokens.others}
        settings = dataclasses.replace(settings, forbidden_token_ids=tuple(sorted(forbidden)))
        while begin < end:
            source = np.ascontiguousarray(frames[begin : begin + size])
            prompt = self._prompt(source)
            result = self._generator.generate(Request(prompt, settings, source=source))
            written = np.array(result.token_ids, np.int64)
            is_said = (written < self._tokens.end) | (written >= self._tokens.first_time)
            ids = written[is_said].tolist()
            length = min(size, end - begin)
            segments, advance = self._split(ids, begin * HOP / RATE, length)
            yield Window(segments, result)
            begin += advance

    def _prompt(self, source: Float32[np.ndarray, "frames mels"]) -> list[int]:
        """Returns the tokens with which the decoder begins: of language and task, if it has any."""
        tokens = self._tokens
        if not tokens.languages:
            return [tokens.start]
        if self.language is None:
            languages = tuple(tokens.languages.values())
            choices = SamplingParams(max_new_tokens=1, allowed_token_ids=languages)
            said = self._generator.generate(Request([tokens.start], choices, source=source))
            names = {i: name for name, i in tokens.languages.items()}
            self.language = names[said.token_ids[0]]
        return [tokens.start, tokens.languages[self.language], tokens.tasks[self._task]]

    def _split(self, ids: Sequence[int], start: float, length: int) -> tuple[list[Segment], int]:
        """Returns a window's segments, and after how many frames the next window begins.

        `start` is the window's, in seconds, and `length` that of its sound, in frames.
        """
        first = self._tokens.first_time
        is_time = [token_id >= first for token_id in ids]
        cuts = [i for i in range(1, len(ids)) if is_time[i] and is_time[i - 1]]
        is_whole = is_time[-2:] == [False, True]  # the last segment is finished
        if not cuts:
            times = [i - first for i in ids if i >= first]
            seconds = times[-1] * SECONDS if times and times[-1] > 0 else length * HOP / RATE
            return self._segments(ids, [len(ids)], start, seconds), length
        if is_whole:
            return self._segments(ids, [*cuts, len(ids)], start, 0.0), length
        # What is not finished is decoded again, in the next window.
        advance = (ids[cuts[-1] - 1] - first) * _FRAMES_A_TIME
        return self._segments(ids, cuts, start, 0.0), advance or length

    def _segments(
        self, ids: Sequence[int], cuts: Sequence[int], start: float, seconds: float
    ) -> list[Segment]:
        """Returns the segments before each cut; one alone takes `seconds`, if there are any."""
        first, segments, begin = self._tokens.first_time, list[Segment](), 0
        for cut in cuts:
            part = ids[begin:cut]
            begin = cut
            text = self._target.tokenizer.decode([i for i in part if i < self._tokens.end])
            if not text.strip():
                continue
            ends = (
                (0.0, seconds)
                if seconds
                else tuple((part[place] - first) * SECONDS for place in (0, -1))
            )
            segments.append(Segment(start + ends[0], start + ends[1], text, tuple(part)))
        return segments
