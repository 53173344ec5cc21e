"""What drafters are shown of the target: its most likely tokens, after the right tokens."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.cascade import CascadeDrafter
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.drafters.recycle import RecycleDrafter
from jspec.generation.request import SamplingParams
from jspec.sampling.distribution import NO_TOKEN, best_tokens
from jspec.speculation.control import Control
from jspec.speculation.round import learn, speculative_step
from jspec.speculation.types import Proposal, Verdict
from tests import tiny
from tests.speculation.drive import Engine, request_settings
from tests.speculation.test_copies import make_state
from tests.tiny import full_logits

WIDTH, VOCAB, COUNT = 4, tiny.CONFIG.vocab_size, 3
PENALTIES = SamplingParams(repetition_penalty=1.5, logit_bias={5: 2.0}, forbidden_token_ids=(7,))


@dataclasses.dataclass(frozen=True)
class Recorder(PromptLookupDrafter):
    """Looks up as its base does, and keeps what it was last shown."""

    num_runners_up = COUNT

    def init(self, batch_size, capacity):
        nothing = jnp.zeros([batch_size, WIDTH + 1], jnp.int32)
        shown = jnp.zeros([batch_size, WIDTH + 1, COUNT], jnp.int32)
        return super().init(batch_size, capacity), (nothing, shown, nothing, nothing)

    def observe(self, params, state, *args):
        return super().observe(params, state[0], *args), state[1]

    def observe_runners_up(self, state, tokens, runners_up, is_fed, is_kept):
        shown = tokens, runners_up, is_fed.astype(jnp.int32), is_kept.astype(jnp.int32)
        pad = WIDTH + 1 - tokens.shape[1]  # of a narrow call
        widen = functools.partial(jax.tree.map, lambda x: jnp.pad(
            x, [(0, 0), (0, pad), *[(0, 0)] * (x.ndim - 2)]))  # fmt: skip
        return state[0], widen(shown)

    def propose(self, params, state, inputs):
        proposal, text = super().propose(params, state[0], inputs)
        return proposal, (text, state[1])


def ranked(logits):
    """Returns the most likely ids of one position; of equals the smaller first."""
    return np.argsort(-np.asarray(logits), kind="stable")[:COUNT].tolist()


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_most_likely_tokens_are_found(count):
    """In order, of equals the smaller id; none that is impossible, nor any of a row with NaN."""
    logits = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    logits[0, 0] = [0, 2, 1, 2, -np.inf]
    logits[1, 2] = [0, np.nan, 1, 2, 3]
    actual = best_tokens(jnp.asarray(logits), count)
    expected = np.argsort(-logits, axis=2, kind="stable")[..., :count]
    expected[0, 0] = [1, 3, 2, 0, NO_TOKEN][:count]
    expected[1, 2] = NO_TOKEN
    assert actual.tolist() == expected.tolist()


def test_they_are_those_after_each_token_of_the_block(tiny_pair, prompts):
    """Beside full passes over what was fed, after every round; penalties see each prefix.

    Rejected drafts have theirs, padding and rows that are done have none.
    """
    switches = None
    engine = Engine(
        tiny_pair.apply, tiny.empty_cache, (tiny_pair.target, None), Recorder(WIDTH),
        step=functools.partial(speculative_step, widths=(0, 1)),
    )  # fmt: skip
    state = engine.start(prompts, max_length=[30, 12, 40, 40])
    state = state.replace(settings=request_settings(PENALTIES, prompts, VOCAB, switches))
    texts, counts = [[*prompt] for prompt in prompts], {"kept": 0, "rejected": 0, "done": 0}
    for _ in range(8):
        last = state.last_token.tolist()
        is_done = state.is_done.tolist()
        state, infos = engine.advance(state, 1)
        if not len(infos.num_tokens):
            break
        tokens, shown, fed, kept = jax.tree.map(np.asarray, state.draft[1])
        for row, text in enumerate(texts):
            num_fed, num_kept = int(fed[row].sum()), int(kept[row].sum())
            if is_done[row]:
                counts["done"] += 1
                assert num_fed == num_kept == 0
                continue
            assert fed[row, :num_fed].all()
            assert kept[row, :num_kept].all()
            assert num_fed == infos.num_proposed[0, row] + 1
            assert num_kept == infos.num_tokens[0, row]
            block = tokens[row, :num_fed].tolist()
            assert block[0] == last[row]
            logits = penalised(tiny_pair, text, block)
            assert shown[row, :num_fed].tolist() == [ranked(one) for one in logits]
            counts["kept"] += num_kept
            counts["rejected"] += num_fed - num_kept
            text += block[:num_kept]
    assert min(counts.values()) > 1, counts


def test_in_a_tree_the_kept_path_is_marked():
    """By the slots of the block; two rows, the second of which is done."""
    drafter = Recorder(WIDTH)
    state = make_state(drafter).replace(is_done=jnp.array([False, True]))
    block = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
    parents = jnp.array([[-1, -1, 1, 1]] * 2, jnp.int32)  # slot 4 is a child of slot 2
    proposal = Proposal(block[:, 1:], jnp.array([4, 3]), parents=parents, max_depth=2)
    verdict = Verdict(jnp.array([2, 1]), block[:, 0], jnp.array([[0, 2, 4], [0, 2, 1]]))
    logits = jax.nn.one_hot(block + 1, VOCAB)
    learned = jax.jit(functools.partial(learn, drafter))(state, block, logits, proposal, verdict)
    tokens, shown, fed, kept = learned.draft[1]
    assert (tokens == block).all()
    assert (shown[..., 0] == block + 1).all()
    assert fed.tolist() == [[1] * 5, [0] * 5]
    assert kept.tolist() == [[1, 0, 1, 0, 1], [0] * 5]


def penalised(pair, text, block):
    """Returns the logits after each token of a block, as the settings leave them."""
    tokens = np.zeros([1, 64], np.int32)  # of one size, so that it is compiled once
    tokens[0, : len(text) + len(block)] = text + block
    logits = full_logits(pair, pair.target, jnp.asarray(tokens))
    logits = np.array(logits[0, len(text) : len(text) + len(block)])
    for i, row in enumerate(logits):
        row[5] += 2.0
        seen = sorted({*text, *block[: i + 1]})
        row[seen] = np.where(row[seen] > 0, row[seen] / 1.5, row[seen] * 1.5)
        row[7] = -np.inf
    return logits


@pytest.mark.slow
def test_members_of_a_cascade_are_shown_what_they_ask_for(tiny_pair, prompts):
    """Two that ask for different numbers, and one that asks for none."""

    def tables(*members):
        drafter = CascadeDrafter(members)
        params = tiny_pair.target, (None,) * len(members)
        engine = Engine(tiny_pair.apply, tiny.empty_cache, params, drafter)
        return engine.generate(prompts, max_length=40).state.draft

    lookup = PromptLookupDrafter(WIDTH, min_match=2)
    single, triple = (RecycleDrafter(WIDTH, VOCAB, count) for count in (1, 3))
    _, first, second = tables(lookup, single, triple)
    assert (first.shape[2], second.shape[2]) == (1, 3)
    np.testing.assert_array_equal(first[..., 0], second[..., 0])
    is_known = np.asarray(second[..., 0]) >= 0
    assert is_known.any(axis=1).all()
    assert not is_known.all(axis=1).any()


def rounds_of(engine, prompts, first_row, numbers):
    """Returns what the first row was proposed and kept, and its table, with forced numbers."""
    b = len(prompts)
    state, kept = engine.start(prompts, seeds=np.arange(b) + 1, temperature=1.0), []
    control = Control.init(b, kinds=engine.drafter.kinds, numbers=(0, 1, WIDTH))
    for wanted in first_row:
        forced = jnp.asarray([wanted] + [numbers] * (b - 1), jnp.int32)[:, None]
        state = state.replace(control=control.replace(forced=forced))
        state, infos = engine.advance(state, 1)
        kept.append((int(infos.num_proposed[0, 0]), infos.tokens[0, 0, : infos.num_tokens[0, 0]]))
    return jax.tree.map(np.asarray, (kept, state.draft[0]))


@pytest.mark.slow
def test_what_a_row_learns_does_not_depend_on_its_neighbours(tiny_pair, prompts):
    """Their drafts make the block wider, and its padding must teach nothing."""
    engine = Engine(
        tiny_pair.apply, tiny.empty_cache, (tiny_pair.target, None), RecycleDrafter(WIDTH, VOCAB),
        step=functools.partial(speculative_step, widths=(0, 1)),
    )  # fmt: skip
    prompts = prompts[:2] + prompts[3:]
    wanted = [4, 1, 0, 4, 1, 1, 4, 0, 1, 4, 4, 4] * 2
    beside: list[Any] = [rounds_of(engine, prompts, wanted, number) for number in (0, 1, WIDTH)]
    for kept, table in beside[1:]:
        np.testing.assert_array_equal(table, beside[0][1])
        for left, right in zip(kept, beside[0][0], strict=True):
            assert left[0] == right[0]
            np.testing.assert_array_equal(left[1], right[1])
    assert {int(count) for count, _ in beside[0][0]} >= {0, 1, 2}
