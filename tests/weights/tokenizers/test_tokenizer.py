"""Text to ids and back: encoding, streams, chat templates, comparing vocabularies."""

import pytest

from jspec.common.errors import InputError
from jspec.weights.tokenizers.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from jspec.weights.vocabulary import check_same_tokenizer
from tests.weights.toys import make_backend

ODD_TEXTS = [
    "plain words", "", " leading", "trailing ", "tab\tand\n\nnewlines\r\n", "12345 6.789",
    "你好世界", "한국어 텍스트", "😀 👩‍👩‍👧‍👦 é", 
    "def f(x):\n    return {'a': x ** 2}", "\x00\x01\ufffd",
]  # fmt: skip
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'system' %}\n"
    "{{ raise_exception('no system') }}{% endif %}\n[{{ m.role }}]{{ m.content | tojson }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_tokenizer(**kwargs):
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(make_backend(**kwargs), special_tokens=tokens, chat_template=_TEMPLATE)


@pytest.fixture(params=["byte level", "stand-in"])
def tokenizer(request):
    if request.param == "byte level":
        return make_tokenizer(bos="<s>")
    return ByteTokenizer(300, bos_id=298, eos_ids=(299,))


def test_bytes_of_tokens_add_up_to_the_text(tokenizer):
    """Ends and beginnings have none, and tokens without a text neither."""
    token_bytes = tokenizer.token_bytes()
    assert len(token_bytes) == tokenizer.vocab_size
    assert token_bytes[tokenizer.bos_id] == b""
    for text in ODD_TEXTS:
        ids = tokenizer.encode(text, add_bos=False)
        assert b"".join(token_bytes[i] for i in ids) == text.encode()


def test_decoding_inverts_encoding(tokenizer):
    """Guards against text that changes on its way; `test_text_stream` has streams of any ids."""
    for text in ODD_TEXTS:
        ids = tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_id
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text, add_bos=False) == ids[1:]


def test_special_tokens_print_nothing(tokenizer):
    """Guards against `<s>` and `</s>` in the answer, and in the middle of a character."""
    first, *ids = tokenizer.encode("é!")
    eos = tokenizer.eos_ids[0]
    assert tokenizer.decode([first, *ids, eos]) == "é!"
    stream = tokenizer.stream()
    assert "".join(stream.push(i) for i in [first, *ids, eos]) == "é!"


def test_invalid_unicode_is_refused(tokenizer):
    """Guards against a traceback for a command line that is not UTF-8."""
    with pytest.raises(InputError, match="not valid UTF-8"):
        tokenizer.encode("a\udcff")


def test_no_second_bos():
    """Guards against two BOS when a rendered chat prompt, which begins with BOS, is encoded."""
    tokenizer = make_tokenizer(bos="<s>")
    prompt = tokenizer.chat_prompt([{"role": "user", "content": "hi"}])
    assert prompt.startswith("<s>")
    for add_bos in (True, False):
        ids = tokenizer.encode(prompt, add_bos=add_bos)
        assert ids.count(tokenizer.bos_id) == 1
        assert ids[0] == tokenizer.bos_id


def test_special_ids_in_a_text_become_single_tokens():
    """Guards against `</s>` in a rendered chat being spelt in letters."""
    tokenizer = make_tokenizer()
    assert tokenizer.encode("a</s>")[-1] == 1
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.vocab_size == 258


def test_chat_template_runs_as_in_transformers():
    """Guards against lost trim_blocks, HTML escapes of tojson and a missing generation prompt."""
    messages = [{"role": "user", "content": "<é> & 'x'"}]
    expected = "<s>[user]\"<é> & 'x'\"\n[assistant]"
    assert make_tokenizer().chat_prompt(messages) == expected


def test_chat_template_refusals_are_one_line():
    """Guards against a Jinja traceback when a template raises an exception."""
    tokenizer = make_tokenizer()
    with pytest.raises(InputError, match="refuses the messages: no system"):
        tokenizer.chat_prompt([{"role": "system", "content": ""}])
    tokenizer.chat_template = "{% if %}"
    with pytest.raises(InputError, match="chat template"):
        tokenizer.chat_prompt([])
    tokenizer.chat_template = "{{ ''.__class__.__mro__ }}"
    with pytest.raises(InputError, match="unsafe"):
        tokenizer.chat_prompt([])
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        tokenizer.chat_prompt([])


def test_chat_template_knows_the_date_and_generation_tags():
    """Guards against templates of Llama 3.x (strftime_now) and newer ones (generation) failing."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%Y') }}{% generation %}x{% endgeneration %}"
    text = tokenizer.chat_prompt([])
    assert text[:4].isdigit()
    assert text[4:] == "x"


def test_loading_what_was_saved_is_identity(tmp_path):
    """Guards against a conversion that loses BOS, the chat template or an end id."""
    tokenizer = Tokenizer(
        make_backend(bos="<s>"),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        eos_ids=(7, 1),
        chat_template=_TEMPLATE,
    )
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.vocabulary() == tokenizer.vocabulary()
    assert loaded.special_tokens == tokenizer.special_tokens
    assert loaded.chat_template == _TEMPLATE
    assert loaded.eos_ids == (7, 1)
    for text in ODD_TEXTS:
        assert loaded.encode(text) == tokenizer.encode(text)


def test_folder_spellings(tmp_path):
    """Guards against the dict spelling of tokens, several templates, and eos ids in one file."""
    make_backend(bos="<s>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": false, '
        '"bos_token": {"content": "<s>"}, "chat_template": '
        '[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}'
    )
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (0, (9, 1), "d")
    assert tokenizer.encode("a")[0] != 0
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    (tmp_path / "chat_template.jinja").write_text("own file")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_ids, tokenizer.chat_template) == ((5, 6, 9, 1), "own file")


def test_broken_folders_are_refused(tmp_path):
    """Guards against tracebacks of the tokenizers library."""
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(InputError, match="damaged tokenizer"):
        load_tokenizer(tmp_path)


def test_same_vocabularies_pass_and_padding_is_free():
    """Guards against refusing a draft whose vocabulary is only padded further."""
    same = make_tokenizer()
    check_same_tokenizer(same, make_tokenizer(bos="<s>"))
    check_same_tokenizer(same, make_tokenizer(extra=["[PAD258]", "[PAD259]"]))
    check_same_tokenizer(make_tokenizer(extra=["[PAD258]"]), same)


def test_first_difference_is_named():
    """Guards against drafts whose ids mean other words: they would never be accepted."""
    for other in (make_tokenizer(extra=["more"]), make_tokenizer(special=("<s>", "<end>"))):
        with pytest.raises(
            InputError, match=r"id (258 is no token .*'more'|1 is '</s>' .*'<end>')"
        ):
            check_same_tokenizer(make_tokenizer(), other)


def test_stand_in_marks_ids_that_are_no_bytes():
    """Guards against random models that seem to print nothing."""
    tokenizer = ByteTokenizer(1000, bos_id=500, eos_ids=(501,))
    assert tokenizer.decode([104, 105, 600, 501, 33]) == "hi<600>!"
    assert tokenizer.chat_template is None
    with pytest.raises(InputError, match="no chat template"):
        tokenizer.chat_prompt([])
    with pytest.raises(InputError, match="beyond the vocabulary of 50"):
        ByteTokenizer(50).encode("a")
