"""Sound files, spectrograms, timestamps, and transcripts of tiny Whispers."""

import dataclasses
import wave

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jspec.audio import RATE, Transcriber, log_mel, read_wav
from jspec.audio.timestamps import SpecialTokens, timestamp_processor
from jspec.audio.transcriber import processors_of
from jspec.common.errors import InputError
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.weights import Tokenizer
from jspec.weights.hf import load_hf
from jspec.weights.resolver import LoadedModel
from tests.cases import slow_unless
from tests.models.encoder_decoder_checkpoints import VOCAB, make_checkpoint
from tests.tiny_models import make_model

NAMES = (
    "endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "nospeech",
    "notimestamps",
)  # fmt: skip
END, START, FIRST = 27, 28, 35


def make_tokenizer():
    """Returns a tokenizer of 27 letters, the special tokens of a Whisper, and timestamps."""
    words = [chr(ord("a") + i) for i in range(END)] + [f"<|{name}|>" for name in NAMES]
    words += [f"<|{0.02 * i:.2f}|>" for i in range(VOCAB - FIRST)]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, words[0])
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens([tokenizers.AddedToken(word, special=True) for word in words[END:]])
    return Tokenizer(backend, special_tokens={})


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """Returns a tiny Whisper whose windows are half a second long."""
    folder = tmp_path_factory.mktemp("whisper")
    make_checkpoint("whisper", folder)
    config, params = load_hf(folder, "float32")
    return LoadedModel(config, params, make_tokenizer(), "whisper")


def write(path, samples, *, rate=RATE, channels=1, width=2):
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return path


def make_sound(seconds, seed=0):
    """Returns a sound that changes every tenth of a second."""
    rng = np.random.default_rng(seed)
    count = round(seconds * RATE)
    tones = np.repeat(rng.uniform(200, 4000, count // 1600 + 1), 1600)[:count]
    sound = np.sin(np.cumsum(2 * np.pi * tones / RATE)) + 0.1 * rng.normal(size=count)
    return (0.3 * sound).astype(np.float32)


def test_samples_are_read(tmp_path):
    """Little-endian, from -1 to 1."""
    samples = np.array([0, 16384, -32768, 32767], "<i2")
    expected = [0.0, 0.5, -1.0, 32767 / 32768]
    assert read_wav(write(tmp_path / "a.wav", samples)).tolist() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 44_100}, "expected 16000 samples a second, got 44100; `ffmpeg"),
        ({"channels": 2}, "expected one channel, got 2"),
        ({"width": 1}, "expected 16-bit samples, got 8-bit"),
        ({"count": 0}, "expected sound of above 0 s and up to 24 hours, got 0 s"),
        ({"cut": 10}, "expected 100 samples as its header says, got 95"),
        ({"cut": 230}, "expected a WAV file of"),
        ({"cut": 244}, "expected a WAV file of"),
    ],
    ids=str,
)
def test_another_sound_is_refused(options, message, tmp_path):
    """A wrong rate, width or length, several channels, a damaged file: a line for each fault."""
    options = dict(options)
    count, cut = options.pop("count", 100), options.pop("cut", 0)
    path = write(tmp_path / "a.wav", np.ones(count, "<i2"), **options)
    if cut:
        path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(InputError, match=message) as error:
        read_wav(path)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"b\.wav: cannot be read: No such file"):
        read_wav(tmp_path / "b.wav")


@pytest.mark.parametrize("num_mels", [80, 128])
def test_spectrograms_are_those_of_transformers(num_mels):
    """Within a float's rounding, silence after the sound included."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    sound = make_sound(2.3)
    extractor = transformers.WhisperFeatureExtractor(feature_size=num_mels)
    theirs = extractor(sound, sampling_rate=RATE, return_tensors="np").input_features[0]
    ours = log_mel(np.pad(sound, (0, 30 * RATE - len(sound))), num_mels)
    np.testing.assert_allclose(ours, theirs.T, atol=2e-5)


def test_timestamps_are_ruled_as_by_transformers():
    """Random prefixes and logits: the same tokens stay, whatever was written before."""
    torch = pytest.importorskip("torch")
    import transformers

    tokens = SpecialTokens.of(make_tokenizer(), START, VOCAB)
    assert (tokens.end, tokens.first_time, tokens.languages) == (END, FIRST, {"en": 29, "de": 30})
    assert tokens.tasks == {"transcribe": 32, "translate": 31}
    processor, rng = timestamp_processor(tokens), np.random.default_rng(0)
    config = transformers.GenerationConfig(
        no_timestamps_token_id=FIRST - 1, eos_token_id=END, max_initial_timestamp_index=50
    )
    theirs = transformers.generation.logits_process.WhisperTimeStampLogitsProcessor(config, 0)
    states, prefixes, update = [], [], jax.jit(processor.update)
    for _ in range(60):
        prefix = rng.integers(0, END, rng.integers(0, 7))
        is_time = rng.random(len(prefix)) < 0.5
        prefix = np.where(is_time, FIRST + np.sort(rng.integers(0, 26, len(prefix))), prefix)
        state = processor.init(SamplingParams(), prompt=[], stop_ids=[], vocab_size=VOCAB)
        state = jax.tree.map(lambda leaf: leaf[None], state)
        for token in prefix:
            state = update(state, jnp.array([token], jnp.int32))
        states.append(state)
        prefixes.append(prefix)
    logits = (3 * rng.normal(size=(60, VOCAB))).astype(np.float32)
    stacked = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *states)
    kept = np.asarray(jax.jit(processor.apply)(stacked, jnp.asarray(logits)))
    for row, prefix in enumerate(prefixes):
        ids = torch.tensor(prefix, dtype=torch.long)[None]
        wanted = theirs(ids, torch.tensor(logits[row : row + 1]).clone()).numpy()[0]
        np.testing.assert_array_equal(kept[row], wanted, err_msg=str(prefix))


def test_a_request_for_the_language_is_left_alone():
    """It allows the languages only, none of which is a timestamp."""
    processor = timestamp_processor(SpecialTokens.of(make_tokenizer(), START, VOCAB))
    assert not processor.is_used(SamplingParams(allowed_token_ids=(29, 30)))


def transcribe(generator, sound, settings, language=None):
    transcriber = Transcriber(generator, language)
    windows = list(transcriber.run(sound, settings))
    segments = [segment for window in windows for segment in window.segments]
    return segments, [window.result for window in windows], transcriber.language


@pytest.fixture(scope="module")
def plain(whisper):
    return Generator(whisper, drafter="none", processors=processors_of(whisper))


@pytest.fixture(scope="module")
def drafted_by(whisper):
    """Returns a function that makes a Generator with two drafts of another model."""
    options = {"num_draft_tokens": 2, "acceptance": "coupled", "processors": processors_of(whisper)}
    first = Generator(whisper, whisper, drafter="model", **options)

    def make(draft):
        generator = Generator(whisper, draft, drafter="model", **options)
        generator.engine = first.engine  # weights are data
        return generator

    return make


def test_drafts_change_no_transcript(whisper, drawn, drafted_by):
    """Several windows, timestamps in order, nothing that was suppressed."""
    sound, settings, segments, results, language = drawn
    drafted, drafted_results, _ = transcribe(drafted_by(whisper), sound, settings, language)
    assert drafted == segments
    assert all(result.stats.acceptance_rate == 1.0 for result in drafted_results)
    assert len(results) > 2
    written = [token_id for result in results for token_id in result.token_ids]
    assert not {5, START, *range(29, FIRST)} & {*written}
    assert all(result.token_ids[0] >= FIRST for result in results)
    times = [(segment.start, segment.end) for segment in segments]
    assert times == sorted(times)
    assert all(start <= end <= 2.3 for start, end in times)


@pytest.fixture(scope="module")
def drawn(plain):
    """Returns a sound, settings that draw, and plain decoding's segments, results and language."""
    sound = make_sound(1.7)
    settings = SamplingParams(max_new_tokens=12, temperature=1.0, seed=11)
    return sound, settings, *transcribe(plain, sound, settings)


@pytest.mark.parametrize(
    ("drafter", "number", "options"),
    [
        ("model", 2, {"noise": 0.02}),
        slow_unless(False, "prompt_lookup", 3, {}),
        slow_unless(False, "model", 1, {"noise": 0.02}),
        slow_unless(False, "model", 4, {"noise": 0.02}),
        slow_unless(False, "suffix", 2, {}),
        slow_unless(False, "layer_skip", 3, {"draft_layers": 1}),
        slow_unless(False, "model", 3, {"noise": 0.02, "tree_depth": 2}),
    ],
    ids=str,
)
def test_coupled_transcripts_are_those_of_plain_decoding(
    whisper, drawn, drafted_by, drafter, number, options
):
    """One text a seed, timestamps and suppressed tokens included, whatever drafts."""
    sound, settings, _, results, language = drawn
    expected = [result.token_ids for result in results]
    options, draft = dict(options), None
    if noise := options.pop("noise", 0.0):
        rng = np.random.default_rng(1)
        params = jax.tree.map(lambda x: x + noise * rng.normal(size=x.shape), whisper.params)
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        draft = dataclasses.replace(whisper, params=params, name="draft")
    if (drafter, number, options) == ("model", 2, {}):
        generator = drafted_by(draft)
    else:
        generator = Generator(
            whisper, draft, drafter=drafter, num_draft_tokens=number, acceptance="coupled",
            processors=processors_of(whisper), **options,
        )  # fmt: skip
    _, results, _ = transcribe(generator, sound, settings, language)
    assert [result.token_ids for result in results] == expected
    assert sum(result.stats.num_proposed for result in results) > 0
    assert len({tuple(ids) for ids in expected}) > 1


def test_windows_are_cut_where_segments_end(whisper):
    """A segment that is not finished is read again; the last one may be."""
    transcriber = Transcriber(Generator(whisper, drafter="none"), "en")
    time = lambda i: FIRST + i  # noqa: E731
    first, second = [time(0), 1, 2, time(10)], [time(12), 3, time(20)]
    for ids, ends, advance in (
        ([*first, *second], [(1.0, 1.2), (1.24, 1.4)], 50),  # both are finished
        ([*first, time(12), 3], [(1.0, 1.2)], 20),  # the second is not
        ([*first, *second[:2]], [(1.0, 1.2)], 20),
        (first, [(1.0, 1.2)], 50),
        ([time(0), 1], [(1.0, 1.5)], 50),  # no end: that of the sound
        ([time(0)], [], 50),
    ):
        segments, frames = transcriber._split(ids, 1.0, 50)
        got = [(round(s.start, 6), round(s.end, 6)) for s in segments]
        assert (got, frames) == (ends, advance), ids


def test_what_does_not_hear_is_refused(whisper):
    """A text for a Whisper, sound for a decoder, a language or a task that there is not."""
    generator = Generator(whisper, drafter="none")
    for request, message in (
        (Request("hello"), "whisper hears: expected sound"),
        (Request("hello", source=np.zeros([50, 8])), "prompt of a model that hears as token ids"),
        (Request([START], source=np.zeros([49, 8])), r"a spectrogram of \[50, 8\].*\(49, 8\)"),
        (Request([START], source=np.full([50, 8], np.nan)), "a spectrogram of finite numbers"),
    ):
        with pytest.raises(InputError, match=message):
            generator.check(request)
    with pytest.raises(InputError, match="expected a model that hears"):
        processors_of(make_model())
    with pytest.raises(InputError, match="language among en, de"):
        Transcriber(generator, "zz")
    with pytest.raises(InputError, match="task among transcribe, translate"):
        Transcriber(generator, "en", "sing")
    config = dataclasses.replace(whisper.config, vocab_size=51_864)
    english = SpecialTokens.of(whisper.tokenizer, START, config.vocab_size)
    assert not english.languages
    assert not english.tasks
