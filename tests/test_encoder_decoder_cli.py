"""`jspec.generate` with a T5 and `jspec.transcribe` with a Whisper, as users call them."""

import json

import pytest
import tokenizers

from jspec.generation.request import SamplingParams
from jspec.generation.result import Result
from jspec.weights import Tokenizer
from tests.audio.test_audio import make_sound, make_tokenizer, write
from tests.models.encoder_decoder_checkpoints import VOCAB, make_checkpoint
from tests.programs import check_refusal, environment, run_many

_USUAL = ("--dtype=float32", "--max_new_tokens=8", "--num_draft_tokens=2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns folders of a T5 and a Whisper with tokenizers, and one of sounds."""
    root = tmp_path_factory.mktemp("models")
    make_checkpoint("t5 1.1", root / "t5")
    words = [f"w{i}" for i in range(VOCAB)]
    words[:3] = ["<pad>", "<unk>", "</s>"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    Tokenizer(backend, special_tokens={"eos_token": "</s>"}).save(root / "t5")
    make_checkpoint("whisper", root / "whisper")
    make_tokenizer().save(root / "whisper")
    generation = {"suppress_tokens": [5], "begin_suppress_tokens": [6]}
    (root / "whisper" / "generation_config.json").write_text(json.dumps(generation))
    samples = (make_sound(1.2) * 2**15).astype("<i2")
    write(root / "good.wav", samples)
    write(root / "fast.wav", samples, rate=44_100)
    return root


@pytest.mark.slow
def test_texts_go_through_the_encoder(folders, tmp_path, compile_cache):
    """The prompt is the source; drafts change nothing; sources that are too long, and servers."""
    target, home = f"--target={folders / 't5'}", tmp_path / "home"
    usual = [target, "--dtype=float32", "--max_new_tokens=12", "--prompt=w7 w8 w9 w10"]
    files = [tmp_path / "plain.jsonl", tmp_path / "drafted.jsonl"]
    env = environment(compile_cache, home)
    plain, drafted, long, cut, *_ = run_many(
        "jspec.generate",
        [
            [*usual, "--drafter=none", f"--output_json={files[0]}"],
            [*usual, "--num_draft_tokens=3", f"--output_json={files[1]}"],
            [target, "--drafter=none", "--prompt=" + "w7 " * 600],
            [target, "--drafter=none", "--max_seq_len=16", "--prompt=w7 w8", "--nostats"],
        ],
        env=env,
    )
    assert plain[0] == drafted[0] == 0, (plain, drafted)
    assert plain[1] == drafted[1]
    records = [json.loads(path.read_text()) for path in files]
    assert records[0]["token_ids"] == records[1]["token_ids"]
    assert records[0]["prompt_token_ids"] == [3]
    assert "a source of 1 to 512 tokens, which the encoder reads, got 601" in check_refusal(*long)
    assert cut[0] == 0
    assert cut[2] == "note: the context of 16 tokens is full: the answer ends there\n"
    whisper = f"--target={folders / 'whisper'}"
    (hears,) = run_many("jspec.generate", [[whisper, "--drafter=none", "--prompt=a"]], env=env)
    assert "hears: expected sound, as `jspec transcribe` reads it" in check_refusal(*hears)


@pytest.mark.parametrize(("reason", "number", "is_cut"), [
    ("length", 3, True), ("length", 4, False), ("eos", 3, False),
])  # fmt: skip
def test_an_answer_is_cut_where_the_context_is_full(reason, number, is_cut):
    """Which both programs tell: the answer then has fewer tokens than were asked for."""
    settings = SamplingParams(max_new_tokens=4)
    result = Result("a", [1], [7] * number, "", reason, settings, stats=None)
    assert result.is_cut_by_context == is_cut


def test_sound_becomes_text(folders, tmp_path, compile_cache):
    """A line a segment, with times; bad sound and models that do not hear are refused."""
    output = tmp_path / "segments.jsonl"
    target, good = f"--target={folders / 'whisper'}", str(folders / "good.wav")
    usual = [good, target, *_USUAL, "--language=de"]
    refused = {
        (good,): "expected a model that hears, such as --target=openai/whisper-base",
        (): "expected a file: jspec transcribe FILE.wav",
        (str(folders / "fast.wav"), target): "expected 16000 samples a second, got 44100",
        (good, f"--target={folders / 't5'}"): "expected a model that hears, such as a Whisper",
        (good, target, "--language=zz"): "expected language among en, de; got 'zz'",
    }
    done, *others = run_many(
        "jspec.transcribe",
        [[*usual, f"--output_json={output}"], *map(list, refused)],
        env=environment(compile_cache, tmp_path / "home"), max_arguments=1,
    )  # fmt: skip
    assert done[0] == 0, done
    segments = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(segments) == len(done[1].splitlines()) > 0
    assert all(line.startswith("[") for line in done[1].splitlines())
    assert "windows, " in done[2]
    for outcome, message in zip(others, refused.values(), strict=True):
        assert message in outcome[2], outcome
        assert outcome[0] != 0
        assert "Traceback" not in outcome[2]


@pytest.mark.slow
def test_times_can_be_left_out(folders, tmp_path, compile_cache):
    """And the model may say the language."""
    target = f"--target={folders / 'whisper'}"
    flags = [str(folders / "good.wav"), target, *_USUAL, "--notimestamps"]
    env = environment(compile_cache, tmp_path / "home")
    (done,) = run_many("jspec.transcribe", [flags], env=env, max_arguments=1)
    assert done[0] == 0, done
    assert not any(line.startswith("[") for line in done[1].splitlines())
