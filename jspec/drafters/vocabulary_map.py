"""How the tokens of two vocabularies correspond: tables, made once on the host.

    target token      its bytes      as the draft reads it      as the draft may propose it
    " return"         " return"      [" return"]                yes: both have it
    "():\\n"           "():\\n"        ["():", "\\n"]              only by spelling
    "<|im_end|>"      none           ["<|im_end|>"]             yes: by its name
    half a character  e2 82          [e2, 82]                   only by spelling

A token is known by its bytes, never by the spelling in its vocabulary's file ("Ġreturn", "▁return",
"<0x0A>"). Special tokens, which stand for no bytes, are known by their names; tokens that begin or
end a text stand for those of the other vocabulary if they have other names.

A target token that the draft does not have is *read* as tokens of the draft that have the same
bytes: as the draft's own tokenizer cuts them, or, where that changes the text or the bytes are no
whole characters, as the fewest tokens. A draft token is *spelt* in target tokens in the same way.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, UInt32

from jspec.common.errors import InputError
from jspec.weights import TokenizerLike

_PROBES = ("The answer is 42.\n  if x:\n\treturn {'naïve': 3.14}", "Grüße, 世界! 🙂")
_LEAST_SHARED = 0.05  # of the smaller vocabulary, for drafts from what is shared
_MULTIPLIERS = 0x9E3779B1, 0x85EBCA6B  # of the two hashes; odd
_NO_TEXT = 0x5BD1E995, 0x27D4EB2F  # hashes of a token without bytes: no text has both


class Lists(NamedTuple):
    """Lists of tokens, joined end to end.

    Attributes:
      tokens: of all lists, [n].
      begins: where each list begins, and where the last one ends, [m+1].
    """

    tokens: Int32[np.ndarray, "n"]
    begins: Int32[np.ndarray, "m+1"]


class Hashes(NamedTuple):
    """The bytes of tokens as two polynomials mod 2^32, so that those of a sequence can be computed.

    hash(ab) = hash(a) * power(b) + hash(b)

    Attributes:
      hashes: of each token's bytes, [v 2]; unlike any text's for a token without bytes.
      powers: the multipliers to the number of its bytes, [v 2].
    """

    hashes: UInt32[np.ndarray, "v 2"]
    powers: UInt32[np.ndarray, "v 2"]


class TextTable(NamedTuple):
    """The tokens of a vocabulary by the hashes of their bytes.

    Attributes:
      keys: the hashes of all texts that are a token, in rising order, [k 2].
      ids: the token of each text, [k].
    """

    keys: UInt32[np.ndarray, "k 2"]
    ids: Int32[np.ndarray, "k"]


class VocabularyMap(NamedTuple):
    """Two vocabularies, of a target (t ids) and of a draft (d ids).

    Attributes:
      readings: of each target token in draft tokens, at least one; and after those of all, where a
        tokenizer strips spaces, those of target tokens that begin the printed text, perhaps none.
      prints: which target tokens stand for bytes, [t].
      shared_target: the target tokens that the draft has, in rising order, [u].
      shared_draft: the same tokens in the draft's vocabulary, [u].
      spellings: of each draft token in target tokens; empty where the target cannot write it.
      target_hashes: of the target's tokens.
      target_table: the target's tokens by their hashes.
      draft_table: the draft's.
    """

    readings: Lists
    prints: Bool[np.ndarray, "t"]
    shared_target: Int32[np.ndarray, "u"]
    shared_draft: Int32[np.ndarray, "u"]
    spellings: Lists
    target_hashes: Hashes
    target_table: TextTable
    draft_table: TextTable


class Reading(NamedTuple):
    """How a vocabulary reads texts of another: what is the same for all texts.

    Attributes:
      begin: the draft's token before every text; None for none.
      has_first: whether the token that begins the printed text is read apart.
      num_alike: see `most_alike`, of the draft's table.
    """

    begin: int | None
    has_first: bool
    num_alike: int

    @property
    def num_before(self) -> int:
        """Draft tokens before those of the text."""
        return int(self.begin is not None)


class _Vocabulary:
    """A tokenizer's tokens: `texts` are the bytes of every id, b"" for special ones.

    `ids` has the id of each text, `names` each special id's name, `special` the reverse.
    """

    def __init__(self, tokenizer: TokenizerLike, size: int) -> None:
        """Takes the first `size` ids."""
        self.tokenizer, self.texts = tokenizer, tokenizer.token_bytes()[:size]
        named = {i: name for name, i in tokenizer.vocabulary().items() if i < len(self.texts)}
        # SentencePiece may have a byte's token beside the character's, which texts are made of.
        order = sorted(
            (i for i, text in enumerate(self.texts) if text),
            key=lambda i: (named.get(i, "").startswith("<0x"), i),
        )
        self.ids: dict[bytes, int] = {}
        for i in order:
            self.ids.setdefault(self.texts[i], i)
        self.names = {i: name for i, name in named.items() if not self.texts[i]}
        self.special = {name: i for i, name in self.names.items()}
        self.longest = max(map(len, self.ids), default=0)

    @property
    def ends(self) -> list[int]:
        """The ids that end a text."""
        return [i for i in self.tokenizer.eos_ids if i < len(self.texts)]

    @property
    def begins_with(self) -> int | None:
        """The id that begins every text, or None."""
        first = self.tokenizer.encode("", add_bos=True)[:1]
        return first[0] if first and first[0] < len(self.texts) else None

    def cut(self, text: bytes) -> tuple[int, ...]:
        """Returns tokens of those bytes, or none where there are no such tokens."""
        if text in self.ids:
            return (self.ids[text],)
        try:
            ids = self.tokenizer.encode(text.decode(), add_bos=False)
        except (UnicodeDecodeError, InputError):
            return self._fewest(text)
        # A tokenizer may put a space before, or compose letters with their accents.
        is_same = b"".join(self.texts[i] for i in ids if i < len(self.texts)) == text
        return tuple(ids) if is_same else self._fewest(text)

    def _fewest(self, text: bytes) -> tuple[int, ...]:
        """Returns the fewest tokens of those bytes, of equally many the longest first."""
        size = len(text)
        steps, counts = [0] * size, [size + 1] * size + [0]
        for begin in reversed(range(size)):
            for end in range(min(size, begin + self.longest), begin, -1):
                if counts[end] + 1 < counts[begin] and text[begin:end] in self.ids:
                    counts[begin], steps[begin] = counts[end] + 1, end
        if counts[0] > size:
            return ()
        tokens, begin = [], 0
        while begin < size:
            tokens.append(self.ids[text[begin : steps[begin]]])
            begin = steps[begin]
        return tuple(tokens)


def make_vocabulary_map(
    target: TokenizerLike, draft: TokenizerLike, target_size: int, draft_size: int
) -> tuple[VocabularyMap, Reading]:
    """Returns the map between the first ids of two tokenizers, and how the draft reads texts.

    Raises:
      InputError: a draft that can neither read all that the target says nor has a token for what it
        does not know.
    """
    targets, drafts = _Vocabulary(target, target_size), _Vocabulary(draft, draft_size)
    shared = _shared(targets, drafts)
    tables = VocabularyMap(
        readings=_readings(targets, drafts, shared),
        prints=np.array([bool(text) for text in targets.texts]),
        shared_target=np.array(sorted(shared), np.int32),
        shared_draft=np.array([shared[i] for i in sorted(shared)], np.int32),
        spellings=_spellings(targets, drafts, shared),
        target_hashes=_hashes(targets.texts),
        target_table=_text_table(targets),
        draft_table=_text_table(drafts),
    )
    # A target that begins its texts so has the draft's own beginning in that token's place.
    begin = drafts.begins_with if targets.begins_with is None else None
    has_first = target.strips or draft.strips
    return tables, Reading(begin, has_first, most_alike(tables.draft_table))


def check_shared(mapped: VocabularyMap) -> None:
    """Checks that drafts can be drawn from the tokens that both vocabularies have.

    Raises:
      InputError: they have none, or next to none, in common.
    """
    sizes = len(mapped.prints), len(mapped.spellings.begins) - 1
    least = max(1, int(_LEAST_SHARED * min(sizes)))
    if len(mapped.shared_target) < least:
        raise InputError(
            f"expected draft and target to share at least {least} tokens, got "
            f"{len(mapped.shared_target)} of the target's {sizes[0]} and the draft's {sizes[1]}; "
            "--draft_translation=spelling needs none"
        )


def describe_shared(mapped: VocabularyMap) -> str:
    """Returns how much of each vocabulary the other one has."""
    count = len(mapped.shared_target)
    sizes = len(mapped.prints), len(mapped.spellings.begins) - 1
    target, draft = (f"{100 * count / size:.0f} % of the {whose}" for size, whose in zip(
        sizes, ("target's", "draft's"), strict=True))  # fmt: skip
    return f"{count} shared tokens, {target} and {draft}"


def check_bytes(name: str, tokenizer: TokenizerLike) -> None:
    """Checks that the bytes of a tokenizer's tokens make up the text that it was given.

    Raises:
      InputError: they do not; it begins with the name.
    """
    for probe in _PROBES:
        try:
            ids = tokenizer.encode(probe, add_bos=False)
        except InputError:  # a byte beyond a toy's vocabulary
            continue
        text = b"".join(tokenizer.piece(i, is_first=False) for i in ids).decode(errors="replace")
        # SentencePiece puts a space before a text.
        if text.removeprefix(" ") != probe:
            raise InputError(
                f"the {name}'s tokenizer does not tell the bytes of its tokens: those of "
                f"{probe!r} make {text!r}"
            )


def _shared(targets: _Vocabulary, drafts: _Vocabulary) -> dict[int, int]:
    """Returns the draft's id of each target id that both have: pairs, no id twice."""
    shared = {i: drafts.ids[text] for text, i in targets.ids.items() if text in drafts.ids}
    shared |= {i: drafts.special[n] for n, i in targets.special.items() if n in drafts.special}
    # Other names for the same: without the end no draft would ever end a text.
    taken = set(shared.values())
    left = [i for i in drafts.ends if i not in taken]
    for i, partner in zip([i for i in targets.ends if i not in shared], left, strict=False):
        shared[i] = partner
    return shared


def _readings(targets: _Vocabulary, drafts: _Vocabulary, shared: dict[int, int]) -> Lists:
    unknown = _placeholder(drafts)

    def read(i: int, text: bytes) -> Sequence[int]:
        if i in shared:
            return (shared[i],)
        begin = drafts.begins_with
        if not text and i == targets.begins_with and begin is not None:
            return (begin,)
        if not text and drafts.ends and i in (targets.begins_with, *targets.ends):
            return drafts.ends[:1]
        # Other special tokens as if they were written out.
        return drafts.cut(text or targets.names.get(i, "").encode()) or unknown

    usual = [read(i, text) for i, text in enumerate(targets.texts)]
    if not unknown and not all(usual):
        i = next(i for i, reading in enumerate(usual) if not reading)
        raise InputError(
            f"the draft's tokenizer has no tokens for the target's id {i}, {targets.texts[i]!r}, "
            "and none for what it does not know"
        )
    if not (targets.tokenizer.strips or drafts.tokenizer.strips):
        return _lists(usual)
    # The draft's own tokenizer would put a space before the text, if its decoder strips it.
    before = b" " if drafts.tokenizer.strips else b""
    pieces = (before + targets.tokenizer.piece(i, is_first=True) for i in range(len(usual)))
    # A space that is stripped is nothing to read.
    first = [(drafts.cut(text) or usual[i]) if text else () for i, text in enumerate(pieces)]
    return _lists([*usual, *first])


def _placeholder(drafts: _Vocabulary) -> Sequence[int]:
    """Returns what the draft reads in the place of bytes that it has no tokens for."""
    unknown = getattr(drafts.tokenizer, "special_tokens", {}).get("unk_token")
    ids = [drafts.special[unknown]] if unknown in drafts.special else drafts.ends
    return tuple(ids[:1])


def _spellings(targets: _Vocabulary, drafts: _Vocabulary, shared: dict[int, int]) -> Lists:
    partners = {partner: i for i, partner in shared.items()}

    def spell(i: int, text: bytes) -> Sequence[int]:
        if i in partners:
            return (partners[i],)
        return targets.cut(text) if text else ()

    return _lists([spell(i, text) for i, text in enumerate(drafts.texts)])


def _lists(lists: Iterable[Sequence[int]]) -> Lists:
    lists = list(lists)
    tokens = np.array([token for tokens in lists for token in tokens] or [0], np.int32)
    return Lists(tokens, np.cumsum([0, *map(len, lists)], dtype=np.int32))


def _hashes(texts: Sequence[bytes]) -> Hashes:
    count = len(texts)
    lengths = np.array([len(text) for text in texts])
    # By length, so that few rows are left where only the longest tokens have bytes.
    order = np.argsort(-lengths, kind="stable")
    rows = np.zeros([count, max(lengths.max(), 1)], np.uint8)
    for place, i in enumerate(order):
        rows[place, : lengths[i]] = np.frombuffer(texts[i], np.uint8)
    hashes, powers = np.zeros([count, 2], np.uint32), np.ones([count, 2], np.uint32)
    multipliers = np.array(_MULTIPLIERS, np.uint32)
    for place in range(lengths.max()):
        left = int(np.sum(lengths > place))
        # One more than the byte, so that no text of zeros is like a shorter text.
        hashes[:left] = hashes[:left] * multipliers + rows[:left, place, None] + np.uint32(1)
        powers[:left] *= multipliers
    result = Hashes(np.empty_like(hashes), np.empty_like(powers))
    result.hashes[order], result.powers[order] = hashes, powers
    result.hashes[lengths == 0] = _NO_TEXT
    return result


def _text_table(vocabulary: _Vocabulary) -> TextTable:
    texts = [*vocabulary.ids]
    hashes, ids = _hashes(texts).hashes, np.array([*vocabulary.ids.values()], np.int32)
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    return TextTable(hashes[order], ids[order])


def most_alike(table: TextTable) -> int:
    """Returns how many texts have the same first hash, at most."""
    return int(np.unique(table.keys[:, 0], return_counts=True)[1].max(initial=1))
