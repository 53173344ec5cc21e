"""The logits after a text, by one pass over all of it: what answers are judged by."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jspec.common import processes
from jspec.generation.layout import Layout
from jspec.models import init_cache, make_apply
from jspec.models.encoder_decoder import read_alike
from jspec.speculation.types import ModelParams
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import mask_padding

_SMALLEST_WIDTH = 128


def make_logits_after(model: LoadedModel) -> Callable[..., np.ndarray]:
    """Returns the function from ids to the logits [v] after them: one pass over all of them.

    Its second argument, `source`, is what an encoder-decoder reads, as a `Row` has it.
    """
    config, dtype = model.own_config, model.params["embedding"].dtype
    apply = mask_padding(make_apply(config), model)

    def run(
        params: ModelParams, tokens: jax.Array, num_tokens: jax.Array, source: Any
    ) -> jax.Array:
        cache = init_cache(config, batch_size=1, capacity=tokens.shape[1], dtype=dtype)
        if source is not None:
            constants = read_alike(config, params.target, source, 1, dtype)
            cache = cache.replace(source=constants)
        return apply(params.target, tokens, cache, logits_at=num_tokens - 1)[0][0, 0]

    program, params = jax.jit(Layout.of(model).spread(run)), ModelParams(model.params, None)

    def logits_after(token_ids: Sequence[int], source: np.ndarray | None = None) -> np.ndarray:
        # Padded to powers of two: few widths are compiled.
        width = max(_SMALLEST_WIDTH, 1 << (len(token_ids) - 1).bit_length())
        tokens = np.zeros([1, width], np.int32)
        tokens[0, : len(token_ids)] = token_ids
        length = np.array([len(token_ids)], np.int32)
        return processes.fetch(program(params, tokens, length, source))

    return logits_after
