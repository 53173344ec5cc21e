"""A draft model of another vocabulary: its answers, what its cache holds, who may use it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions, make_drafter
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.generation.costs import texts_for
from jspec.generation.options import make_spec
from jspec.lab.auditing.checks import check_caches
from jspec.lab.auditing.distribution import check_distribution
from jspec.models import init_cache, make_apply
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests import tiny_models
from tests.cases import slow_unless
from tests.lab.auditing.subjects import make_rows, make_subject
from tests.speculation.drive import Engine, assert_committed_equal, emitted_in_row
from tests.tiny_models import CONFIG, make_model, peaked_params
from tests.weights.tokenizers.made import learn_bpe

WIDTH, CAPACITY = 4, 120
TEXT = "the cat sat on the mat. the dog sat on the cat. a rat ate the hat of the dog. "
PROMPTS = [b"the cat sat", b"a rat", b" on the", b"dog. the \xf0\x9f"]


@functools.cache
def tokenizers():
    """Returns tokenizers with other ids, which cut texts differently; one has a long word."""
    bpe = learn_bpe([TEXT + " incomprehensibilities"] * 9, 330, bos="<s>", eos="</s>")
    return {"bpe": bpe, "bytes": ByteTokenizer(300, eos_ids=(299,))}


@functools.cache
def model(name, disturbance=0.0):
    """Returns a tiny model over that tokenizer.

    What it says of a token follows from the token's first byte, and what it reads from the last:
    models over both tokenizers agree where the text is cut alike, and often elsewhere.
    """
    tokenizer = tokenizers()[name]
    size = tokenizer.vocab_size
    base = dataclasses.replace(CONFIG, vocab_size=256, num_layers=1)
    params, noise = peaked_params(base, 0, disturbance), np.random.default_rng(5)
    pieces = [tokenizer.piece(i, False) for i in range(size)]
    first, last = (jnp.array([piece[at] if piece else 0 for piece in pieces]) for at in (0, -1))

    # Bytes of the text are liked, and longer tokens now more and now less than their first byte.
    def liking_of(piece):
        if not 0 < len(piece) < 9:
            return 0.0
        usual = 1.5 if set(piece) <= set(TEXT.encode()) else 0.3
        return usual * (1 + 0.1 * noise.normal() * (len(piece) > 1))

    liking = np.array([liking_of(piece) for piece in pieces])
    head = params["head"][first] * jnp.asarray(liking, jnp.float32)[:, None]
    params = {**params, "embedding": params["embedding"][last], "head": head}
    config = dataclasses.replace(base, vocab_size=size, eos_ids=tuple(tokenizer.eos_ids))
    return make_model(config, params=params, tokenizer=tokenizer, name=f"{name} {disturbance}")


def spec_of(target, draft, **options):
    """Returns what a drafter over that pair is built from."""
    return make_spec(target, draft, "model", DrafterOptions(**options), WIDTH)


@functools.cache
def engine_of(target, draft, rule="rejection", **options):
    """Returns the compiled rounds of a pair."""
    target, draft = model(target), model(draft, 0.01)
    built = make_drafter("model", spec_of(target, draft, **options))
    empty = functools.partial(empty_cache, target)
    params = target.params, built.params
    return Engine(make_apply(target.config), empty, params, built.drafter, rule, capacity=CAPACITY)


def empty_cache(loaded, batch_size, capacity):
    """Returns a model's empty cache."""
    return init_cache(loaded.config, batch_size=batch_size, capacity=capacity, dtype=jnp.float32)


@functools.cache
def plain_engine(target):
    """Returns the compiled rounds of a target alone."""
    target = model(target)
    empty = functools.partial(empty_cache, target)
    return Engine(make_apply(target.config), empty, (target.params, None), capacity=CAPACITY)


def reader_of(engine):
    """Returns a function of the draft's state: the tokens that it reads in each row, [b s], and
    their numbers.
    """
    reading = engine.drafter.reading

    @jax.jit
    def read(tables, draft):
        begin = jnp.zeros_like(draft.text.history.length)
        tokens = draft.text.window(tables, reading, begin, draft.cache.capacity)
        return tokens, draft.text.length(reading)

    return functools.partial(read, engine.params.draft.tables)


@functools.cache
def fresh_prefill(target, draft):
    """Returns a function from draft tokens [b s] to the draft's cache of one pass over them."""
    loaded = model(draft, 0.01)
    apply = make_apply(loaded.config)
    return jax.jit(
        lambda tokens: apply(loaded.params, tokens, empty_cache(loaded, *tokens.shape))[2]
    )


PAIRS = [("bpe", "bytes"), ("bytes", "bpe")]
MODES = [("auto", (0.0, 1.0, 0.0, 1.0)), ("shared", 0.0), ("shared", 1.0), ("spelling", 0.0),
         ("spelling", 1.0)]  # fmt: skip
SHARED = r"spelt at temperature 0, else drawn from the shared tokens \(257 shared tokens, \d+ %"
_IN_ROUNDS = [
    slow_unless((pair, mode) == (PAIRS[1], MODES[0]), pair, *mode)
    for pair in PAIRS
    for mode in MODES
]  # "auto" spells some rows and draws others from the shared tokens; bytes are joined anew


@pytest.mark.parametrize(("pair", "translation", "temperature"), _IN_ROUNDS, ids=str)
def test_text_is_plain_and_caches_those_of_a_fresh_prefill(pair, translation, temperature):
    """In every slot that counts as cached, whatever was kept, spelt or cut anew.

    The draft reads the bytes that the target has said, no more and no less; and under `coupled`
    these are what plain decoding says.
    """
    engine = engine_of(*pair, "coupled", draft_translation=translation)
    ours, theirs = (tokenizers()[name] for name in pair)
    prompts = [ours.encode(text.decode(errors="ignore")) for text in PROMPTS]
    options = {"temperature": temperature, "max_length": [90, 95, 100, 105]}
    plain_tokens = plain_engine(pair[0]).generate(prompts, **options).tokens
    state = engine.start(prompts, **options)
    texts = [[*p, t] for p, t in zip(prompts, state.last_token.tolist(), strict=True)]
    accepted, num_cached, read_by = [], [], reader_of(engine)
    for _ in range(12):
        state, infos = engine.advance(state, 1)
        texts = [text + emitted_in_row(infos, row) for row, text in enumerate(texts)]
        tokens, lengths = read_by(state.draft)
        for row, text in enumerate(texts):
            said = b"".join(ours.piece(i, False) for i in text[:-1])
            read = np.asarray(tokens)[row, : lengths[row]].tolist()
            assert b"".join(theirs.piece(i, False) for i in read) == said
        cache = state.draft.cache
        assert (np.asarray(cache.length) <= np.asarray(lengths)).all()
        assert_committed_equal(cache, fresh_prefill(*pair)(tokens))
        accepted.append(infos.num_accepted[0])
        num_cached.append(np.asarray(lengths - cache.length))
    for text, prompt, tokens in zip(texts, prompts, plain_tokens, strict=True):
        assert text == (prompt + tokens)[: len(text)]
    assert len(np.unique(accepted)) > 2, "rounds should differ"
    # Usually only a last draft, and what is joined anew, is read again.
    assert np.mean(num_cached) < 2.5


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("translation", ["shared", "spelling", "auto"])
def test_answers_are_those_of_plain_decoding(pair, translation):
    """Through the Generator, with penalties; what the vocabularies share is among its notes."""
    settings = [
        jspec.SamplingParams(max_new_tokens=24, temperature=t, seed=i, repetition_penalty=penalty)
        for i, (t, penalty) in enumerate([(0.0, 1.0), (1.0, 1.0), (0.7, 1.3)])
    ]
    requests = [
        jspec.Request(text.decode(errors="ignore"), settings_of_row)
        for text, settings_of_row in zip(PROMPTS, settings, strict=False)
    ]
    plain = jspec.Generator(model(pair[0]), drafter="none")
    expected, notes = [result.token_ids for result in plain.generate(requests)], []
    generator = jspec.Generator(
        model(pair[0]), model(pair[1], 0.01), batch_size=3, acceptance="coupled",
        num_draft_tokens=3, notify=notes.append,
        drafter_options=DrafterOptions(draft_translation=translation),
    )  # fmt: skip
    results = generator.generate(requests)
    assert [result.token_ids for result in results] == expected
    assert sum(result.stats.num_accepted for result in results) > 3
    if (pair, translation) == (PAIRS[0], "auto"):
        assert any(re.search(SHARED, line) for line in notes)


def test_what_the_vocabularies_share_is_said():
    """In the settings of a run."""
    models = model("bpe"), model("bytes", 0.01)
    described = jspec.Generator(*models, drafter="prompt_lookup+model", num_draft_tokens=3)
    assert re.search(SHARED, described.describe()["draft_vocabulary"])
    same = jspec.Generator(tiny_models.target(), tiny_models.draft())
    assert same.describe()["draft_vocabulary"] is None


def test_its_costs_are_measured_on_ordinary_text():
    """One token over and over may be several tokens of the draft, or none at all."""
    target = model("bpe")
    for name in ("model", "prompt_lookup+model"):
        spec = make_spec(target, model("bytes", 0.01), name, DrafterOptions(), WIDTH)
        ids = texts_for(make_drafter(name, spec).drafter, target.tokenizer).rounds
        assert target.tokenizer.stream().push(ids[0]).strip() in "The committee"
        assert len(set(ids)) > 9
    same = PromptLookupDrafter(WIDTH)
    assert texts_for(same, target.tokenizer) == ((1,), ids)


@pytest.mark.slow
def test_a_row_whose_reading_is_too_long_is_not_drafted_for():
    """Its slots would run out: it goes on without drafts, and nothing is written elsewhere."""
    engine, ours = engine_of(*PAIRS[0], "coupled", draft_translation="auto"), tokenizers()["bpe"]
    pieces = ours.token_bytes()
    long = [pieces.index(max(pieces, key=len))] * 15
    prompts = [long, ours.encode("a rat")]
    state = engine.start(prompts, max_length=60)
    num_bytes = sum(len(ours.piece(i, False)) for i in long)
    assert num_bytes > len(long) + CAPACITY // 2 + 32, "nothing to prove"
    state, infos = engine.advance(state, 6)
    assert (infos.num_proposed[:, 0] == 0).all()
    assert infos.num_proposed[:, 1].sum() > 0
    assert int(state.draft.cache.length[0]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tree_depth": 2}, "tree_depth 0 with a draft model of another vocabulary"),
     ({"draft_vocab_size": 70}, "draft_vocab_size 0 with a draft model of another vocabulary"),
     ({"draft_translation": "words"}, "draft_translation")],
)  # fmt: skip
def test_bad_options_are_one_line(options, message):
    """Nothing is silently ignored."""
    with pytest.raises(InputError, match=message):
        make_drafter("model", spec_of(model("bpe"), model("bytes", 0.01), **options))


def test_a_translation_needs_two_vocabularies_and_the_model_alone():
    """Guards against an option that does nothing; `hierarchical` checks guesses in the target's
    tokens.
    """
    options = DrafterOptions(draft_translation="shared")
    with pytest.raises(InputError, match="draft model of another vocabulary"):
        jspec.Generator(tiny_models.target(), tiny_models.draft(), drafter_options=options)
    with pytest.raises(InputError, match="different tokenizers: id"):
        jspec.Generator(model("bpe"), model("bytes", 0.01), drafter="hierarchical")


@pytest.mark.slow
@pytest.mark.parametrize("translation", ["shared", "auto", "spelling"])
def test_the_audit_covers_it(translation):
    """Its cache is compared with what the draft reads, and its answers with the distribution.

    At this temperature "auto" does what "shared" does, in a larger program.
    The check of the caches fails where the target's own ids are taken for the draft's.
    """
    subject = make_subject(
        target=model("bpe"), draft=model("bytes", 0.01), drafter="model",
        settings=jspec.SamplingParams(temperature=1.1),
        drafter_options=DrafterOptions(draft_translation=translation),
    )  # fmt: skip
    rows = make_rows(subject, rows_per_run=2048)
    check = check_caches(rows)
    assert check.has_passed, check.detail
    assert "model" in check.data
    check, _ = check_distribution(rows, 2048)
    assert check.has_passed, check.detail
    assert rows.num_accepted > 0


@pytest.mark.slow
def test_a_prompt_shared_by_requests_is_read_as_by_one():
    """The server's rows share chunks of a prompt, and pages: drafts are those of a row alone."""
    # A machine with a GPU may lack a server's packages.
    from tests.serving.served import answer
    from tests.serving.test_slots import make

    # What "auto" does at this temperature, in a smaller program.
    options = DrafterOptions(draft_translation="shared")
    generator = jspec.Generator(
        model("bytes"), model("bpe", 0.01), num_draft_tokens=3, batch_size=2,
        drafter_options=options,
    )  # fmt: skip
    _, scheduler = make(generator)
    settings = jspec.SamplingParams(max_new_tokens=16, temperature=0.8, seed=3)
    prompts = [list((TEXT + TEXT)[:140].encode() + end) for end in (b"a rat", b" the dog")]
    hits, accepted = [], 0
    for prompt in (*prompts, prompts[0]):
        num_cached, served = answer(generator, scheduler, prompt, settings)
        alone = generator.generate(jspec.Request(prompt, settings))
        assert served.token_ids == alone.token_ids
        assert served.stats.num_accepted == alone.stats.num_accepted
        hits.append(num_cached)
        accepted += served.stats.num_accepted
    assert hits == [0, 128, 128]
    assert accepted > 3
