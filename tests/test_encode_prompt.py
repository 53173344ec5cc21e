"""A prompt to ids."""

import pytest

from jspec.encode_prompt import encode_prompt
from jspec.errors import InputError
from tests.tiny_models import target


def test_ids_are_taken_as_they_are():
    """Guards against ids that are encoded once more, and numpy's integers among them."""
    assert encode_prompt(target(), [5, 6], chat=None, system=None) == [5, 6]
    assert encode_prompt(target(), (5,), chat=False, system=None) == [5]


@pytest.mark.parametrize("options", [{"chat": True}, {"system": ""}, {"system": "be kind"}])
def test_ids_with_a_template_are_refused(options):
    """Guards against a system message that is dropped in silence."""
    with pytest.raises(InputError, match="token ids is taken as it is"):
        encode_prompt(target(), [5, 6], **{"chat": None, "system": None} | options)
