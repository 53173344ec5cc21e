"""Drafters by name."""

import dataclasses
import pathlib
import re

import jax.numpy as jnp
import pytest
from absl import flags

import jspec.cli.answer_flags  # noqa: F401 (it defines the flags)
from jspec.common.errors import InputError
from jspec.drafters import (
    DRAFTERS,
    DrafterOptions,
    DrafterSpec,
    check_options,
    choose_drafter,
    make_drafter,
    options_read,
    without_unread,
)
from jspec.drafters.model import ModelDrafter
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.options import option_title
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.drafters.recycle import RecycleDrafter
from jspec.drafters.registry import REGISTRY, drafters_table
from jspec.drafters.suffix import SuffixDrafter
from jspec.drafters.tables import TableDrafter, count_ngrams, save_table
from jspec.speculation.types import Drafter
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.tiny import CONFIG
from tests.tiny_heads import SAVE_HEAD

TARGET = dataclasses.replace(CONFIG, num_mtp_layers=1)  # which has what any drafter needs
SPEC = DrafterSpec(
    3, TARGET, 61, CONFIG, jnp.float32,
    options=DrafterOptions(draft_layers=(0,), pattern="ab|c"), tokenizer=ByteTokenizer(61),
)  # fmt: skip


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """What every drafter can be built from."""
    table = write_table(tmp_path_factory.mktemp("table")).draft_table
    return SPEC._replace(options=dataclasses.replace(SPEC.options, draft_table=table))


def title_of(name):
    """Returns what messages call an option."""
    fields = {field.name: field for field in dataclasses.fields(DrafterOptions)}
    return option_title(fields[name])


def write_table(folder, vocab_size=61, order=2):
    """Writes a table; returns options that name it."""
    path = pathlib.Path(folder, "table.safetensors")
    save_table(count_ngrams([[1, 2, 3, 1, 2]], vocab_size, order=order), path)
    return DrafterOptions(draft_table=str(path))


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_name_builds_a_drafter(name, spec, tmp_path):
    """`none` is plain decoding: no drafter at all."""
    if name in SAVE_HEAD:
        head = SAVE_HEAD[name](tmp_path / "head", CONFIG)
        spec = spec._replace(options=dataclasses.replace(spec.options, draft_head=head))
    drafter = make_drafter(name, spec).drafter
    if name == "none":
        assert drafter is None
    else:
        assert isinstance(drafter, Drafter)
        assert drafter.num_draft_tokens == 3


def test_names_mean_what_they_say(spec):
    """Two lines of a registry are easily swapped."""
    assert isinstance(make_drafter("model", SPEC).drafter, ModelDrafter)
    assert isinstance(make_drafter("prompt_lookup", SPEC).drafter, PromptLookupDrafter)
    assert isinstance(make_drafter("ngram", SPEC).drafter, NgramDrafter)
    for name in ("unigram", "bigram", "random"):
        drafter = make_drafter(name, spec).drafter
        assert isinstance(drafter, TableDrafter)
        assert drafter.kinds[0].drafter == name


def test_ngram_reads_its_options():
    """Its width has a bound of its own; it has a kind for each order."""
    options = DrafterOptions(
        ngram_min_order=3, ngram_max_order=7, ngram_window=99, ngram_max_tokens=2,
        ngram_probs="sampled", draft_confidence=0.25,
    )  # fmt: skip
    drafter = make_drafter("ngram", SPEC._replace(options=options)).drafter
    assert drafter == NgramDrafter(
        2, 61, 61, min_order=3, max_order=7, window=99, is_sampled=True, min_confidence=0.25
    )
    assert len(drafter.kinds) == 5
    assert not make_drafter("ngram", SPEC).drafter.is_sampled


def test_prompt_lookup_reads_its_options():
    """Guards against a flag that goes nowhere."""
    options = DrafterOptions(lookup_min_match=2, lookup_growth=1.5)
    drafter = make_drafter("prompt_lookup", SPEC._replace(options=options)).drafter
    assert drafter == PromptLookupDrafter(3, min_match=2, growth=1.5)


def test_suffix_reads_its_options(tmp_path):
    """In a cascade it leaves the rounds after short matches to others."""
    path = tmp_path / "corpus.txt"
    path.write_text("\x01\x02\x03")
    options = DrafterOptions(
        draft_corpus=str(path), draft_memory=2, suffix_growth=1.5, suffix_min_share=0.25,
        suffix_min_match=3,
    )  # fmt: skip
    built = make_drafter("suffix", SPEC._replace(options=options))
    assert built.drafter == SuffixDrafter(
        3, growth=1.5, min_share=0.25, min_match=3, keeps_answers=True
    )
    corpus, memory = built.params
    assert [token for token in corpus.tokens.tolist() if token >= 0] == [1, 2, 3]
    assert (memory.max_answers, int(memory.corpus.num_sorted)) == (2, 0)
    built = make_drafter("suffix", SPEC)
    assert (built.drafter, built.params) == (SuffixDrafter(3), ())
    assert make_drafter("suffix+model", SPEC).drafter.members[0].min_match == 2


def test_recycle_keeps_what_its_chain_follows():
    """One token for each of the vocabulary, padding of the table included."""
    drafter = make_drafter("recycle", SPEC).drafter
    assert drafter == RecycleDrafter(3, CONFIG.vocab_size)
    assert drafter.init(2, 9).shape == (2, CONFIG.vocab_size, 1)


@pytest.mark.parametrize("name", ["unigram", "bigram"])
def test_tables_are_asked_for_and_checked(name, tmp_path):
    """Guards against counts of other tokens, and against a table of nothing."""
    with pytest.raises(InputError, match=f"'{name}' expects a table that scripts/make_answers"):
        make_drafter(name, SPEC)
    changed = SPEC._replace(options=write_table(tmp_path, vocab_size=60))
    with pytest.raises(InputError, match="vocabulary of 61 tokens, got one of 60"):
        make_drafter(name, changed)
    fewer = SPEC._replace(vocab_size=59, options=write_table(tmp_path))
    assert make_drafter(name, fewer).drafter is not None, (
        "the draft model's ids are not the table's"
    )


def test_bigram_expects_bigrams(tmp_path):
    """A table of order 1 serves `unigram` only."""
    spec = SPEC._replace(options=write_table(tmp_path, order=1))
    assert make_drafter("unigram", spec).drafter is not None
    with pytest.raises(InputError, match="expects a table with bigrams"):
        make_drafter("bigram", spec)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookup_growth": -1}, "lookup_growth from 0 to 100, got -1"),
        ({"ngram_min_order": 1}, "ngram_min_order from 2 to ngram_max_order, 4; got 1"),
        ({"ngram_min_order": 5}, "ngram_min_order from 2 to ngram_max_order, 4; got 5"),
        ({"ngram_max_order": 1}, "ngram_max_order from 2 to 16, got 1"),
        ({"ngram_max_order": 17}, "ngram_max_order from 2 to 16, got 17"),
        ({"ngram_window": 0}, "ngram_window from 2 to 32768, got 0"),
        ({"ngram_max_tokens": 0}, "ngram_max_tokens from 1 to 64, got 0"),
        ({"ngram_probs": "martial"}, "ngram_probs among deterministic, sampled; got 'martial'"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    """Guards against values that are clamped or end in a shape of zero."""
    with pytest.raises(InputError, match=message):
        DrafterOptions(**options)


def test_a_missing_draft_model_is_named():
    """Not an attribute error of None later on."""
    with pytest.raises(InputError, match="draft model"):
        make_drafter("model", SPEC._replace(draft_config=None))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prompt_lookup+prompt_lookup", "each drafter of a cascade once, got 'prompt_lookup+"),
        ("model+none", "'none' alone, as it drafts nothing; got 'model\\+none'"),
        ("none+none", "'none' alone, as it drafts nothing; got 'none\\+none'"),
        ("none+prompt_lookup", "'none' alone, as it drafts nothing; got 'none"),
    ],
)
def test_a_cascade_has_different_members(name, message):
    """A cascade with itself inside, or with nothing in it."""
    with pytest.raises(InputError, match=f"expected {message}"):
        make_drafter(name, SPEC)


@pytest.mark.parametrize("name", ["eagle+medusa", "prompt_lookup+lookahead+model+blockwise"])
def test_a_cascade_has_one_trained_head(name, tmp_path):
    """Guards against a head that is looked for in another one's folder."""
    message = (
        "expected at most one of eagle, dflash, medusa, blockwise, lookahead in a cascade, as "
        f"draft_head is one folder; got '{name}'"
    )
    options = DrafterOptions(draft_head=SAVE_HEAD["eagle"](tmp_path / "head", CONFIG))
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        make_drafter(name, SPEC._replace(options=options))
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        choose_drafter(name, has_draft="model" in name, options=options)


@pytest.mark.parametrize(
    "options",
    [
        {"ngram_window": 10.5}, {"ngram_max_tokens": 2.5}, {"lookup_min_match": "2"},
        {"inner_num_draft_tokens": True}, {"draft_layers": 3}, {"draft_layers": "0,1"},
        {"draft_layers": (0.0, 1)}, {"draft_layers": (False, True)}, {"pattern": 3},
        {"inner_drafter": None}, {"ngram_probs": 1}, {"draft_table": 7},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_wrong_types_are_refused(options):
    """Guards against a traceback from deep inside, or a number silently rounded."""
    (name,) = options
    with pytest.raises(InputError, match=f"expected {name} "):
        DrafterOptions(**options)


def test_an_unknown_drafter_is_named():
    """The message lists what there is."""
    with pytest.raises(InputError, match=r"prompt_lookup.*; got 'zebra'$"):
        make_drafter("zebra", SPEC)
    with pytest.raises(InputError, match=r"prompt_lookup.*; got 'zebra' in 'ngram\+zebra'$"):
        make_drafter("ngram+zebra", SPEC)


@pytest.mark.parametrize("name", ["prompt_lookup+", "+model", "+", "model++ngram"])
def test_an_empty_name_in_a_cascade_is_shown(name):
    """Guards against a list of all drafters for a plus too many."""
    message = f"expected a drafter's name on both sides of every '+', got '{name}'"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        choose_drafter(name, has_draft=True)


@pytest.mark.parametrize(
    "name", ["draft_table", "draft_head", "pattern", "json_skeleton", "inner_drafter"]
)
def test_empty_texts_are_refused(name):
    """Guards against `--draft_pattern=`, which matches everywhere and forces nothing."""
    message = f"expected {title_of(name)} as a text, got an empty one"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        DrafterOptions(**{name: ""})


def test_options_are_called_by_their_flags():
    """Guards against a message that tells a user of the program of an option that it lacks."""
    for field in dataclasses.fields(DrafterOptions):
        assert option_title(field).split("--")[-1].strip(")") in flags.FLAGS


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("prompt_lookup", {"draft_layers": (0,)}),
        ("model", {"ngram_probs": "sampled"}),
        ("none", {"draft_confidence": 0.5}),
        ("ngram", {"draft_confidence": 0.5}),  # what follows from the text is never unsure
        ("prompt_lookup+model", {"draft_table": "t"}),
        ("hierarchical", {"ngram_window": 9}),
        ("model", {"inner_num_draft_tokens": 2}),
        ("unigram", {"pattern": "a"}),
        ("prompt_lookup", {"json_skeleton": "[]"}),
        ("recycle", {"draft_corpus": "a.txt"}),
    ],
)
def test_options_that_the_drafter_does_not_read_are_refused(name, options):
    """Guards against an option that is silently ignored; defaults are nobody's wish."""
    (option,) = options
    title = re.escape(title_of(option))
    message = rf"^expected {title} with a drafter that reads it \(.*\), got it with '{name}'$"
    with pytest.raises(InputError, match=message.replace("+", r"\+")):
        check_options([name], DrafterOptions(**options))
    others = without_unread(name, DrafterOptions(**options))
    assert others == DrafterOptions()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("layer_skip", {"draft_layers": (0,), "draft_confidence": 0.5}),
        ("prompt_lookup+layer_skip", {"draft_layers": (0,), "lookup_growth": 1.0}),
        ("ngram", {"draft_confidence": 0.5, "ngram_probs": "sampled"}),
        ("hierarchical", {"lookup_min_match": 2, "draft_confidence": 0.5}),  # the inner one's
        ("hierarchical", {"inner_drafter": "ngram+bigram", "ngram_window": 9, "draft_table": "t"}),
        ("pattern", {"json_skeleton": "[]"}),
        ("suffix+recycle", {"draft_corpus": "a.txt", "suffix_growth": 1.0}),
    ],
)
def test_options_are_read_by_members_and_inner_drafters(name, options):
    """Guards against a refusal of what somebody reads."""
    options = DrafterOptions(**options)
    check_options([name], options)
    check_options(["none", name], options)
    assert without_unread(name, options) == options


def test_every_option_is_read_by_some_drafter():
    """Guards against a new option that the registry does not know."""
    options = DrafterOptions(inner_drafter="ngram", ngram_probs="sampled")
    read = set().union(*(options_read(name, options) for name in DRAFTERS))
    assert read == {field.name for field in dataclasses.fields(DrafterOptions)}


def test_the_default_drafter_is_checked_too():
    """Without a name: the drafter that is taken is named."""
    with pytest.raises(InputError, match=r"reads it \(layer_skip\), got it with 'prompt_lookup'"):
        choose_drafter(None, has_draft=False, options=DrafterOptions(draft_layers=(0,)))
    assert choose_drafter(None, has_draft=True) == "prompt_lookup+model"


def test_the_readme_shows_the_registry():
    """Guards against a drafter or a paper that the README tells otherwise."""
    readme = pathlib.Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    _, rest = readme.split("<!-- drafters -->\n")
    assert rest.split("\n<!-- /drafters -->")[0] == drafters_table()


def test_every_entry_is_complete():
    """Guards against a drafter without a description or a source."""
    for name, entry in REGISTRY.items():
        assert entry.name == name
        assert entry.proposes
        assert re.fullmatch(r"\d{4}\.\d{5}(, \d{4}\.\d{5})*", entry.source) or name == "none"
