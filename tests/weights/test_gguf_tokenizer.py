"""Tokenizers built from GGUF metadata."""

import pathlib
import types

import pytest

from jspec.common.errors import InputError
from jspec.weights.tokenizers.gguf_tokenizer import build_tokenizer
from tests.weights.tokenizers.test_tokenizer import ODD_TEXTS
from tests.weights.toys import byte_level_vocabulary

_SPECIAL = ["<unk>", "<s>", "</s>", "<end>"]
_SPACE = "Ġ"  # byte-level BPE's space


def _byte_level(**changes):
    merged = ["12", "3" + "4", _SPACE + "a", "ab", "abc"]
    merges = ["1 2", "3 4", f"{_SPACE} a", "a b", "ab c"]
    tokens = [*_SPECIAL, *byte_level_vocabulary(), *merged, "<user>"]
    types = [3] * len(_SPECIAL) + [1] * (256 + len(merged)) + [4]
    return {
        "ggml.model": "gpt2", "ggml.pre": "smollm", "ggml.tokens": tokens,
        "ggml.token_type": types, "ggml.merges": merges, "chat_template": "{{ bos_token }}hi",
    } | changes  # fmt: skip


def _sentencepiece(**changes):
    pieces = ["\u2581", "a", "b", "ab", "\u2581ab", "ba"]
    scores = [-9.0, -8.0, -7.0, -1.0, -2.0, -3.0]
    tokens = [*_SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    return {
        "ggml.model": "llama", "ggml.tokens": tokens, "ggml.scores": [0.0] * 260 + scores,
        "ggml.token_type": [2] + [3] * 3 + [6] * 256 + [1] * len(pieces),
    } | changes  # fmt: skip


def _build(tokens):
    """Returns the tokenizer of a file with these keys; `test_gguf` reads such keys from files."""
    ends = {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.eot_token_id": 3}
    metadata = {f"tokenizer.{key}": value for key, value in (ends | tokens).items()}
    return build_tokenizer(types.SimpleNamespace(path=pathlib.Path("m.gguf"), metadata=metadata))


def _pieces(tokenizer, text, **kwargs):
    names = {token_id: token for token, token_id in tokenizer.vocabulary().items()}
    return [names[token_id] for token_id in tokenizer.encode(text, **kwargs)]


@pytest.mark.parametrize(
    "kind", ["smollm", "llama-bpe", "gpt-2", "qwen2", "tekken", "sentencepiece"]
)
def test_decoding_inverts_encoding_and_streams(kind):
    """Whole or in pieces, or by the bytes of tokens; special ones have none."""
    is_spaced = kind == "sentencepiece"  # it puts a space before a text
    tokenizer = _build(_sentencepiece() if is_spaced else _byte_level(**{"ggml.pre": kind}))
    token_bytes = tokenizer.token_bytes()
    assert len(token_bytes) == tokenizer.vocab_size
    assert token_bytes[: len(_SPECIAL)] == [b"<unk>" if is_spaced else b"", b"", b"", b""]
    for text in ODD_TEXTS:
        ids, stream = tokenizer.encode(text), tokenizer.stream()
        assert tokenizer.decode(ids) == text
        assert "".join([stream.push(i) for i in ids]) + stream.flush() == text
        if kind != "qwen2":  # which composes accents
            space = " " if is_spaced and text else ""
            ids = tokenizer.encode(text, add_bos=False)
            assert b"".join(token_bytes[i] for i in ids) == (space + text).encode()


def test_pre_tokenizers_differ_as_their_models_do():
    """Guards against digits joined where SmolLM splits them, and split where Llama 3 joins them."""
    parts = {
        kind: _pieces(_build(_byte_level(**{"ggml.pre": kind})), "1234", add_bos=False)
        for kind in ("smollm", "refact", "qwen2", "tekken", "llama-bpe", "dbrx", "olmo", "gpt-2")
    }
    single, threes, joined = ["1", "2", "3", "4"], ["12", "3", "4"], ["12", "34"]
    assert parts == {
        "smollm": single, "refact": single, "qwen2": single, "tekken": single,
        "llama-bpe": threes, "dbrx": threes, "olmo": joined, "gpt-2": joined,
    }  # fmt: skip
    qwen = _build(_byte_level(**{"ggml.pre": "qwen2"}))  # composes accents
    assert qwen.encode("e\u0301") == qwen.encode("\u00e9")


def test_sentencepiece_merges_follow_the_scores():
    """Guards against merges in the order of the vocabulary, and against a missing space prefix."""
    tokenizer = _build(_sentencepiece())
    assert _pieces(tokenizer, "ab ab", add_bos=False) == ["\u2581ab", "\u2581ab"]
    assert _pieces(tokenizer, "bab", add_bos=False) == ["\u2581", "b", "ab"]
    assert _pieces(tokenizer, "é", add_bos=False) == ["\u2581", "<0xC3>", "<0xA9>"]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (_byte_level(), False),
        (_byte_level(**{"ggml.add_bos_token": True}), True),
        (_byte_level(**{"ggml.pre": "llama-bpe"}), True),
        (_byte_level(**{"ggml.pre": "tekken"}), True),
        (_byte_level(**{"ggml.pre": "qwen2"}), False),
        (_byte_level(**{"ggml.pre": "llama-bpe", "ggml.add_bos_token": False}), False),
        (_sentencepiece(), True),
    ],
)
def test_bos_as_the_file_says_or_its_kind_implies(tokens, expected):
    """Guards against a missing BOS, which ruins Llama's answers, and an unwanted BOS."""
    tokenizer = _build(tokens)
    assert (tokenizer.encode("ab")[0] == 1) == expected
    assert tokenizer.encode("ab", add_bos=False)[0] != 1


def test_special_tokens_and_template_come_from_the_file():
    """Guards against control tokens spelt in letters, or printed."""
    tokenizer = _build(_byte_level())
    assert tokenizer.eos_ids == (2, 3)
    assert tokenizer.chat_prompt([]) == "<s>hi"
    ids = tokenizer.encode("<s>a</s><user>")
    assert [ids[0], ids[2]] == [1, 2]
    assert tokenizer.decode(ids) == "a<user>"


def test_tekken_cuts_at_capitals_and_not_at_slashes():
    """Guards against another model's words, which differ where the texts at hand rarely do."""
    tokens = _byte_level()
    tokens["ggml.tokens"] = [*tokens["ggml.tokens"], "bC", "\u010a/"]
    tokens["ggml.token_type"] = [*tokens["ggml.token_type"], 1, 1]
    tokens["ggml.merges"] = [*tokens["ggml.merges"], "b C", "\u010a /"]
    tekken, llama = (_build(tokens | {"ggml.pre": kind}) for kind in ("tekken", "llama-bpe"))
    text = "bCd.\n/"
    assert _pieces(tekken, text, add_bos=False) == ["b", "C", "d", ".", "\u010a/"]
    assert _pieces(llama, text, add_bos=False) == ["bC", "d", ".", "\u010a", "/"]


def test_words_that_are_tokens_stay_whole_where_the_model_says_so():
    """Guards against a word cut up because no merges lead to it."""
    tokens = _byte_level()
    tokens["ggml.tokens"] = [*tokens["ggml.tokens"][:-1], "xyz"]
    tokens["ggml.token_type"] = [*tokens["ggml.token_type"][:-1], 1]
    for kind, expected in (("tekken", ["xyz"]), ("llama-bpe", ["xyz"]), ("dbrx", ["x", "y", "z"])):
        tokenizer = _build(tokens | {"ggml.pre": kind})
        assert _pieces(tokenizer, "xyz", add_bos=False) == expected


def test_padding_at_the_end_is_no_vocabulary():
    """Guards against untrained rows that could be drawn; what is unused further in stays."""
    tokens = _byte_level()
    tokens["ggml.token_type"][10] = 5
    num_real = len(tokens["ggml.tokens"])
    tokens["ggml.tokens"] = [*tokens["ggml.tokens"], *(f"[PAD{num_real + i}]" for i in range(3))]
    tokens["ggml.token_type"] = [*tokens["ggml.token_type"], 5, 5, 5]
    tokenizer = _build(tokens)
    assert tokenizer.vocab_size == num_real
    assert len(tokenizer.vocabulary()) == num_real


def test_ends_of_a_turn_are_known_by_name():
    """Guards against a chat that runs on because the file names one end of several."""
    extra = ["<end_of_turn>", "<|endoftext|>"]
    tokens = _byte_level()
    tokens["ggml.tokens"] = [*tokens["ggml.tokens"], *extra]
    tokens["ggml.token_type"] = [*tokens["ggml.token_type"], 3, 3]
    turn, document = len(tokens["ggml.tokens"]) - 2, len(tokens["ggml.tokens"]) - 1
    assert _build(tokens).eos_ids == (2, 3, turn)
    padded = tokens | {"ggml.padding_token_id": document}
    assert _build(padded).eos_ids == (2, 3, turn, document)
    tokens["ggml.token_type"] = [*tokens["ggml.token_type"][:-2], 1, 1]  # words like others
    assert _build(tokens).eos_ids == (2, 3)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (_byte_level(**{"ggml.model": "bert"}), "expected a gpt2 or llama tokenizer, got 'bert'"),
        (_byte_level(**{"ggml.pre": "viking"}), "expected a pre-tokenizer among .*got 'viking'"),
        (_byte_level(**{"ggml.merges": ["nonsense words"]}), "tokenizer is damaged"),
        (_byte_level(**{"ggml.token_type": [1, 2]}), "tokenizer is damaged"),
        ({}, "no tokenizer in the file"),
    ],
)
def test_what_cannot_be_built_is_refused(tokens, message):
    """Guards against a tokenizer that almost works."""
    with pytest.raises(InputError, match=message):
        _build(tokens)
