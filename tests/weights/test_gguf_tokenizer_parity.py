"""Tokenizers from GGUF beside those of transformers: tiny vocabularies, and the real files."""

import dataclasses
import json

import pytest
from tokenizers import normalizers

from jspec.common.user_cache import cache_dir
from jspec.weights.gguf import GgufFile
from jspec.weights.published import MODELS
from jspec.weights.tokenizers.gguf_tokenizer import build_tokenizer
from tests.weights.tokenizer_texts import many_texts
from tests.weights.tokenizers.made import learn_bpe
from tests.weights.toys import GGUF_CONFIG, random_tensors, write_gguf

_CHATS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b"},
     {"role": "user", "content": "<c> & d"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
]  # fmt: skip
# Gemma 3's and Qwen2.5's, without images and tools.
_GEMMA_TEMPLATE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {{- message['content'] | trim }}
    {{- '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}
"""
_QWEN_TEMPLATE = """{%- if tools %}
    {{- tools | tojson }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""  # noqa: E501 (as it is published)


def _byte_level_tokens():
    learnt = learn_bpe(many_texts(20), 700, bos="<s>", eos="</s>")
    model = json.loads(learnt._backend.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<|im_end|>", "<table>"]
    types = [3, 3, *[1] * (len(tokens) - 4), 3, 4]
    merges = [" ".join(pair) for pair in model["merges"]]
    return {
        "ggml.model": "gpt2", "ggml.tokens": tokens, "ggml.token_type": types,
        "ggml.merges": merges, "ggml.bos_token_id": 0, "ggml.eos_token_id": 1,
        "ggml.eot_token_id": None, "ggml.add_bos_token": False, "chat_template": _QWEN_TEMPLATE,
    }  # fmt: skip


def _sentencepiece_tokens(**changes):
    texts = [text.replace(" ", "\u2581") for text in ["\u2581", *many_texts(20)]]
    characters = sorted({c for text in texts for c in text if c.isprintable()})[:150]
    # Every piece of up to five characters, long ones first: each has parts that are pieces too.
    pieces = sorted({
        text[i : i + n] for text in texts[:40] for n in range(2, 6)
        for i in range(0, max(0, len(text) - n + 1), 2)
        if all(c in characters for c in text[i : i + n])
    })[:900]  # fmt: skip
    special = ["<unk>", "<s>", "</s>", "<end_of_turn>"]
    lines = ["\n" * n for n in range(1, 5)]
    tokens = [*special, *(f"<0x{b:02X}>" for b in range(256)), *lines, *pieces, *characters]
    num_normal = len(pieces) + len(characters)
    return {
        "ggml.model": "llama", "ggml.tokens": tokens,
        "ggml.scores": [-1000.0] * 264 + [-float(i) for i in range(num_normal)],
        "ggml.token_type": [2, 3, 3, 3, *[6] * 256, *[4] * 4, *[1] * num_normal],
        "ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.unknown_token_id": 0,
        "ggml.eot_token_id": None, "ggml.add_bos_token": True, "chat_template": _GEMMA_TEMPLATE,
    } | changes  # fmt: skip


def _both(path):
    pytest.importorskip("torch")  # without it transformers reads no GGUF file, nor its tokenizer
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return build_tokenizer(GgufFile(path)), theirs


def _write(tmp_path, tokens, architecture="llama"):
    path = tmp_path / "m.gguf"
    config = dataclasses.replace(GGUF_CONFIG, vocab_size=len(tokens["ggml.tokens"]))
    keys = {"general.architecture": architecture}
    if architecture != "llama":  # which transformers reads the shape of
        metadata = {"block_count": 2, "context_length": 77, "embedding_length": 64,
               "feed_forward_length": 96, "attention.head_count": 4,
               "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
               "rope.freq_base": 1e4}  # fmt: skip
        keys |= {f"{architecture}.{key}": value for key, value in metadata.items()}
    write_gguf(path, config, random_tensors(config), metadata=keys, tokens=tokens)
    return path


def _check_texts(ours, theirs, texts):
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def _check_chats(ours, theirs):
    for messages in _CHATS:
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.chat_prompt(messages) == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen2", "tekken", "dbrx", "llama-bpe", "gpt-2"])
def test_byte_level_is_as_in_transformers(tmp_path, kind):
    """Guards against words cut in other places, control tokens spelt out, and a lost NFC."""
    ours, theirs = _both(_write(tmp_path, _byte_level_tokens() | {"ggml.pre": kind}))
    if kind == "qwen2":  # as in Qwen's own tokenizer.json, which transformers does not see here
        theirs.backend_tokenizer.normalizer = normalizers.NFC()
    _check_texts(ours, theirs, many_texts())
    _check_chats(ours, theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ["gemma3", "phi3"])
def test_sentencepiece_is_as_in_transformers(tmp_path, architecture):
    """Guards against merges in another order, bytes, prefixes and runs of newlines.

    Phi-3's stands for Llama 2 and Mistral, which add a space before a text as it does.
    """
    is_gemma = architecture == "gemma3"
    tokens = _sentencepiece_tokens(**({"ggml.add_space_prefix": False} if is_gemma else {}))
    ours, theirs = _both(_write(tmp_path, tokens, architecture))
    _check_texts(ours, theirs, many_texts())
    _check_chats(ours, theirs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b-instruct", "gemma-3-270m"])
def test_published_tokenizers_are_as_in_transformers(name):
    """Guards against any slip on the real vocabularies; needs the files in the user's cache."""
    path = cache_dir() / "models" / MODELS[name].file
    if not path.is_file():
        pytest.skip(f"{name} is not in the cache")
    ours, theirs = _both(path)
    if name.startswith("qwen"):
        theirs.backend_tokenizer.normalizer = normalizers.NFC()
        assert (ours.vocab_size, ours.eos_ids) == (151_665, (151_645, 151_643))
        _check_chats(ours, theirs)
    else:
        assert (ours.vocab_size, ours.eos_ids) == (262_144, (1, 106))
    _check_texts(ours, theirs, many_texts())
