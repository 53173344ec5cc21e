"""Tiny models with opinions, and Generators of them that the tests share: compiling takes longest.

Ids are ASCII bytes, so that texts are texts. Random weights of std 0.02 would give almost uniform
distributions, whose tests prove nothing: here the weights are large, some tokens are liked more
than others, so that texts repeat themselves, and the draft is the target disturbed.
"""

import dataclasses
import functools
import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jspec.drafters import DrafterOptions
from jspec.drafters.dflash_head import save_dflash
from jspec.generation.generator import Generator
from jspec.models import DecoderConfig
from jspec.weights import Tokenizer
from jspec.weights.hf import save_hf
from jspec.weights.resolver import LoadedModel
from jspec.weights.tensor_names import parameter_table
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests import tiny_dflash
from tests.weights.toys import make_backend

CONFIG = DecoderConfig(
    vocab_size=128, embed_dim=32, hidden_dim=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_seq_len=200, eos_ids=(0,),
)  # fmt: skip
DRAFTERS = ("none", "prompt_lookup", "self", "model", "hierarchical")
NUM_DRAFT_TOKENS = 4
_STD = 0.25
_FAVOUR = 0.5
_DISTURBANCE = 0.03


def peaked_params(config, seed=0, disturbance=0.0):
    """Returns random float32 parameters of large weights, the same ones plus a little noise."""
    rng, noise, favours = (np.random.default_rng((seed, i)) for i in range(3))
    leaves = {}
    for rule in parameter_table(config):
        values = rng.normal(size=rule.shape) * _STD
        values += noise.normal(size=rule.shape) * disturbance
        if rule.path[-1] == "scale":
            values += 1
        if rule.path == ("head",):
            values *= np.exp(favours.normal(size=(config.vocab_size, 1)) * _FAVOUR)
        leaves[rule.path] = jnp.asarray(values.astype(np.float32))
    return unflatten_dict(leaves)


def make_model(config=CONFIG, *, params=None, tokenizer=None, name="tiny", is_random=False):
    """Returns a model in memory, of the target's weights and a byte tokenizer by default."""
    if params is None:
        params = peaked_params(config)
    if tokenizer is None:
        tokenizer = ByteTokenizer(config.vocab_size, eos_ids=config.eos_ids)
    return LoadedModel(config, params, tokenizer, name, is_random)


@functools.cache
def target():
    """Returns the target of most tests."""
    return make_model()


@functools.cache
def draft():
    """Returns a draft that agrees with the target often, but not always."""
    return make_model(params=peaked_params(CONFIG, disturbance=_DISTURBANCE), name="draft")


@functools.cache
def small(seed=0, disturbance=0.0):
    """Returns a model of one layer: its programs take half as long to compile."""
    config = dataclasses.replace(CONFIG, num_layers=1)
    return make_model(config, params=peaked_params(config, seed, disturbance), name="small")


def with_eos(model, *eos_ids):
    """Returns the model with other ends."""
    return dataclasses.replace(model, config=dataclasses.replace(model.config, eos_ids=eos_ids))


def make_generator(drafter, model=None, **options):
    """Returns a new Generator; the drafter "self" is the target drafting for itself.

    "tree" and "self tree" are trees of a draft model, and of the target; "merged tree" has lookups
    and recycled tokens beside the target's tokens. "dflash" has a head that was made for the
    target.
    """
    if drafter == "dflash":
        with tempfile.TemporaryDirectory() as folder:
            save_dflash(pathlib.Path(folder), *_dflash_head())
            head = DrafterOptions(draft_head=folder)
            options = {"num_draft_tokens": NUM_DRAFT_TOKENS, "drafter_options": head} | options
            return Generator(model or target(), drafter=drafter, **options)
    model = model or target()
    drafts = {"self": model, "model": draft(), "hierarchical": draft(), "tree": draft()}
    drafts |= {"self tree": model, "merged tree": model}
    usual = {} if drafter == "none" else {"num_draft_tokens": NUM_DRAFT_TOKENS}
    if "tree" in drafter:
        tree = DrafterOptions(tree_depth=3, tree_branches=2)
        usual = {"num_draft_tokens": 7, "drafter_options": tree}
    options = usual | options
    kind = "model" if drafter in ("self", "tree", "self tree") else drafter
    if drafter == "merged tree":
        kind = "prompt_lookup+recycle+model"
    return Generator(model, drafts.get(drafter), drafter=kind, **options)


@functools.cache
def _dflash_head():
    """Returns the shape of a head of DFlash, and parameters of which the target keeps drafts."""
    config = tiny_dflash.make_config(CONFIG)
    return config, tiny_dflash.fitted(config, CONFIG, target().params)


@functools.cache
def _shared(drafter, **options):
    generator = make_generator(drafter, **options)
    alike = {"self": "model", "self tree": "tree"}.get(drafter)
    if alike is not None:  # weights are data: the target drafts by the programs of its draft
        generator.engine = _shared(alike, **options).engine
    return generator


def shared_generator(drafter, **options):
    """Returns the Generator of the target with those options, the same one at every call."""
    usual = {"num_draft_tokens": NUM_DRAFT_TOKENS, "batch_size": 1, "acceptance": "rejection"}
    return _shared(drafter, **{k: v for k, v in options.items() if usual.get(k) != v})


def save_folder(folder, *, template=None, seed=0, **changes):
    """Writes a Hugging Face folder of a tiny model with a tokenizer of one token a byte."""
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(
        make_backend(special=tuple(special.values())),
        special_tokens=special,
        chat_template=template,
    )
    config = dataclasses.replace(CONFIG, vocab_size=258, bos_id=0, eos_ids=(1,), **changes)
    save_hf(folder, config, peaked_params(config, seed), tokenizer=tokenizer)
    return folder
