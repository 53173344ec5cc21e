"""A few hundred texts on which tokenizers tend to differ."""

import random

from tests.weights.tokenizers.test_tokenizer import ODD_TEXTS

_KINDS = [
    *ODD_TEXTS,
    "  two  ", "12345 6.789 1,000,000 ١٢٣ ⅷ ²½①", "العربية नमस्ते हिन्दी ไทย ภาษา",
    "def f(x):\n    return {'a': x ** 2}\n\n\n\nclass A:\n\tpass\n", "I'm we'LL they'd DON'T 's 'S",
    "<|im_start|>user\nhi<|im_end|>\n", "<start_of_turn>user\nx<end_of_turn>\n", "a" * 50,
    "<b>bold</b><table><tr>", " " * 7 + "x", "\n" * 9 + "x" + "\n" * 31, "\t" * 5 + "x",
    " " * 31 + "y", "Grüße, Straße; naïve café", "\u00a0nbsp\u2003em\u3000ideographic",
    "https://example.com/a?b=c&d=%20", "foo\r\n\r\nbar", "CamelCaseHTTPServer ABC abcDEF//\n",
    "é Å ñ ﬁ",  # letters with their own accents, and a ligature
]  # fmt: skip


def many_texts(num=200):
    """Returns the texts above and mixtures of their characters and words, always the same."""
    source = random.Random(0)
    characters = "".join(_KINDS)
    words = " ".join(_KINDS).split(" ")
    mixed = [
        "".join(source.choice(characters) for _ in range(source.randrange(1, 60)))
        for _ in range(num)
    ]
    joined = [" ".join(source.choices(words, k=source.randrange(1, 30))) for _ in range(num)]
    return [*_KINDS, *mixed, *joined]
