"""Drafters by name, their options, and the head that comes with jspec."""

import dataclasses
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

import jspec.cli.answer_flags  # noqa: F401 (it defines the flags)
from jspec.common.errors import InputError
from jspec.drafters import (
    DRAFTERS,
    DrafterOptions,
    check_options,
    choose_drafter,
    make_drafter,
    options_read,
    with_shipped_head,
    without_unread,
)
from jspec.drafters.eagle_head import default_feature_layers, load_eagle
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.options import option_title
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.drafters.recycle import RecycleDrafter
from jspec.drafters.registry import REGISTRY, drafters_table
from jspec.drafters.spec import find_head, shipped_head
from jspec.drafters.suffix import SuffixDrafter
from jspec.drafters.tables import count_ngrams, save_table
from jspec.kernels.quantized import QuantizedKernel
from jspec.models.config import PRESETS
from jspec.speculation.types import Drafter
from jspec.weights.published import SMOLLM2
from jspec.weights.quantize import dequantize
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.drafters.rows import spec
from tests.tiny import CONFIG
from tests.tiny_heads import SAVE_HEAD

TARGET = dataclasses.replace(CONFIG, num_mtp_layers=1)  # which has what any drafter needs


def make(name, **options):
    """Returns what the drafter of that name is built as."""
    tokenizer = ByteTokenizer(61)
    return make_drafter(name, spec(target=TARGET, **options)._replace(tokenizer=tokenizer))


def title_of(name):
    """Returns what messages call an option."""
    fields = {field.name: field for field in dataclasses.fields(DrafterOptions)}
    return option_title(fields[name])


def write_table(folder, vocab_size=61, order=2):
    """Writes a table; returns its path."""
    path = pathlib.Path(folder, "table.safetensors")
    save_table(count_ngrams([[1, 2, 3, 1, 2]], vocab_size, order=order), path)
    return str(path)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_name_builds_its_drafter(name, tmp_path):
    """`none` is plain decoding: no drafter at all. Two lines of a registry are easily swapped."""
    head = SAVE_HEAD[name](tmp_path / "head", CONFIG) if name in SAVE_HEAD else None
    table = write_table(tmp_path)
    drafter = make(name, head=head, draft_table=table, draft_layers=(0,), pattern="ab|c").drafter
    if name == "none":
        assert drafter is None
    else:
        assert isinstance(drafter, Drafter)
        assert drafter.num_draft_tokens == 3
        assert {kind.drafter for kind in drafter.kinds} == {name}


def test_drafters_read_their_options():
    """Guards against a flag that goes nowhere; ngram has its own bound, and a kind for an order."""
    options = {
        "ngram_min_order": 3, "ngram_max_order": 7, "ngram_window": 99, "ngram_max_tokens": 2,
        "ngram_probs": "sampled", "draft_confidence": 0.25,
    }  # fmt: skip
    drafter = make("ngram", **options).drafter
    assert drafter == NgramDrafter(
        2, 61, 61, min_order=3, max_order=7, window=99, is_sampled=True, min_confidence=0.25
    )
    assert len(drafter.kinds) == 5
    assert not make("ngram").drafter.is_sampled
    drafter = make("prompt_lookup", lookup_min_match=2, lookup_growth=1.5).drafter
    assert drafter == PromptLookupDrafter(3, min_match=2, growth=1.5)
    # One token for each of the vocabulary, padding of the table included.
    drafter = make("recycle").drafter
    assert drafter == RecycleDrafter(3, CONFIG.vocab_size)
    assert drafter.init(2, 9).shape == (2, CONFIG.vocab_size, 1)


def test_suffix_reads_its_options(tmp_path):
    """In a cascade it leaves the rounds after short matches to others."""
    path = tmp_path / "corpus.txt"
    path.write_text("\x01\x02\x03")
    built = make(
        "suffix", draft_corpus=str(path), draft_memory=2, suffix_growth=1.5, suffix_min_share=0.25,
        suffix_min_match=3,
    )  # fmt: skip
    assert built.drafter == SuffixDrafter(
        3, growth=1.5, min_share=0.25, min_match=3, keeps_answers=True
    )
    corpus, memory = built.params
    assert [token for token in corpus.tokens.tolist() if token >= 0] == [1, 2, 3]
    assert (memory.max_answers, int(memory.corpus.num_sorted)) == (2, 0)
    assert make("suffix") == (SuffixDrafter(3), ())
    assert make("suffix+model").drafter.members[0].min_match == 2


@pytest.mark.parametrize("name", ["unigram", "bigram"])
def test_tables_are_asked_for_and_checked(name, tmp_path):
    """Guards against counts of other tokens; a table of order 1 serves `unigram` only."""
    with pytest.raises(InputError, match=f"'{name}' expects a table that scripts/make_answers"):
        make(name)
    with pytest.raises(InputError, match="vocabulary of 61 tokens, got one of 60"):
        make(name, draft_table=write_table(tmp_path, vocab_size=60))
    # The draft model's ids are not the table's.
    assert make(name, draft_table=write_table(tmp_path), vocab_size=59).drafter is not None
    table = write_table(tmp_path, order=1)
    if name == "unigram":
        assert make(name, draft_table=table).drafter is not None
    else:
        with pytest.raises(InputError, match="expects a table with bigrams"):
            make(name, draft_table=table)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookup_growth": -1}, "lookup_growth from 0 to 100, got -1"),
        ({"ngram_min_order": 1}, "ngram_min_order from 2 to ngram_max_order, 4; got 1"),
        ({"ngram_min_order": 5}, "ngram_min_order from 2 to ngram_max_order, 4; got 5"),
        ({"ngram_max_order": 17}, "ngram_max_order from 2 to 16, got 17"),
        ({"ngram_probs": "martial"}, "ngram_probs among deterministic, sampled; got 'martial'"),
        ({"draft_context": -1}, "draft_context from 0 to 10000000, got -1"),
        # Of other types: a traceback from deep inside, or a number silently rounded.
        *(({name: value}, f"{name} ") for name, value in (
            ("ngram_window", 10.5), ("lookup_min_match", "2"), ("inner_num_draft_tokens", True),
            ("draft_layers", 3), ("draft_layers", "0,1"), ("draft_layers", (0.0, 1)),
            ("draft_layers", (False, True)), ("pattern", 3), ("inner_drafter", None),
            ("ngram_probs", 1), ("draft_table", 7),
        )),
        # `--draft_pattern=` would match everywhere and force nothing.
        *(({name: ""}, re.escape(f"{title_of(name)} as a text, got an empty one"))
          for name in ("draft_table", "draft_head", "pattern", "json_skeleton", "inner_drafter")),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_named(options, message):
    """Guards against values that are clamped or end in a shape of zero."""
    with pytest.raises(InputError, match=f"^expected {message}"):
        DrafterOptions(**options)


_ALONE = r"'none' alone, as it drafts nothing; got '{}'"
_BOTH_SIDES = r"a drafter's name on both sides of every '\+', got '{}'$"
_ONE_HEAD = (
    "at most one of eagle, dflash, medusa, blockwise, lookahead in a cascade, as draft_head is one "
    "folder; got '{}'$"
)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zebra", r"a drafter among none, .*prompt_lookup.*; got 'zebra'$"),
        ("ngram+zebra", r".*prompt_lookup.*; got 'zebra' in 'ngram\+zebra'$"),
        ("prompt_lookup+prompt_lookup", "each drafter of a cascade once, got 'prompt_lookup+"),
        *((name, _ALONE) for name in ("model+none", "none+none", "none+prompt_lookup")),
        *((name, _BOTH_SIDES) for name in ("prompt_lookup+", "+model", "+", "model++ngram")),
        *((name, _ONE_HEAD) for name in ("eagle+medusa", "prompt_lookup+lookahead+blockwise")),
    ],
)  # fmt: skip
def test_names_that_cannot_be_are_refused(name, message):
    """Where a drafter is chosen and where it is built."""
    match = "^expected " + message.replace("{}", re.escape(name))
    with pytest.raises(InputError, match=match):
        make(name)
    with pytest.raises(InputError, match=match):
        choose_drafter(name, has_draft="model" in name)


def test_options_are_called_by_their_flags():
    """Guards against a message that tells a user of the program of an option that it lacks."""
    for field in dataclasses.fields(DrafterOptions):
        assert option_title(field).split("--")[-1].strip(")") in flags.FLAGS


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("prompt_lookup", {"draft_layers": (0,)}),
        ("prompt_lookup", {"draft_vocab_size": 70}),
        ("none", {"draft_confidence": 0.5}),
        ("ngram", {"draft_confidence": 0.5}),  # what follows from the text is never unsure
        ("prompt_lookup+model", {"draft_table": "t"}),
        ("hierarchical", {"ngram_window": 9}),
        ("model", {"inner_num_draft_tokens": 2}),
        ("prompt_lookup", {"json_skeleton": "[]"}),
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
    """Guards against a drafter or a paper that the README tells otherwise, or not at all."""
    readme = pathlib.Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    _, rest = readme.split("<!-- drafters -->\n")
    assert rest.split("\n<!-- /drafters -->")[0] == drafters_table()
    for name, entry in REGISTRY.items():
        assert entry.name == name
        assert entry.proposes
        assert re.fullmatch(r"\d{4}\.\d{5}(, \d{4}\.\d{5})*", entry.source) or name == "none"


# The head that comes with jspec.

SHIPPED = PRESETS["smollm2-135m"]


def test_the_shipped_head_is_small_and_fits_its_target():
    """At most 12 MB, with a card; whole, of the target's shape, with no number that is none."""
    folder = find_head(shipped_head("eagle", SMOLLM2))
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 12e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert SMOLLM2 in card
    assert "python -m jspec.train" in card
    head = load_eagle(folder, SHIPPED, jnp.bfloat16)
    assert head.config.feature_layers == default_feature_layers(SHIPPED.num_layers)
    assert head.config.layer.embed_dim == SHIPPED.embed_dim
    kernels = head.params["fc"], head.params["head"]["head"]
    assert all(isinstance(kernel, QuantizedKernel) for kernel in kernels)
    for kernel in map(dequantize, kernels):
        assert np.isfinite(kernel).all()
        assert kernel.std() > 0


def test_the_shipped_head_is_the_default_of_its_target_alone():
    """Not with a draft model, not for other targets; and a folder that is named goes first."""
    other = "random:smollm2-135m"
    assert choose_drafter(None, has_draft=False, target=SMOLLM2) == "prompt_lookup+eagle"
    assert choose_drafter(None, has_draft=True, target=SMOLLM2) == "prompt_lookup+model"
    assert choose_drafter(None, has_draft=False, target=other) == "prompt_lookup"
    assert shipped_head("medusa", SMOLLM2) is None
    named, plain = f"shipped:{SMOLLM2}", DrafterOptions()

    def head_of(name, target, options=plain):
        return with_shipped_head(name, options, target).draft_head

    assert head_of("prompt_lookup+eagle", SMOLLM2) == named
    assert head_of("eagle", other) is None
    assert head_of("medusa", SMOLLM2) is None
    assert head_of("eagle", SMOLLM2, DrafterOptions(draft_head="my")) == "my"
    with pytest.raises(InputError, match="not-there"):
        find_head("not-there")
    with pytest.raises(InputError, match="comes with jspec, shipped:smol"):
        find_head("shipped:llama")
