"""What nobody would read is refused, and what somebody reads is not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jspec.common.errors import InputError
from jspec.drafters import (
    DEFAULT_NUM_DRAFT_TOKENS,
    DRAFTERS,
    DrafterOptions,
    DrafterSpec,
    draws_from_distribution,
    make_drafter,
)
from jspec.drafters.tables import count_ngrams, save_table
from jspec.generation.options import (
    check_draft_sampling,
    check_num_draft_tokens,
    check_rule_options,
    rules_that_read,
    settings_read_by,
)
from jspec.generation.request import Request, SamplingParams
from jspec.models import make_apply
from jspec.sampling.settings import Switches
from jspec.speculation.acceptance import RULES, RuleOptions, get_rule
from jspec.speculation.round import propose
from jspec.speculation.types import RoundInputs, TargetView
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.speculation.drive import settings_of
from tests.tiny import CONFIG, empty_cache, random_params
from tests.tiny_heads import SAVE_HEAD
from tests.tiny_models import make_generator, shared_generator

_NO_DRAFTS = r"expected num_draft_tokens with a drafter that drafts, got {} with 'none'$"
_LENIENT = r"reads it \(lenient, lenient_argmax\), got it with '{}' and '{}'$"
_TYPICAL = r"expected {} with .* rule that reads it \(typical\), got it with '{}' and '{}'$"
_TEMPERATURE = (
    r"expected draft_temperature with a drafter that draws from a distribution "
    r"\(model, .*random, or ngram with ngram_probs=sampled\), got it with '{}'$"
)
_OPTIONS = DrafterOptions()
_SAMPLED = DrafterOptions(ngram_probs="sampled")
_SETTINGS = SamplingParams()
_RULE_OPTIONS = RuleOptions()
_COOL = SamplingParams(draft_temperature=0.5)


def check(
    drafter="prompt_lookup", options=_OPTIONS, settings=_SETTINGS, acceptance="rejection",
    num_draft_tokens=DEFAULT_NUM_DRAFT_TOKENS, rule_options=_RULE_OPTIONS,
):  # fmt: skip
    check_num_draft_tokens(num_draft_tokens, drafter)
    check_rule_options(rule_options, acceptance, drafter)
    check_draft_sampling(settings, [(drafter, options)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"acceptance": "typical", "rule_options": RuleOptions(lenience=1.0)},
            _LENIENT.format("prompt_lookup", "typical"),
        ),
        (
            {"acceptance": "lenient", "rule_options": RuleOptions(typical_epsilon=0.2)},
            _TYPICAL.format("typical_epsilon", "prompt_lookup", "lenient"),
        ),
        ({"drafter": "ngram", "settings": _COOL}, _TEMPERATURE.format("ngram")),
        (
            {"drafter": "pattern+ngram", "settings": SamplingParams(draft_temperature=0.0)},
            _TEMPERATURE.format(r"pattern\+ngram"),
        ),
    ],
)
def test_what_nobody_reads_is_refused(changes, message):
    """Guards against a run of something else than was asked for; see also test_bad_input.py."""
    with pytest.raises(InputError, match=message) as caught:
        check(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"drafter": "none"},
        {"drafter": "none", "acceptance": "lenient"},
        {"num_draft_tokens": "auto"},
        {"acceptance": "lenient", "rule_options": RuleOptions(lenience=0.2)},
        {"acceptance": "lenient_argmax", "rule_options": RuleOptions(lenience=0.2)},
        {"acceptance": "typical", "rule_options": RuleOptions(0.5, 0.2, 0.1)},
        {"drafter": "random", "settings": _COOL},
        {"drafter": "prompt_lookup+model", "settings": _COOL},
        {"drafter": "ngram", "settings": _COOL, "options": _SAMPLED},
    ],
    ids=str,
)
def test_what_somebody_reads_passes(changes):
    """Guards against a refusal of what is read, and of defaults, which are nobody's wish."""
    check(**changes)


@pytest.mark.parametrize("rule", RULES)
def test_rules_that_read_an_option_are_others_by_it(rule):
    """Every option has a reader; guards against a rule whose object is made anew at each call."""
    for field in dataclasses.fields(RuleOptions):
        readers = rules_that_read(field.name)
        assert readers
        low, high = field.metadata["between"]
        assert low <= field.default <= high
        changed = get_rule(rule, RuleOptions(**{field.name: low + (high - low) / 4}))
        assert (changed is not get_rule(rule)) == (rule in readers)


TARGET = dataclasses.replace(CONFIG, num_mtp_layers=1)  # which has what any drafter needs
SPEC = DrafterSpec(3, TARGET, 61, CONFIG, jnp.float32, tokenizer=ByteTokenizer(61))
CASES = [
    (name, distribution)
    for name in DRAFTERS
    if name != "none"
    for distribution in ("deterministic", "sampled")
    if distribution == "deterministic" or name in ("ngram", "bigram", "unigram", "model")
]
CASES += [(f"prompt_lookup+{name}", "deterministic") for name in ("random", "pattern")]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "table.safetensors"
    save_table(count_ngrams([[1, 2, 3, 1, 2]], 61), path)
    return str(path)


@pytest.fixture(scope="module")
def target_params():
    return random_params(TARGET, seed=0, std=0.2)


@pytest.mark.parametrize(("name", "distribution"), CASES)
def test_who_draws_is_who_reports_a_distribution(
    name, distribution, table, target_params, tiny_pair, tmp_path
):
    """Guards against a draft temperature that is refused and read, or taken and not read.

    Traced only: drafts that follow from the context have no distribution.
    """
    options = DrafterOptions(
        pattern="ab|c", draft_table=table,
        draft_head=SAVE_HEAD[name](tmp_path / "head", CONFIG) if name in SAVE_HEAD else None,
        ngram_probs=distribution,
    )  # fmt: skip
    spec = SPEC._replace(draft_params=tiny_pair.draft, options=options)
    drafter, params = make_drafter(name, spec)
    inputs = RoundInputs(
        jnp.zeros([1], jnp.int32),
        limit=lambda kind: jnp.full_like(kind, drafter.num_draft_tokens),
        rng_keys=jax.random.split(jax.random.key(0), (1, drafter.num_draft_tokens)),
        settings=settings_of(1, 1.0),
        view=TargetView(target_params, tiny_pair.apply, empty_cache(1, 32)),
    )
    propose = functools.partial(drafter.propose, inputs=inputs)
    proposal, _ = jax.eval_shape(propose, params, drafter.init(1, 32))
    assert draws_from_distribution(name, options) == (proposal.probs is not None)


def test_settings_lose_what_a_drafter_does_not_read():
    """Settings are shared by the ways of an experiment, one of which is plain decoding."""
    assert settings_read_by("none", _OPTIONS, _COOL) == SamplingParams()
    assert settings_read_by("ngram", _OPTIONS, _COOL) == SamplingParams()
    assert settings_read_by("ngram", _SAMPLED, _COOL) == _COOL


def test_a_generator_refuses_what_it_would_not_read():
    """In Python as in the program; the default number of drafts is nobody's wish."""
    with pytest.raises(InputError, match=_NO_DRAFTS.format(3)):
        make_generator("none", num_draft_tokens=3)
    make_generator("none", num_draft_tokens=DEFAULT_NUM_DRAFT_TOKENS)
    generator = shared_generator("prompt_lookup")
    with pytest.raises(InputError, match="^" + _TEMPERATURE.format("prompt_lookup")):
        generator.generate("ab", _COOL)


def test_filters_of_drafts_are_read_by_what_draws_and_refused_elsewhere():
    """Guards against an option that does nothing; see also test_generator_coupled.py."""
    cut = SamplingParams(12, temperature=1.0, draft_top_k=1, draft_top_p=0.5, seed=3)
    assert settings_read_by("prompt_lookup", _OPTIONS, cut) == cut.without_draft_sampling()
    assert cut.draft_sampling == (1.0, 1, 0.5)
    for name, value in {"draft_top_k": 1, "draft_top_p": 0.5}.items():
        settings = SamplingParams(**{name: value})
        with pytest.raises(InputError, match=f"^expected {name} with a drafter that draws"):
            check(settings=settings)
        check("model", settings=settings)


def test_a_filter_of_drafts_cuts_only_the_drafts():
    """Guards against a filter that never reaches the drafter, or reaches the target."""
    generator = make_generator("model", num_draft_tokens=3)
    row = generator.make_row(Request("ab", SamplingParams(temperature=1.0, draft_top_k=2)))
    switches = generator.switches([row.settings])
    state = generator.engine.prefill(generator.params, row, 64, switches)
    assert switches == Switches(draft_filters=True)
    call = functools.partial(
        propose, target=make_apply(generator.target.config), drafter=generator.engine.drafter,
        rule=generator.rule,
    )  # fmt: skip
    proposal, _ = jax.jit(call)(generator.params, state)
    assert ((proposal.probs > 0).sum(axis=-1) == 2).all()
    assert jnp.take_along_axis(proposal.probs, proposal.tokens[..., None], 2).all()
    assert state.settings.top_k == 0


def test_plain_decoding_has_no_room_to_leave_for_drafts():
    """Guards against a short context refused for a number of drafts that none may change."""
    generator = make_generator("none", max_seq_len=4)
    assert len(generator.generate(Request([1, 2], SamplingParams(max_new_tokens=9))).token_ids) == 2
