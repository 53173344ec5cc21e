"""A prompt to ids."""

import pytest

from jspec.common.errors import InputError
from jspec.generation.encode_prompt import encode_conversation, encode_prompt
from jspec.weights.resolver import load_model
from tests.tiny_models import save_folder, target


def test_ids_are_taken_as_they_are():
    """Guards against ids that are encoded once more, and numpy's integers among them."""
    assert encode_prompt(target(), [5, 6], chat=None, system=None) == [5, 6]
    assert encode_prompt(target(), (5,), chat=False, system=None) == [5]


@pytest.mark.parametrize("options", [{"chat": True}, {"system": ""}, {"system": "be kind"}])
def test_ids_with_a_template_are_refused(options):
    """Guards against a system message that is dropped in silence."""
    with pytest.raises(InputError, match="token ids is taken as it is"):
        encode_prompt(target(), [5, 6], **{"chat": None, "system": None} | options)


def test_a_conversation_of_one_turn_is_a_prompt():
    """Guards against two ways to write the first turn."""
    ids = encode_conversation(target(), ["ab"], [], chat=False)
    assert ids == encode_prompt(target(), "ab", chat=False, system=None)


def test_a_conversation_without_a_template_is_plain_text():
    """Guards against an answer that is left out, or turns glued together."""
    ids = encode_conversation(target(), ["ab", "cd"], ["xy"], chat=None)
    assert ids == list(b"abxy\n\ncd")


def test_a_conversation_in_a_template(tmp_path):
    """Guards against roles mixed up, and a second BOS."""
    template = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}[a]"
    model = load_model(str(save_folder(tmp_path / "tiny", template=template)))
    ids = encode_conversation(model, ["ab", "cd"], ["xy"], chat=None, system="be kind")
    assert model.tokenizer.decode(ids) == "[s]be kind[u]ab[a]xy[u]cd[a]"


def test_an_empty_turn_is_refused():
    """Guards against an answer to nothing."""
    with pytest.raises(InputError, match="expected a prompt, got an empty text"):
        encode_conversation(target(), ["ab", ""], ["xy"], chat=None)
