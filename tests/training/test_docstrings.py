"""The corpus that every machine has."""

import pytest

from jspec.common.errors import InputError
from jspec.training.docstrings import read_docstrings

_FILES = {
    "b/two.py": '"""Two."""\n\ndef f():\n    """Says f."""\n\nclass C:\n    """Two."""\n',
    "a.py": '"""One é."""\n',
    "broken.py": '"""Broken."""\nprint "no"\n',
    "half.py": '"""Half: \\ud800."""\n',
    "latin.py": b'"""\xe9"""\n',
    "odd.py": '"""Odd."""\n"\\d"\n',
    "test/test_a.py": '"""A test."""\n',
    "site-packages/other.py": '"""Another."""\n',
}


@pytest.fixture
def folder(tmp_path):
    for name, content in _FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path


def test_what_is_taken_and_in_which_order(folder):
    """Guards against tests, installed packages, a text twice, and files that cannot be read."""
    texts = ["One é.", "Two.", "Says f.", "Odd."]
    sizes = [len(text.encode()) for text in texts]
    for number in range(1, 5):
        assert read_docstrings(sum(sizes[:number]), folder) == texts[:number]
    assert read_docstrings(sum(sizes) - 1, folder) == texts[:-1]


def test_too_few_are_refused(folder):
    """Guards against a smaller corpus than the one that was asked for."""
    with pytest.raises(InputError, match=r"expected 23 bytes of docstrings in .*, got 22"):
        read_docstrings(23, folder)


def test_the_standard_library_has_enough_for_a_model():
    """The same texts twice, as many as were asked for, none longer than all of them."""
    texts = read_docstrings(50_000)
    assert 49_000 < sum(len(text.encode()) for text in texts) <= 50_000
    assert len(set(texts)) == len(texts) > 100
    assert read_docstrings(50_000) == texts
