"""The number of draft tokens that adapts, through the Generator; rounds of cascades."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import kernels
from jspec.common.timing import compile_clock
from jspec.drafters import DrafterOptions
from jspec.generation.auto import explain_no_drafts
from jspec.generation.costs import AcceptanceRates, RoundCosts, make_batch, measure_rates
from jspec.generation.engine import Engine
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.generation.rows import capacity_for
from jspec.sampling.settings import Switches
from jspec.speculation import types
from tests.cases import slow_unless
from tests.tiny_models import small

PROMPTS = ["one two one two one", "abcabcabc", "z", "the cat and the dog and the cow"]
NUMBERS = (0, 1, 3, 7)


def costs_of(drafter, per_draft):
    """Returns costs that grow with the drafts, as a made-up machine has them."""
    rounds = tuple(0.01 * (1 + per_draft * number) for number in NUMBERS)
    reading = 0.0001 * (drafter == "model")
    return RoundCosts((512,), NUMBERS, (drafter,), ((rounds,),), ((reading,),))


def both_costs(*drafters):
    """Returns the costs of a cascade of two."""
    rounds = [costs_of(name, 0.1).seconds[0][0] for name in drafters]
    reading = 0.001 * ("model" in drafters)
    return RoundCosts((512,), NUMBERS, drafters, (tuple(rounds),), ((0.0, reading),))


CHEAP = {"prompt_lookup": costs_of("prompt_lookup", 0.1), "model": costs_of("model", 0.1)}


def make_auto(drafter, draft=None, **options):
    """Returns a Generator of models of one layer; a draft agrees often, unless one is given."""
    if draft is None and ("model" in drafter or drafter == "hierarchical"):
        draft = small(disturbance=0.03)
    costs = CHEAP.get(drafter) or (both_costs(*drafter.split("+")) if "+" in drafter else None)
    options = {"drafter": drafter, "num_draft_tokens": "auto", "costs": costs} | options
    return Generator(small(), draft, **options)


@functools.cache
def engine_of(drafter):
    return make_auto(drafter).engine


def make_shared(drafter, **options):
    """Returns a Generator with the programs of others like it: weights and costs are data."""
    generator = make_auto(drafter, **options)
    generator.engine = generator.round_costs.engine = engine_of(drafter)
    return generator


@functools.cache
def plain_generator():
    return make_auto("none")


def plain(**settings):
    """Returns what plain decoding answers."""
    return [answer.token_ids for answer in plain_generator().generate(requests(**settings))]


def make_stranger(costs):
    """Returns a Generator whose draft has its own weights, which seldom agrees."""
    return make_shared("model", draft=small(seed=5), costs=costs)


def requests(**settings):
    return [Request(p, SamplingParams(seed=k, **settings)) for k, p in enumerate(PROMPTS)]


CASCADE = "prompt_lookup+model"
DRAFTERS = "prompt_lookup", "model", CASCADE, "suffix+recycle"
TREE = DrafterOptions(tree_depth=3, tree_branches=2)


@functools.cache
def tree_generator(drafter):
    return make_auto(drafter, batch_size=4, drafter_options=TREE)


@pytest.mark.parametrize("drafter", [slow_unless(name == DRAFTERS[0], name) for name in DRAFTERS])
def test_trees_of_a_number_that_varies_change_no_token(drafter):
    """Rows whose trees differ, and rounds in which more nodes or fewer are worth a wide call."""
    generator = tree_generator(drafter)
    proposed = set()
    results = generator.generate(requests(max_new_tokens=40))
    for actual, expected in zip(results, plain(max_new_tokens=40), strict=True):
        assert actual.token_ids == expected
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


@pytest.mark.parametrize(("per_draft", "expected"), [(0.02, "model"), (2.0, "prompt_lookup")])
def test_it_chooses_among_the_drafters_of_a_cascade(per_draft, expected):
    """A model that is always right drafts though the lookup has found something, if it is cheap."""
    costs = both_costs("prompt_lookup", "model")
    rounds = costs_of("model", per_draft).seconds[0][0]
    seconds = ((costs.seconds[0][0], rounds),)
    costs = dataclasses.replace(costs, seconds=seconds, reading=((0.0, 0.0),))
    generator = make_shared(CASCADE, draft=small(), costs=costs)
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


@pytest.mark.parametrize(("draft", "low", "high"), [("itself", 2.5, 7.0), ("stranger", 0.0, 2.5)])
def test_it_follows_acceptance(draft, low, high):
    """A draft that is always right is asked for much; one of other weights soon for nothing."""
    draft_model = small() if draft == "itself" else small(seed=5)
    generator = make_shared("model", draft=draft_model, costs=costs_of("model", 0.4))
    stats = generator.generate(requests(max_new_tokens=60)[0]).stats
    late = stats.rounds[len(stats.rounds) // 3 :]
    mean = sum(a_round.num_proposed for a_round in late) / len(late)
    assert low <= mean <= high
    if draft == "stranger":
        assert any(a_round.num_proposed == 0 for a_round in late)


def test_no_drafts_are_explained_by_costs():
    """Only where no round drafted, and by the draft's costs, expected tokens and reading."""
    reasons = {}
    for per_draft in (0.1, 1.5):
        generator = make_shared("model", costs=costs_of("model", per_draft))
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
    make_shared("model").generate(requests(max_new_tokens=20)[0])
    costly = make_shared("model", costs=costs_of("model", 3.0))
    begin = compile_clock().num_programs
    result = costly.generate(requests(max_new_tokens=25, temperature=0.5)[1])
    assert compile_clock().num_programs == begin
    assert result.stats.num_proposed < result.stats.num_rounds


def test_costs_are_measured_once_and_recorded(tmp_path, monkeypatch, capsys):
    """What decides belongs to the answer: `settings` hold it; a second start recalls the costs."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    generator = make_shared("model", costs=None, max_seq_len=64)
    assert generator.describe()["costs"] is None
    generator.generate(requests(max_new_tokens=10)[0])
    assert "measuring what rounds" in capsys.readouterr().err
    record = generator.describe()
    assert record["num_draft_tokens"] == "auto"
    costs = RoundCosts.from_json(json.loads(json.dumps(record["costs"])))
    assert costs.numbers == NUMBERS
    assert costs.drafters == ("model",)
    again = make_shared("model", costs=None, max_seq_len=64)
    assert again.costs == costs
    assert "measuring" not in capsys.readouterr().err


def rates_of(generator, num_rows=1):
    batch = make_batch(generator.engine, generator.params, num_rows, 512)
    return measure_rates(batch, num_rows, generator.target, generator.max_seq_len)


@pytest.mark.parametrize("batch_size", [1, slow_unless(False, 3)])
def test_rates_are_those_of_a_few_answers(batch_size):
    """The target as its own draft has every draft accepted, a stranger has not; in any batches."""
    itself = make_shared("model", draft=small(), batch_size=batch_size)
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
        "jspec.generation.costs._answer", lambda *_: (*counts, np.array([next(lengths)]))
    )
    made = make_shared("model", costs=None)
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
        return CHEAP["model"]

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
            assert make_shared("model", costs=None, max_seq_len=64).costs is not None
    assert measured == [("xla", None), ("cuda", None), ("cuda", {})]


def test_costs_of_long_texts_are_measured_when_one_comes(tmp_path, monkeypatch):
    """Beside those of short texts, which stay: a text's choices do not depend on longer ones."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr("jspec.generation.costs._CONTEXTS", (96, 160))
    monkeypatch.setattr(Engine, "capacity_for", lambda engine, length: length + 8)
    measured = []

    def measure(batch, context, num_rows, show, text):
        measured.append((context,))
        return dataclasses.replace(CHEAP["model"], contexts=(context,))

    monkeypatch.setattr("jspec.generation.auto.measure_costs", measure)
    rates = AcceptanceRates((), (), 9)
    monkeypatch.setattr("jspec.generation.auto.measure_rates", lambda *rows: rates)
    first = make_shared("model", costs=None)
    short = first.round_costs.of_batch(20)
    assert (short.contexts, measured) == ((96,), [(96,)])
    assert first.costs.contexts == (96, 160)
    assert first.costs.seconds[0] == short.seconds[0]
    assert first.round_costs.of_batch(20).answer_tokens == short.answer_tokens == 9
    again = make_shared("model", costs=None)
    assert again.round_costs.of_batch(150) == first.costs
    assert measured == [(96,), (160,)]


def test_the_batch_size_changes_no_sampled_answer(monkeypatch):
    """Under `rejection` the tokens depend on the number of drafts, and so must not on the batch.

    On a made-up machine whose rounds of several rows cost much more with drafts.
    """

    def recall(known_costs, num_rows, length, pages=None):
        costs = both_costs("prompt_lookup", "model")
        if num_rows == 1:
            return costs
        return dataclasses.replace(costs, seconds=(costs_of("model", 9.0).seconds[0] * 2,))

    monkeypatch.setattr("jspec.generation.auto.KnownCosts._recall", recall)
    asked = requests(max_new_tokens=24, temperature=1.0)
    alone, batch = (make_shared(CASCADE, costs=None, batch_size=n) for n in (1, 4))
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
    costs = make_shared("model", costs=None).round_costs.measure()
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
    costs = make_shared("prompt_lookup", costs=None).round_costs.measure()
    plain, *others = costs.seconds[0][0]
    assert [other / plain for other in others] == pytest.approx([1.1, 1.3, 1.7])


def test_plain_decoding_has_nothing_to_choose():
    generator = plain_generator()
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


def test_rounds_do_not_depend_on_the_batch():
    """Guards against a model that catches up on what its neighbours were fed.

    The costs make a row lag for a while, so that it has something to catch up on; the number of
    drafts depends on how much that is. The last row is not drawn: its number may follow the batch,
    but its text is plain decoding's (invariant 2).
    """
    *drawn, greedy = (
        Request(prompt, SamplingParams(seed=seed, max_new_tokens=40, temperature=temperature))
        for seed, (prompt, temperature) in enumerate(
            zip(PROMPTS, (0.9, 0.9, 0.9, 0.0), strict=True)
        )
    )
    alone = make_shared(CASCADE).generate(drawn)
    *together, last = make_shared(CASCADE, batch_size=4).generate([*drawn, greedy])
    assert [a.stats.rounds for a in together] == [a.stats.rounds for a in alone]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert last.token_ids == plain_generator().generate(greedy).token_ids
    assert last.stats.num_proposed > 0
    proposers = {a_round.drafter for answer in alone for a_round in answer.stats.rounds}
    assert proposers >= {"prompt_lookup", "model"}


def test_an_unsure_member_lets_the_next_one_speak():
    """Guards against a model that has no draft, but takes its turn as if it had one."""
    options = {"num_draft_tokens": 4, "costs": None, "draft_confidence": 0.8}
    generator = make_auto("model+prompt_lookup", **options)
    result = generator.generate("one two one two one", SamplingParams(max_new_tokens=80))
    by_drafter = result.stats.to_json()["by_drafter"]
    assert by_drafter["prompt_lookup"]["num_accepted"] > 0
    assert by_drafter["model"]["num_accepted"] > 0


@pytest.mark.parametrize(
    ("drafter", "acceptance"),
    [
        ("prompt_lookup+model", "rejection"),
        slow_unless(False, "model", "block"),
        slow_unless(False, "hierarchical", "rejection"),
        slow_unless(False, "model", "typical"),
    ],
)
def test_what_stands_in_memory_that_is_not_read_changes_no_token(drafter, acceptance, monkeypatch):
    """A rule that reads distributions at temperature 0, as `typical` does, finds zeros there."""

    def zeros_or_nan(is_read, *shape):
        return jnp.where(jnp.asarray(is_read), jnp.zeros(shape), jnp.nan)

    monkeypatch.setattr(types, "zeros_if", zeros_or_nan)
    settings = SamplingParams(max_new_tokens=24)
    requests = [Request(list(prompt.encode()), settings) for prompt in PROMPTS[:3]]
    options = {"acceptance": acceptance, "num_draft_tokens": 3, "costs": None, "batch_size": 2}
    generator = make_auto(drafter, **options)
    answers, plain = generator.generate(requests), plain_generator().generate(requests)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
    assert sum(answer.stats.num_proposed for answer in answers) > 10


def test_sizes_double_and_then_lie_closer():
    """Small caches in powers of two; where doubling costs much there is one in between.

    The block counts: guards against a cache that is full before the last one has been verified.
    """
    rooms = (1, 512, 513, 1500, 2049, 3073, 4097, 6145)
    assert [capacity_for(room, 0) for room in rooms] == [
        512, 512, 1024, 2048, 3072, 4096, 6144, 8192,
    ]  # fmt: skip
    assert [capacity_for(507, 5), capacity_for(508, 5)] == [512, 1024]
