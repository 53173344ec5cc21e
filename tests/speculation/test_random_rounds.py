"""Invariants 2, 3 and 5 for every drafter with a memory, over rounds of random numbers of drafts.

In each round every row wants another number of drafts of each kind, 0 among them, and members of a
cascade are switched off and on again for some rounds, each row by itself: they lag, and catch up.
Rows are drawn at different temperatures. Under `coupled` all of this changes no token: what is said
is what plain decoding says, and every cache holds what a fresh prefill of it would.
"""

import functools
import itertools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.drafters.dflash import DflashDrafter
from jspec.drafters.eagle import EagleDrafter
from jspec.drafters.features import BlockDrafter, PairDrafter, ReadingFeatures
from jspec.drafters.layer_skip import FirstLayersDrafter
from jspec.drafters.lookahead import LookaheadDrafter
from jspec.drafters.memory import History, ReadingLastOutput
from jspec.drafters.model import ModelDrafter
from jspec.drafters.mtp import MtpDrafter
from jspec.speculation.control import Control
from jspec.speculation.round import speculative_step
from tests import layered, tiny, tiny_peagle
from tests.cases import slow_unless
from tests.layered import ALL, FIRST, SUBSET
from tests.speculation.drive import (
    Engine,
    assert_committed_equal,
    compiled_anew,
    emitted_in_row,
)
from tests.speculation.fresh import (
    jit_outputs,
    jit_prefill,
    jit_prefill_block_head,
    jit_prefill_head,
    jit_prefill_mtp,
    padded,
)
from tests.tiny_heads import SAVE_HEAD

WIDTH, MANY, FEW = 3, 200, 40  # drafts; rounds of the slow tests and of the quick ones
CAPACITIES = {MANY: 640, FEW: 192}
PROMPTS = [[7], [3, 1, 4, 1, 5], [4, 9, 23, 4] * 3]
SAMPLING = {"temperature": [0.0, 1.0, 0.7], "seeds": [1, 2, 3]}
VOCAB = layered.CONFIG.vocab_size
ROUNDING = 1e-3  # of a float32 cache; a wrong slot is off by about 5
TREE = {"tree_depth": 2, "tree_branches": 2}
SUBJECTS = {  # a drafter's name and its options
    "model": ("model", {}),
    "hierarchical": ("hierarchical", {}),
    "first layers": ("layer_skip", {"draft_layers": FIRST}),
    "first layers, unsure": ("layer_skip", {"draft_layers": FIRST, "draft_confidence": 0.5}),
    "other layers": ("layer_skip", {"draft_layers": SUBSET}),
    "lookup, model": ("prompt_lookup+model", {}),
    "ngram, hierarchical": ("ngram+hierarchical", {}),
    "lookup, first layers": ("prompt_lookup+layer_skip", {"draft_layers": FIRST}),
    "ngram, other layers": ("ngram+layer_skip", {"draft_layers": SUBSET}),
    "lookup, first layers, model": ("prompt_lookup+layer_skip+model", {"draft_layers": FIRST}),
    "other layers, ngram, hierarchical": (
        "layer_skip+ngram+hierarchical", {"draft_layers": SUBSET}
    ),
    "suffix, recycle, model": ("suffix+recycle+model", {}),
    "look-ahead": ("lookahead", {}),
    "ngram, look-ahead, model": ("ngram+lookahead+model", {}),
    "EAGLE": ("eagle", {}),
    "ngram, EAGLE, model": ("ngram+eagle+model", {}),
    "P-EAGLE": ("eagle", {}),
    "DFlash": ("dflash", {}),
    "ngram, DFlash, model": ("ngram+dflash+model", {}),
    "MTP": ("mtp", {}),
    "ngram, MTP, model": ("ngram+mtp+model", {}),
    "Medusa": ("medusa", {}),
    "lookup, Medusa, other layers": ("prompt_lookup+medusa+layer_skip", {"draft_layers": SUBSET}),
    "blockwise": ("blockwise", {}),
    "ngram, blockwise": ("ngram+blockwise", {}),
    "model, tree": ("model", TREE),
    "model, tree with": ("model", TREE | {"tree_draws": "with"}),
    "model, tree without": ("model", TREE | {"tree_draws": "without"}),
    "EAGLE, tree": ("eagle", TREE),
    "EAGLE, tree without": ("eagle", TREE | {"tree_draws": "without"}),
    "MTP, tree": ("mtp", TREE),
    "DFlash, tree": ("dflash", TREE),
    "Medusa, tree": ("medusa", TREE),
    "lookup, model, tree": ("prompt_lookup+model", TREE),
    "suffix, recycle, EAGLE, tree": ("suffix+recycle+eagle", TREE),
}  # fmt: skip
QUICK = "MTP", "blockwise", "lookup, model"
WITH_NARROW_CALLS = "blockwise"  # of the quick ones: each width is one program more
HEAD_OPTIONS = {  # of distributions so flat that the target often keeps what is drawn from them
    "eagle": {"std": 0.1},
    "dflash": {"std": 0.1},
    "medusa": {"std": 0.1, "head": 0.3 * layered.params()["head"]},
}


@functools.cache
def draft_params():
    """Returns a draft near the target, so that rounds keep none, some and all."""
    noise = tiny.random_params(layered.CONFIG, seed=1, std=0.4)
    return jax.tree.map(lambda a, b: a + 0.05 * b, layered.params(), noise)


def build(subject):
    """Returns the drafter; if it has a trained head, with one from a folder."""
    name, options = SUBJECTS[subject]
    with tempfile.TemporaryDirectory() as folder:
        head, path = None, pathlib.Path(folder, "head")
        for member in set(name.split("+")) & set(SAVE_HEAD):
            save = tiny_peagle.save_head if subject == "P-EAGLE" else SAVE_HEAD[member]
            head = save(path, layered.CONFIG, **HEAD_OPTIONS.get(member, {}))
        spec = DrafterSpec(
            WIDTH, layered.CONFIG, VOCAB, layered.CONFIG, jnp.float32, draft_params(),
            DrafterOptions(draft_head=head, **options),
        )  # fmt: skip
        return make_drafter(name, spec)


@functools.cache
def plain_texts(capacity):
    """Returns what plain decoding says, prompts included, up to the end of the cache."""
    params = layered.params(), None
    engine = Engine(
        layered.apply, layered.empty_cache, params, capacity=capacity, max_rounds=capacity
    )
    tokens = engine.generate(PROMPTS, **SAMPLING).tokens
    return [prompt + said for prompt, said in zip(PROMPTS, tokens, strict=True)]


class Play:
    """One batch that is played, and what it has said so far.

    Attributes:
      texts: of each row, the newest token included.
      turns: (drafter, drafts kept, drafts proposed) that occurred.
    """

    def __init__(self, subject, num_rounds):
        self.name, options = SUBJECTS[subject]
        self.layers = options.get("draft_layers")
        self.num_rounds, self.capacity = num_rounds, CAPACITIES[num_rounds]
        built = build(subject)
        self.drafter = built.drafter
        self.members = getattr(built.drafter, "members", (built.drafter,))
        self.params = built.params if len(self.members) > 1 else (built.params,)
        ends = itertools.accumulate(len(member.kinds) for member in self.members)
        pairs = zip(self.members, ends, strict=True)
        self.kinds = [slice(end - len(member.kinds), end) for member, end in pairs]
        is_narrow = num_rounds == MANY or subject == WITH_NARROW_CALLS
        step = functools.partial(speculative_step, widths=(0, 1) if is_narrow else ())
        self.engine = Engine(
            layered.apply, layered.empty_cache, (layered.params(), built.params), built.drafter,
            "coupled", capacity=self.capacity, max_rounds=1, step=step,
        )  # fmt: skip
        self.state = self.engine.start(PROMPTS, **SAMPLING)
        pairs = zip(PROMPTS, self.state.last_token.tolist(), strict=True)
        self.texts = [[*prompt, token] for prompt, token in pairs]
        self.turns = set()
        b, kinds = len(PROMPTS), built.drafter.kinds
        self.control = Control.init(b, kinds=kinds, numbers=(0, WIDTH))

    def advance(self, numbers):
        """Plays one round in which rows want so many drafts of each kind, [b k]."""
        control = self.control.replace(forced=jnp.asarray(numbers, jnp.int32))
        self.state, infos = self.engine.advance(self.state.replace(control=control), 1)
        for row, text in enumerate(self.texts):
            text.extend(emitted_in_row(infos, row))
        names = [kind.drafter for kind in self.drafter.kinds]
        proposed = zip(infos.kind[0], infos.num_accepted[0], infos.num_proposed[0], strict=True)
        turns = {(names[kind], int(kept), int(count)) for kind, kept, count in proposed if count}
        self.turns |= turns

    def play(self):
        """Plays rounds of random numbers, members being switched off and on for a while."""
        rng = np.random.default_rng(0)
        is_on = rng.random((len(PROMPTS), len(self.members))) < 0.5
        for _ in range(self.num_rounds):
            is_on ^= rng.random(is_on.shape) < 0.15
            numbers = rng.integers(0, WIDTH + 1, (len(PROMPTS), len(self.drafter.kinds)))
            for member, kinds in enumerate(self.kinds):
                numbers[:, kinds] *= is_on[:, member, None]
            self.advance(numbers)
        assert not self.state.is_done.any()

    def check_texts(self):
        """Asserts that plain decoding says the same."""
        for text, plain in zip(self.texts, plain_texts(self.capacity), strict=True):
            assert text == plain[: len(text)]

    def member_states(self):
        """Returns the state of every member."""
        return self.state.draft if len(self.members) > 1 else (self.state.draft,)

    def check_caches(self):
        """Asserts that every cache holds what a fresh prefill would, as far as it has come."""
        lengths = [len(text) - 1 for text in self.texts]
        assert self.state.target_cache.length.tolist() == lengths
        fresh = jit_prefill(ALL)(layered.params(), padded(self.texts, self.capacity))
        assert_committed_equal(self.state.target_cache, fresh, atol=ROUNDING)
        for member, part in enumerate(self.member_states()):
            if hasattr(part, "cache"):
                assert (np.asarray(part.cache.length) <= lengths).all()
                self.check_cache(member, part.cache, self.texts)
            if isinstance(self.members[member], ReadingLastOutput):
                self.check_output(part)
            for history in histories(part):
                assert history.length.tolist() == lengths
                for row, text in enumerate(self.texts):
                    assert history.tokens[row, : len(text) - 1].tolist() == text[:-1]

    def check_caught_up(self):
        """Asks the members with a cache in turn, and asserts that they catch up."""
        for member in range(len(self.members)):
            if not hasattr(self.member_states()[member], "cache"):
                continue
            texts = [list(text) for text in self.texts]
            numbers = np.zeros((len(PROMPTS), len(self.drafter.kinds)), int)
            numbers[:, self.kinds[member]] = WIDTH
            self.advance(numbers)
            cache = self.member_states()[member].cache
            lengths = jnp.asarray([len(text) - 1 for text in texts], jnp.int32)
            assert (cache.length >= lengths).all(), "caught up"
            self.check_cache(member, cache.rollback(lengths), texts)

    def check_cache(self, member, cache, texts):
        """Asserts that a member's committed slots hold what one pass over the texts gives."""
        drafter, tokens = self.members[member], padded(texts, self.capacity)
        if isinstance(drafter, EagleDrafter):
            fresh = jit_prefill_head(drafter.config)(self.params[member], tokens)
        elif isinstance(drafter, MtpDrafter):
            fresh = jit_prefill_mtp(drafter.config)(layered.params(), tokens)
        elif isinstance(drafter, DflashDrafter):
            fresh = jit_prefill_block_head(drafter.config)(self.params[member], tokens)
        elif self.name.split("+")[member] == "layer_skip":
            fresh = jit_prefill(self.layers)(layered.params(), tokens)
        else:
            fresh = jit_prefill(ALL)(draft_params(), tokens)
        assert_committed_equal(cache, fresh, atol=ROUNDING)

    def check_output(self, remembered):
        """Asserts that it is the target's last output at the newest committed token, [b d]."""
        outputs = jit_outputs((layered.CONFIG.num_layers,))(padded(self.texts, self.capacity))
        newest = np.asarray(outputs)[range(len(PROMPTS)), [len(text) - 2 for text in self.texts], 0]
        np.testing.assert_allclose(remembered, newest, rtol=0, atol=ROUNDING)


def histories(state):
    """Returns the texts that a drafter remembers."""
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, History))
    return [leaf for leaf in leaves if isinstance(leaf, History)]


@pytest.mark.parametrize(
    ("subject", "num_rounds"),
    [(name, FEW) for name in QUICK] + [slow_unless(False, name, MANY) for name in SUBJECTS],
)
def test_texts_are_plain_and_caches_those_of_a_fresh_prefill(subject, num_rounds):
    """Whatever was kept, refused, skipped and caught up on, of every row."""
    play = Play(subject, num_rounds)
    play.play()
    play.check_texts()
    play.check_caches()
    play.check_caught_up()
    kinds = [kind.drafter for kind in play.drafter.kinds]
    kept_of = {name for name, kept, _ in play.turns if kept}
    assert kinds[-1] in kept_of
    assert any(kept < count for _, kept, count in play.turns)
    if num_rounds == FEW:
        return
    assert kept_of == set(kinds)
    # The first draft of a look ahead is the target's own; what untrained heads find likeliest is
    # hardly ever kept twice.
    hardly_twice = {"lookahead": {1, 2}, "blockwise": {0, 1}, "dflash": {0, 1}, "mtp": {0, 1}}
    hardly_twice |= {"EAGLE, tree": {0, 1}, "Medusa, tree": {0, 1}}
    wanted = hardly_twice.get(play.name, hardly_twice.get(subject, {0, 1, 2}))
    assert {kept for _, kept, _ in play.turns} >= wanted
    had_chance = any(kept == count > 1 for _, kept, count in play.turns)
    assert had_chance or 2 not in wanted, "the draft hole had its chance"


CATCH_UP, PROPOSE = ModelDrafter._catch_up, FirstLayersDrafter.propose
LOOK, READ = LookaheadDrafter.propose, ReadingLastOutput.observe
READ_LAGGING, OBSERVE = ReadingFeatures.read_lagging, ReadingFeatures.observe
BLOCK = BlockDrafter.propose
CONTROLS = ("lookup, model",)


def catch_up_one_short(self, params, state, is_wanted):
    """Counts the first token that was missed as cached, and never feeds it."""
    is_missing = is_wanted & (state.cache.length < state.history.length - 1)
    cache = state.cache.commit(is_missing.astype(jnp.int32))
    return CATCH_UP(self, params, state.replace(cache=cache), is_wanted)


def propose_one_short(self, *args, **options):
    """Does not feed the last draft: the draft hole of the first layers."""
    proposal, state = PROPOSE(self, *args, **options)
    prefix = proposal.prefix
    return proposal.replace(prefix=prefix.replace(hidden=prefix.hidden.at[:, -1].set(0))), state


def look_without_a_draft(self, *args, **options):
    """Leaves in the first draft's place no token, as it was in the look ahead."""
    proposal, state = LOOK(self, *args, **options)
    hidden = proposal.prefix.hidden.at[:, 1].set(0)
    return proposal.replace(prefix=proposal.prefix.replace(hidden=hidden)), state


def read_one_feature_short(self, state, *args, **options):
    """Counts the first slot of several that are missing as cached, and never makes it."""
    is_missing = state.cache.length < state.history.length - 1
    cache = state.cache.commit(is_missing.astype(jnp.int32))
    return READ_LAGGING(self, state.replace(cache=cache), *args, **options)


def read_one_short(self, params, state, tokens, hidden, valid):
    """Takes no notice of the last token that counts."""
    valid = jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
    return READ(self, params, state, tokens, hidden, valid)


@pytest.mark.parametrize("subject", [slow_unless(n in CONTROLS, n) for n in SUBJECTS])
def test_one_token_that_is_not_caught_up_on_is_seen(subject, monkeypatch):
    """Negative control: few rounds are enough."""
    monkeypatch.setattr(ModelDrafter, "_catch_up", catch_up_one_short)
    monkeypatch.setattr(FirstLayersDrafter, "propose", propose_one_short)
    monkeypatch.setattr(LookaheadDrafter, "propose", look_without_a_draft)
    monkeypatch.setattr(ReadingFeatures, "read_lagging", read_one_feature_short)
    monkeypatch.setattr(ReadingLastOutput, "observe", read_one_short)
    with compiled_anew():
        play = Play(subject, FEW)
        play.play()
    with pytest.raises(AssertionError, match=r"\[\[|Mismatch"):  # the slots that differ
        play.check_caches()


def keep_a_mask(self, *args, **options):
    """Leaves a slot of its own block in the context."""
    proposal, state = BLOCK(self, *args, **options)
    is_asked = (proposal.num_tokens > 0).astype(jnp.int32)
    return proposal, state.replace(cache=state.cache.commit(is_asked))


def keep_guesses(self, state, length, cache, wanted):
    """Leaves pairs of the head's own outputs where a draft was kept."""
    return state.replace(cache=cache.rollback(jnp.maximum(cache.length - 1, 0)))


def observe_refused(self, params, state, tokens, hidden, valid):
    """Remembers the hidden states of all drafts that were verified."""
    return OBSERVE(self, params, state, tokens, hidden, valid | valid[:, :1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "kind", "name", "wrong"),
    [
        ("DFlash", BlockDrafter, "propose", keep_a_mask),
        ("P-EAGLE", BlockDrafter, "propose", keep_a_mask),
        ("MTP", PairDrafter, "forget_guesses", keep_guesses),
        ("EAGLE", PairDrafter, "forget_guesses", keep_guesses),
        ("P-EAGLE", ReadingFeatures, "observe", observe_refused),
        ("DFlash", ReadingFeatures, "observe", observe_refused),
    ],
)
def test_what_a_head_must_forget_is_seen(subject, kind, name, wrong, monkeypatch):
    """Negative controls: its own masks, guesses and refused drafts that stay in its cache."""
    monkeypatch.setattr(kind, name, wrong)
    with compiled_anew():
        play = Play(subject, FEW)
        for _ in range(8):
            play.advance(np.full((len(PROMPTS), len(play.drafter.kinds)), WIDTH))
    with pytest.raises(AssertionError):
        play.check_caches()
