"""The number of draft tokens that adapts, through the Generator."""

import dataclasses
import functools
import json
import re

import jax
import numpy as np
import pytest

from jspec import kernels
from jspec.common.errors import InputError
from jspec.common.timing import compile_clock
from jspec.drafters import DrafterOptions
from jspec.generation.acceptance_rates import AcceptanceRates, measure_rates
from jspec.generation.auto import explain_no_drafts
from jspec.generation.costs import RoundCosts, make_batch
from jspec.generation.engine import Engine
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.sampling.settings import Switches
from tests.cases import slow_unless
from tests.tiny_models import (
    CONFIG,
    draft,
    make_generator,
    make_model,
    peaked_params,
    shared_generator,
    target,
)

PROMPTS = ["one two one two one", "abcabcabc", "z", "the cat and the dog and the cow"]
NUMBERS = (0, 1, 3, 7)


def costs_of(drafter, per_draft):
    """Returns costs that grow with the drafts, as a made-up machine has them."""
    rounds = tuple(0.01 * (1 + per_draft * number) for number in NUMBERS)
    reading = 0.0001 * (drafter == "model")
    return RoundCosts((512,), NUMBERS, (drafter,), ((rounds,),), ((reading,),))


def both_costs(*drafters):
    """Returns the costs of a cascade of two: by default a lookup, then a model."""
    drafters = drafters or ("prompt_lookup", "model")
    rounds = [costs_of(name, 0.1).seconds[0][0] for name in drafters]
    reading = 0.001 * ("model" in drafters)
    return RoundCosts((512,), NUMBERS, drafters, (tuple(rounds),), ((0.0, reading),))


CHEAP = {"prompt_lookup": costs_of("prompt_lookup", 0.1), "model": costs_of("model", 0.1)}


def make_auto(drafter, **options):
    costs = CHEAP.get("model" if drafter == "self" else drafter)
    return make_generator(drafter, **{"num_draft_tokens": "auto", "costs": costs} | options)


@functools.cache
def cascade(batch_size=1):
    options = {"drafter": "prompt_lookup+model", "num_draft_tokens": "auto", "costs": both_costs()}
    return Generator(target(), draft(), batch_size=batch_size, **options)


@functools.cache
def model_engine():
    """Returns the programs of a draft model: its weights and the costs are data."""
    return make_auto("model").engine


def make_stranger(costs):
    """Returns a Generator whose draft has its own weights, which seldom agrees."""
    stranger = make_model(params=peaked_params(CONFIG, seed=5), name="stranger")
    generator = Generator(target(), stranger, drafter="model", num_draft_tokens="auto", costs=costs)
    generator.engine = model_engine()
    return generator


def requests(**settings):
    return [Request(p, SamplingParams(seed=k, **settings)) for k, p in enumerate(PROMPTS)]


DRAFTERS = "prompt_lookup", "model", "prompt_lookup+model", "suffix+recycle"


TREE = DrafterOptions(tree_depth=3, tree_branches=2)


@functools.cache
def tree_generator(drafter):
    costs = CHEAP.get(drafter) or both_costs(*drafter.split("+"))
    options = {"batch_size": 4, "num_draft_tokens": "auto", "costs": costs}
    drafted = draft() if "model" in drafter else None
    return Generator(target(), drafted, drafter=drafter, drafter_options=TREE, **options)


@pytest.mark.parametrize("drafter", [slow_unless(name == DRAFTERS[0], name) for name in DRAFTERS])
def test_trees_of_a_number_that_varies_change_no_token(drafter):
    """Rows whose trees differ, and rounds in which more nodes or fewer are worth a wide call."""
    generator = tree_generator(drafter)
    plain = shared_generator("none").generate(requests(max_new_tokens=40))
    proposed = set()
    results = generator.generate(requests(max_new_tokens=40))
    for actual, expected in zip(results, plain, strict=True):
        assert actual.token_ids == expected.token_ids
        proposed |= {a_round.num_proposed for a_round in actual.stats.rounds}
        assert generator.costs.plain_steps(actual.stats.rounds, 100) > 1
    assert max(proposed) >= 3
    assert len(proposed) > 2


def test_a_tree_near_the_length_limit_emits_nothing_past_it(monkeypatch):
    """Guards against nodes that come back when a lookup's tree, cut to what fits, is pruned.

    By what the device emits: of an answer the host would cut it off.
    """
    generator = tree_generator("prompt_lookup")
    run, emitted = generator.engine.run, []

    def spy(*args):
        state, infos = run(*args)
        emitted.append(infos.num_tokens.sum(axis=0))
        return state, infos

    monkeypatch.setattr(generator.engine, "run", spy)
    for shift in range(3):
        limits = [2 + shift, 5 + shift, 9 + shift, 14 + shift]
        emitted.clear()
        generator.generate(
            [Request(p, SamplingParams(n)) for p, n in zip(PROMPTS, limits, strict=True)]
        )
        assert (1 + sum(emitted)).tolist() == limits  # the first token is the prefill's


def test_drawn_trees_have_a_fixed_number():
    """Nothing says which of their nodes are worth it."""
    tree = DrafterOptions(tree_depth=2, tree_branches=2, tree_draws="with")  # 4 drafts at most
    with pytest.raises(
        InputError,
        match=r"^expected num_draft_tokens as a number with tree_draws=with, got 'auto'$",
    ):
        make_auto("model", drafter_options=tree)


@pytest.mark.parametrize(("per_draft", "expected"), [(0.02, "model"), (2.0, "prompt_lookup")])
def test_it_chooses_among_the_drafters_of_a_cascade(per_draft, expected):
    """A model that is always right drafts though the lookup has found something, if it is cheap."""
    costs = both_costs()
    rounds = costs_of("model", per_draft).seconds[0][0]
    seconds = ((costs.seconds[0][0], rounds),)
    costs = dataclasses.replace(costs, seconds=seconds, reading=((0.0, 0.0),))
    itself = dataclasses.replace(target(), name="itself")
    generator = Generator(
        target(), itself, drafter="prompt_lookup+model", num_draft_tokens="auto", costs=costs
    )
    generator.engine = cascade().engine  # costs are data
    for result in generator.generate(requests(max_new_tokens=40)):
        drafters = {a_round.drafter for a_round in result.stats.rounds if a_round.num_proposed}
        assert drafters == {expected}


def test_what_a_drafter_reads_after_a_pause_is_charged():
    """One of other weights is tried less often, as each trial begins with 64 tokens to be read.

    Their 0.32 plain steps count like the draft itself: uncharged, there would be six trials.
    """
    costs = dataclasses.replace(costs_of("model", 0.4), reading=((0.00005,),))
    generator = make_stranger(costs)
    rounds = generator.generate(requests(max_new_tokens=170)[1]).stats.rounds
    assert sum(a_round.num_proposed > 0 for a_round in rounds) == 4
    seconds = [0.01 * (1 + 0.4 * a_round.num_proposed) for a_round in rounds]
    assert sum(seconds) <= 0.01 * 169 / 0.98


@pytest.mark.slow
def test_a_row_chooses_for_itself(monkeypatch):
    """Invariant 5: sampled tokens do not depend on the batch, nor on a neighbour that needs more
    room.

    Costs are those of the row's own length: a longer neighbour has a cache of another size.
    """
    monkeypatch.setattr("jspec.generation.rows._SMALLEST_CAPACITY", 256)
    by_context = dataclasses.replace(
        CHEAP["model"],
        contexts=(256, 512),
        seconds=(CHEAP["model"].seconds[0], costs_of("model", 2.0).seconds[0]),
        reading=((0.001,), (0.01,)),
    )
    together = make_auto("model", batch_size=4, costs=by_context)
    alone = make_auto("model", costs=by_context)
    alone.engine = together.engine  # reading a prompt is the same program
    asked = requests(max_new_tokens=40, temperature=0.9)
    long = Request(PROMPTS[0], SamplingParams(max_new_tokens=170, seed=9, temperature=0.9))
    batch = together.generate([*asked[:3], long])
    for request, actual in zip([*asked[:3], long], batch, strict=True):
        assert actual.token_ids == alone.generate(request).token_ids


def test_a_costs_file_without_reading_is_refused():
    """Guards against a draft model that is taken to read its prompt in no time."""
    with pytest.raises(InputError, match="expected costs with the seconds of reading a token"):
        make_auto("model", costs=dataclasses.replace(CHEAP["model"], reading=()))
    make_auto("prompt_lookup", costs=dataclasses.replace(CHEAP["prompt_lookup"], reading=()))


@pytest.mark.parametrize(("drafter", "low", "high"), [("self", 2.5, 7.0), ("model", 0.0, 2.5)])
def test_it_follows_acceptance(drafter, low, high):
    """A draft that is always right is asked for much; one of other weights soon for nothing."""
    costs = costs_of("model", 0.4)
    generator = make_stranger(costs) if drafter == "model" else make_auto(drafter, costs=costs)
    generator.engine = model_engine()
    stats = generator.generate(requests(max_new_tokens=60)[0]).stats
    late = stats.rounds[len(stats.rounds) // 3 :]
    mean = sum(a_round.num_proposed for a_round in late) / len(late)
    assert low <= mean <= high
    if drafter == "model":
        assert any(a_round.num_proposed == 0 for a_round in late)


def test_no_drafts_are_explained_by_costs():
    """Only where no round drafted, and by the draft's costs, expected tokens and reading."""
    reasons = {}
    for per_draft in (0.1, 1.5):
        generator = make_auto("model", costs=costs_of("model", per_draft))
        generator.engine = model_engine()
        result = generator.generate(requests(max_new_tokens=24)[0])
        assert (result.stats.num_proposed > 0) == (per_draft == 0.1)
        reasons[per_draft] = explain_no_drafts(
            result, generator.engine.drafter, generator.round_costs.known, 512
        )
    assert reasons[0.1] is None
    said = re.fullmatch(
        r"no drafts: with 1 draft by model a round costs 2.50 plain steps and gives about "
        r"(1\.\d\d) tokens, (1\.\d\d) times as slow as plain decoding, the reading of the "
        r"prompt included", reasons[1.5],
    )  # fmt: skip
    assert said is not None, reasons
    tokens, slowdown = map(float, said.groups())
    assert 2.5 / tokens < slowdown < 2.5 / tokens + 0.05


def test_other_costs_compile_nothing():
    """Invariant 6: costs are data, and so is what follows from them."""
    generator = make_auto("model")
    generator.engine = model_engine()
    generator.generate(requests(max_new_tokens=20)[0])
    costly = make_auto("model", costs=costs_of("model", 3.0))
    costly.engine = model_engine()
    begin = compile_clock().num_programs
    result = costly.generate(requests(max_new_tokens=25, temperature=0.5)[1])
    assert compile_clock().num_programs == begin
    assert result.stats.num_proposed < result.stats.num_rounds


def test_costs_are_measured_once_and_recorded(tmp_path, monkeypatch, capsys):
    """What decides belongs to the answer: `settings` hold it; a second start recalls the costs."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    generator = make_auto("prompt_lookup", costs=None, max_seq_len=64)
    assert generator.describe()["costs"] is None
    generator.generate(requests(max_new_tokens=10)[0])
    assert "measuring what rounds" in capsys.readouterr().err
    record = generator.describe()
    assert record["num_draft_tokens"] == "auto"
    costs = RoundCosts.from_json(json.loads(json.dumps(record["costs"])))
    assert costs.numbers == NUMBERS
    assert costs.drafters == ("prompt_lookup",)
    again = make_auto("prompt_lookup", costs=None, max_seq_len=64)
    assert again.costs == costs
    assert "measuring" not in capsys.readouterr().err


def rates_of(generator, num_rows=1):
    batch = make_batch(generator.engine, generator.params, num_rows, 512)
    return measure_rates(batch, num_rows, generator.target, generator.max_seq_len)


@pytest.mark.parametrize("batch_size", [1, slow_unless(False, 3)])
def test_rates_are_those_of_a_few_answers(batch_size):
    """The target as its own draft has every draft accepted, a stranger has not; in any batches."""
    itself = Generator(
        target(), target(), drafter="model", num_draft_tokens="auto", costs=CHEAP["model"],
        batch_size=batch_size,
    )  # fmt: skip
    itself.engine = model_engine()
    rates = rates_of(itself, batch_size)
    assert rates.accepted == rates.decided
    assert rates.decided[0][0] > 10
    assert 10 < rates.answer_tokens <= 4 * 96
    stranger = make_stranger(CHEAP["model"])
    rates = rates_of(stranger)
    assert rates.accepted[0][0] < 0.9 * rates.decided[0][0]


def test_answers_that_were_cut_count_as_longer(monkeypatch):
    """Two of four answers ended: 256 tokens, or 128 for each end."""
    counts = np.zeros([1, 1, 2]), np.zeros([1, 1, 2])
    lengths = iter((96, 40, 96, 24))
    monkeypatch.setattr(
        "jspec.generation.acceptance_rates._answer", lambda *_: (*counts, np.array([next(lengths)]))
    )
    made = make_auto("prompt_lookup", costs=None, max_seq_len=200)
    assert rates_of(made).answer_tokens == 128


def test_costs_of_other_kernels_or_without_a_graph_are_measured_anew(tmp_path, monkeypatch):
    """Guards against costs that are recalled although `JSPEC_KERNELS` or the driver has changed.

    What is chosen is known before, by a trace of rounds, where kernels compete.
    """
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    measured, traced, chosen = [], [], {"kernels": "xla", "options": None}

    def await_choices(trace):
        traced.append(trace if measured else trace())  # one trace of real rounds is enough

    def measure(*arguments):
        measured.append((chosen["kernels"], chosen["options"]))
        return costs_of("prompt_lookup", 0.1)

    def chosen_kernels(config):
        assert traced
        return chosen["kernels"]

    monkeypatch.setattr("jspec.generation.auto.measure_costs", measure)
    no_rates = AcceptanceRates((), (), 0)
    monkeypatch.setattr("jspec.generation.auto.measure_rates", lambda *rows: no_rates)
    monkeypatch.setattr(kernels, "await_choices", await_choices)
    monkeypatch.setattr(kernels, "chosen_kernels", chosen_kernels)
    monkeypatch.setattr(kernels, "run_options", lambda: chosen["options"])
    for _ in range(2):
        for kernel, options in (("xla", None), ("cuda", None), ("cuda", {})):
            traced.clear()
            chosen.update(kernels=kernel, options=options)
            assert make_auto("prompt_lookup", costs=None, max_seq_len=64).costs is not None
    assert measured == [("xla", None), ("cuda", None), ("cuda", {})]


def test_costs_of_long_texts_are_measured_when_one_comes(tmp_path, monkeypatch):
    """Beside those of short texts, which stay: a text's choices do not depend on longer ones."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr("jspec.generation.costs._CONTEXTS", (96, 160))
    monkeypatch.setattr(Engine, "capacity_for", lambda engine, length: length + 8)
    measured = []

    def measure(batch, context, num_rows, show, text):
        measured.append((context,))
        costs = costs_of("prompt_lookup", 0.1)
        return dataclasses.replace(costs, contexts=(context,))

    monkeypatch.setattr("jspec.generation.auto.measure_costs", measure)
    first = make_auto("prompt_lookup", costs=None, max_seq_len=200)
    short = first.round_costs.of_batch(20)
    assert (short.contexts, measured) == ((96,), [(96,)])
    assert first.costs.contexts == (96, 160)
    assert first.costs.seconds[0] == short.seconds[0]
    assert first.round_costs.of_batch(20).answer_tokens == short.answer_tokens > 0
    again = make_auto("prompt_lookup", costs=None, max_seq_len=200)
    assert again.round_costs.of_batch(150) == first.costs
    assert measured == [(96,), (160,)]


def test_the_batch_size_changes_no_sampled_answer(monkeypatch):
    """Under `rejection` the tokens depend on the number of drafts, and so must not on the batch.

    On a made-up machine whose rounds of several rows cost much more with drafts.
    """

    def recall(known_costs, num_rows, length, pages=None):
        return costs_of("model", 0.1 if num_rows == 1 else 9.0)

    monkeypatch.setattr("jspec.generation.auto.KnownCosts._recall", recall)
    asked = requests(max_new_tokens=24, temperature=1.0)
    alone, batch = (make_auto("model", costs=None, batch_size=size) for size in (1, 3))
    alone.engine = batch.engine = model_engine()
    expected = alone.generate(asked)
    answers = batch.generate(asked)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    drafts = [sum(answer.stats.num_proposed for answer in each) for each in (expected, answers)]
    assert drafts[0] == drafts[1] > 0
    greedy = batch.generate(requests(max_new_tokens=24))  # the same text with any number
    assert sum(answer.stats.num_proposed for answer in greedy) < drafts[0] / 2


def test_what_catching_up_takes_is_measured(monkeypatch):
    """On a made-up machine: 0.002 s for each token that the draft model has missed."""
    texts = {}

    def visit(batch, state, forced, num_rounds):
        del batch
        missed = int(state.draft.history.length[0] - 1 - state.draft.cache.length[0])
        if forced[0] == 1:
            texts[missed > 0] = len(np.unique(state.draft.history.tokens[0, : missed or 99]))
        drafting = 0.01 * forced[0] + 0.002 * max(missed, 0) if forced[0] else 0.0
        return num_rounds * (1 + drafting)

    monkeypatch.setattr("jspec.generation.costs._time_visit", visit)
    costs = make_auto("model", costs=None, max_seq_len=200).round_costs.measure()
    assert costs.reading[0] == pytest.approx((0.002,))
    assert texts[True] > 10, "what is read is a text, not one token over and over"
    assert costs.seconds[0][0] == pytest.approx((1, 1.01, 1.03, 1.07))


def test_other_work_on_the_machine_slows_no_number_more_than_another(monkeypatch):
    """On a made-up machine that is half as fast until the middle of the sixth of ten turns.

    Guards against costs that take 0 and 1 draft from slow turns and 3 and 7 from fast ones: `auto`
    then chose 7 whatever was accepted.
    """
    count = 0

    def visit(batch, state, forced, num_rounds):
        nonlocal count
        del batch, state
        count += num_rounds
        return num_rounds * (1 + 0.1 * forced[0]) * (2 if count <= 5 * 4 + 2 else 1)

    monkeypatch.setattr("jspec.generation.costs._time_visit", visit)
    costs = make_auto("prompt_lookup", costs=None, max_seq_len=200).round_costs.measure()
    plain, *others = costs.seconds[0][0]
    assert [other / plain for other in others] == pytest.approx([1.1, 1.3, 1.7])


@pytest.mark.parametrize(
    "costs", [costs_of("model", 0.1), RoundCosts((512,), (0, 1), ("prompt_lookup",), (((1, 2),),))]
)
def test_costs_of_something_else_are_refused(costs):
    """Guards against a choice made by another drafter's costs."""
    with pytest.raises(InputError, match=r"expected costs of rounds with \[0, 1, 3, 7\] drafts"):
        make_auto("prompt_lookup", costs=costs)


@pytest.mark.parametrize("number", ["many", 2.5, True, None])
def test_a_number_of_drafts_is_a_whole_one_or_auto(number):
    """Guards against True taken for 1 and against a traceback."""
    with pytest.raises(InputError, match="num_draft_tokens to be a whole number or 'auto', got"):
        make_generator("prompt_lookup", num_draft_tokens=number)


@pytest.mark.parametrize("options", [{"drafter": "prompt_lookup"}, {"drafter": "none"}])
def test_costs_without_a_choice_are_refused(options):
    """Guards against an option that is silently ignored."""
    with pytest.raises(InputError, match="expected num_draft_tokens='auto' and a drafter"):
        make_generator(**options, costs=CHEAP["prompt_lookup"])


def test_plain_decoding_has_nothing_to_choose():
    generator = make_auto("none", costs=None)
    result = generator.generate(requests(max_new_tokens=5)[0])
    assert (generator.costs, result.stats.num_proposed) == (None, 0)
    assert generator.round_costs.measure() is None


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there a call has one width anyway")
def test_where_few_tokens_take_like_one_a_call_has_one_width(monkeypatch):
    """On a GPU each width is a program of the whole target to compile. The tokens are the same."""
    expected = make_auto("prompt_lookup", batch_size=4).generate(requests(max_new_tokens=24))
    monkeypatch.setattr(kernels, "is_as_fast_as_one", lambda num_tokens: True)
    generator = make_auto("prompt_lookup", batch_size=4)
    results = generator.generate(requests(max_new_tokens=24))
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    proposed = [[r.stats.num_proposed for r in answers] for answers in (results, expected)]
    assert proposed[0] == proposed[1]
    monkeypatch.undo()
    assert generator.engine.widths(1) == NUMBERS
    with kernels.compiling_for("gpu"):
        assert [generator.engine.widths(size) for size in (8, 9)] == [(), NUMBERS]


def test_blocks_of_several_rows_lie_side_by_side(monkeypatch):
    """Where each token's row is read in place, in calls of these sizes."""
    padded = make_auto("prompt_lookup", batch_size=4)
    assert padded.engine.call_sizes(4, Switches()) == (), "the heads of this model are copied"
    monkeypatch.setattr(kernels, "reads_rows_in_place", lambda head_dim: True)
    generator = make_auto("prompt_lookup", batch_size=4)
    sizes = generator.engine.call_sizes(4, Switches())
    assert [size.tokens for size in sizes] == [5, 6, 8, 16, 32]
    assert [size.drafts for size in generator.engine.call_sizes(4, Switches(logprobs=True))] == [
        3, 3, 3, 7, 7
    ]  # fmt: skip
    assert generator.engine.call_sizes(1, Switches()) == (), "a single row has nothing beside it"


@pytest.mark.slow
def test_such_blocks_change_no_token(monkeypatch):
    """The tokens are those of plain decoding; see also test_packing.py."""
    expected = shared_generator("none").generate(requests(max_new_tokens=24))
    monkeypatch.setattr(kernels, "reads_rows_in_place", lambda head_dim: True)
    generator = make_auto("prompt_lookup", batch_size=4)
    results = generator.generate(requests(max_new_tokens=24))
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    assert sum(result.stats.num_accepted for result in results) > 0
