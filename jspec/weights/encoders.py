"""Which models have an encoder, and whether two have the same encoder, which then runs once."""

import jax
import numpy as np

from jspec.common.errors import InputError
from jspec.weights.resolver import LoadedModel


def have_same_encoder(target: LoadedModel, draft: LoadedModel) -> bool:
    """Returns whether a draft's encoder gives what the target's gives, weight by weight.

    So it is where a draft was trained on the frozen encoder of its target, as distilled Whispers
    are.
    """
    encoder = target.config.encoder
    if encoder is None or encoder != draft.config.encoder:
        return False
    if target.config.embed_dim != draft.config.embed_dim:
        return False
    parts = [(model.params["encoder"], model.params["embedding"]) for model in (target, draft)]
    if encoder.is_audio:  # its encoder looks nothing up
        parts = [of_encoder for of_encoder, _ in parts]
    (leaves, structure), (others, other_structure) = map(jax.tree.flatten, parts)
    return structure == other_structure and all(
        target_leaf.shape == draft_leaf.shape
        and np.array_equal(np.asarray(target_leaf), np.asarray(draft_leaf))
        for target_leaf, draft_leaf in zip(leaves, others, strict=True)
    )


def check_decoder(model: LoadedModel, where: str) -> None:
    """Checks that a model is a decoder alone; raises InputError for an encoder-decoder."""
    if model.config.encoder is not None:
        programs = "jspec transcribe" if model.config.encoder.is_audio else "jspec generate"
        raise InputError(
            f"expected a decoder alone {where}, got {model.name}, an encoder-decoder, with which "
            f"{programs} answers"
        )
