"""Structured output: the automaton against `re`, the device against a walk, kept drafts."""

import json
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions, make_drafter
from jspec.drafters.pattern import PatternDrafter, make_tables, skeleton_pattern
from jspec.generation.request import Request, SamplingParams
from jspec.sampling.patterns import compile_pattern, forced_bytes, token_table, utf8_ranges
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.drafters.rows import spec
from tests.speculation import drive
from tests.tiny_models import make_generator, shared_generator

PATTERNS = [
    r"(ab|a)*c?",
    r"a{2,4}b{0,2}?[^c]",
    r"[a-c]+\d\s?",
    r"(?:é|[^ab])x+",
    r"\W.\w|\D{2}|\S\s",
    r"(?P<name>a|b(c|))*",
    r"[^\n]|😀a*|",
]


def walk(automaton, text):
    """Returns the state behind some bytes, -1 for nowhere."""
    state = 0
    for byte in text:
        state = int(automaton.next_state[state, byte])
        if state < 0:
            return -1
    return state


@pytest.mark.parametrize("pattern", PATTERNS)
def test_automaton_matches_what_re_matches(pattern):
    """Random texts of letters that the patterns are about, of one to four bytes a character."""
    automaton, expected = compile_pattern(pattern), re.compile(pattern, re.ASCII)

    @hypothesis.settings(deadline=None, max_examples=50, derandomize=True, database=None)
    @hypothesis.given(text=st.one_of(
        st.text(alphabet="abcx1é€😀 \n", max_size=7), st.from_regex(expected, fullmatch=True)
    ))  # fmt: skip
    def check(text):
        state = walk(automaton, text.encode(errors="surrogatepass"))
        hypothesis.assume(not re.search("[\ud800-\udfff]", text))
        assert (state >= 0 and bool(automaton.is_end[state])) == bool(expected.fullmatch(text))

    check()


def test_ranges_of_bytes_are_the_encodings_of_ranges_of_characters():
    """Every character near a border of lengths and blocks, in and out."""
    borders = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF]
    near = sorted({c for b in borders for c in (b - 1, b, b + 1) if 0 <= c <= 0x10FFFF})
    near = [c for c in near if not 0xD800 <= c < 0xE000]
    for low in near:
        for high in near:
            actual = list(utf8_ranges(low, high)) if low <= high else []
            for character in near:
                text = chr(character).encode()
                hits = sum(
                    len(ranges) == len(text)
                    and all(a <= byte <= b for (a, b), byte in zip(ranges, text, strict=True))
                    for ranges in actual
                )
                assert hits == (low <= character <= high)


def test_forced_runs():
    """Only where one text can come, and not past an end at which the pattern may stop."""
    automaton = compile_pattern(r'\{"age": [0-9]+, "ok": (true|false)\}')
    runs = {
        text: forced_bytes(automaton, walk(automaton, text.encode()))
        for text in ('{', '{"age": ', '{"age": 4', '{"age": 4,', '{"age": 4, "ok": t',
                     '{"age": 4, "ok": false}')
    }  # fmt: skip
    assert list(runs.values()) == [b'"age": ', b"", b"", b' "ok": ', b"rue}", b""]
    stops = compile_pattern("abc(def)?")
    assert forced_bytes(stops, walk(stops, b"a")) == b"bc"
    assert forced_bytes(stops, walk(stops, b"abc")) == b""


class Syllables(ByteTokenizer):
    """Bytes, and behind them a few tokens of several."""

    PIECES = (b"ab", b"abc", b'"a', b'ge": ', b"", b"")

    def __init__(self):
        super().__init__(256 + len(self.PIECES), eos_ids=(0,))

    def token_bytes(self):
        return [b"", *(bytes([i]) for i in range(1, 256)), *self.PIECES]


def reference_state(automaton, texts, tokens):
    """Walks tokens: one that leads nowhere is tried from the start."""
    state = 0
    for token in tokens:
        methods = []
        for begin in (state, 0):
            here = begin
            for byte in texts[token]:
                here = int(automaton.next_state[here, byte]) if here >= 0 else -1
            methods.append(here if texts[token] else -1)
        state = next((method for method in methods if method >= 0), 0)
    return state


@pytest.mark.parametrize("pattern", [r'x?\{"age": [0-9]+\}', "a(bca)*b{2}"])
def test_the_device_follows_the_text(pattern):
    """Rows of random tokens, in chunks of random lengths, against a plain walk.

    Also the start, at which nothing is forced, and a last token that has not been observed.
    """
    tokenizer = Syllables()
    vocab = tokenizer.vocab_size + 3
    params = make_tables(pattern, tokenizer, vocab_size=vocab, num_draft_tokens=4)
    drafter, automaton = PatternDrafter(4), compile_pattern(pattern)
    texts = [*tokenizer.token_bytes(), b"", b"", b""]
    likely = [i for i, text in enumerate(texts) if text and set(text) <= set(b'abcde{}"g: 12')]
    rng, rows = np.random.default_rng(0), 12
    observe = jax.jit(drafter.observe)
    state, seen = drafter.init(rows, 8), [[] for _ in range(rows)]
    states = set()
    for _ in range(30):
        tokens = rng.choice([*likely, *likely, 0, vocab - 1], (rows, 5)).astype(np.int32)
        counts = rng.integers(0, 6, rows)
        valid = np.arange(5) < counts[:, None]
        state = observe(params, state, tokens, jnp.zeros((rows, 5, 1)), jnp.asarray(valid))
        for row, text in enumerate(seen):
            text.extend(tokens[row, : counts[row]].tolist())
            expected = reference_state(automaton, texts, text)
            assert int(state[row]) == expected
            states.add(expected)
    assert len(states) > 3
    last = rng.choice(likely, rows).astype(np.int32)
    proposal = propose(drafter, params, state, last, limit=3)
    for row, text in enumerate(seen):
        here = reference_state(automaton, texts, [*text, int(last[row])])
        run = forced_bytes(automaton, here) if here else b""
        count = int(proposal.num_tokens[row])
        drafts = b"".join(texts[i] for i in proposal.tokens[row, :count].tolist())
        assert run.startswith(drafts)
        assert count == 3 or drafts == run
    assert int(params.num_forced[0]) == 0


def propose(drafter, params, state, last, limit):
    proposal, after = drive.propose(None, drafter, params, state, last, limit)
    np.testing.assert_array_equal(after, state)
    assert proposal.probs is None
    return proposal


def test_longer_tokens_come_first_where_the_tokenizer_has_no_say():
    """A byte tokenizer says bytes; where a run begins inside a character no text can be encoded."""
    params = make_tables("aéabcabb", Syllables(), vocab_size=300, num_draft_tokens=8)
    inside = walk(compile_pattern("aéabcabb"), "aé".encode()[:2])
    count = int(params.num_forced[inside])
    assert params.forced[inside, :count].tolist() == ["é".encode()[1], 257, 256, ord("b")]


JSON_VALUES = [
    {"name": "", "age": 0, "tags": [1.5e3, True]},
    {"name": 'é "quoted" \\ \n \x7f', "age": -12, "tags": [-0.25, False]},
]


def test_json_skeletons_match_what_json_writes():
    """The layout is the skeleton's own; another kind of value is no match."""
    skeleton = '{"name": "<string>", "age": "<integer>", "tags": ["<number>", "<boolean>"]}\n'
    pattern = skeleton_pattern(skeleton)
    compile_pattern(pattern)
    for value in JSON_VALUES:
        assert re.fullmatch(pattern, json.dumps(value))
        assert re.fullmatch(pattern, json.dumps(value, ensure_ascii=False))
        assert not re.fullmatch(pattern, json.dumps(value, indent=1))
        assert not re.fullmatch(pattern, json.dumps(value | {"age": "1"}))
    assert re.fullmatch(skeleton_pattern('[1, "a.b",\n "<integer>"]'), '[1, "a.b",\n 7]')


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"'pattern' expects pattern \(--draft_pattern\), a regular .*; got neither"),
        ({"pattern": "a", "json_skeleton": "{}"}, "got both"),
        ({"pattern": "ab("}, r"got 'ab\(': missing \), .* at position 2"),
        ({"pattern": "^a"}, "'^a': \\^, \\$ and .* are not supported"),
        ({"pattern": r"(a)\1"}, "references to groups are not supported"),
        ({"pattern": "(?i)a"}, "flags are not supported"),
        ({"pattern": "(?i:a)"}, "flags are not supported"),
        ({"pattern": "a{600}"}, "at most 512 states"),
        ({"pattern": "(((){400}){400}){400}"}, "too large"),
        ({"pattern": "(" * 5000 + ")" * 5000}, "recursion"),
        ({"json_skeleton": "{'a': 1}"}, "expected a JSON skeleton"),
        ({"json_skeleton": " "}, r"JSON skeleton \(--draft_json\), got an empty text"),
        ({"json_skeleton": "3"}, "JSON object or array"),
        ({"json_skeleton": '["<date>"]'}, "placeholders among <string>, .*; got <date>"),
    ],
)
def test_bad_input(options, message):
    """One line that says what is wrong and where."""
    with pytest.raises(InputError, match=message.replace("^a", r"\^a")) as caught:
        make_drafter("pattern", spec(**options)._replace(tokenizer=ByteTokenizer(61)))
    assert "\n" not in str(caught.value)


def test_large_tables_are_refused_before_they_are_built():
    """A large vocabulary allows fewer states."""
    automaton = compile_pattern("a{400}")
    with pytest.raises(InputError, match=r"at most 262 states for a vocabulary of 128000, got 401"):
        token_table(automaton, [b"a"], 128_000)


PROMPT = list(b"say it once")


def test_forced_tokens_of_what_the_target_says_are_kept():
    """Greedy parity, with a pattern of the target's own words that it leaves in the end."""
    request = Request(PROMPT, SamplingParams(max_new_tokens=40))
    answer = shared_generator("none").generate(request).token_ids
    said = "".join(re.escape(chr(token)) for token in answer[4:24])
    # Behind what is said: one text is forced, and it is not what comes.
    options = DrafterOptions(pattern=said + "~~~~")
    drafter = "pattern+prompt_lookup"
    result = make_generator(drafter, drafter_options=options).generate(request)
    assert result.token_ids == answer
    accepted, proposed = result.stats.num_accepted, result.stats.num_proposed
    assert 15 <= accepted < proposed
