"""The two sides of the benchmark: jspec's methods of generating, and transformers' like methods."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from jspec.drafters import DrafterOptions, needs_draft_model, without_unread
from jspec.evaluation.benchmarking.methods import Method
from jspec.evaluation.benchmarking.peers import Generated, GenerateFn, Peer
from jspec.generation.generator import DEFAULT_NUM_DRAFT_TOKENS, Generator
from jspec.generation.request import Request, Settings
from jspec.weights.resolver import LoadedModel

JSPEC_PLAIN = "jspec plain"
PEER_PLAIN = "transformers plain"
PEER_COMPILED = "transformers plain, compiled"


def jspec_generators(
    target: LoadedModel,
    draft: LoadedModel | None,
    methods: Mapping[str, Method],
    options: DrafterOptions,
    **rule: Any,
) -> dict[str, Generator]:
    """Returns a Generator for each way; `rule` are the options of the Generator that name one."""
    return {
        name: Generator(
            target,
            draft if needs_draft_model(method.drafter) else None,
            drafter=method.drafter,
            drafter_options=without_unread(method.drafter, options),
            num_draft_tokens=method.num_draft_tokens,
            **rule,
        )
        for name, method in methods.items()
    }


def greedy_methods(generators: Mapping[str, Generator]) -> dict[str, GenerateFn]:
    """Returns greedy generation by each of them."""

    def make(generator: Generator) -> GenerateFn:
        def generate(prompt: list[int], max_new_tokens: int) -> Generated:
            request = Request(prompt, Settings(max_new_tokens=max_new_tokens))
            result = generator.generate(request)
            stats = result.stats
            return Generated(result.token_ids, stats.num_round_tokens, stats.num_rounds)

        return generate

    return {name: make(generator) for name, generator in generators.items()}


def peer_methods(methods: Mapping[str, Method]) -> dict[str, tuple[str, int]]:
    """Returns, by name, transformers' drafters and numbers of drafts that stand beside jspec's.

    Prompt lookup and the draft model have the numbers that jspec's ways have. Where jspec chooses
    the number, and for prompt lookup where jspec does not use it, it is jspec's default.

    Args:
      methods: jspec's.
    """
    pairs = [("none", 0)]
    for method in methods.values():
        if method.drafter == "prompt_lookup":
            pairs.append(("prompt_lookup", _fixed(method.num_draft_tokens)))
        elif needs_draft_model(method.drafter):
            pairs.append(("model", _fixed(method.num_draft_tokens)))
    if not any(drafter == "prompt_lookup" for drafter, _ in pairs):
        pairs.append(("prompt_lookup", DEFAULT_NUM_DRAFT_TOKENS))
    return {_peer_name(*pair): pair for pair in pairs}


def _fixed(num_draft_tokens: int | str) -> int:
    return num_draft_tokens if isinstance(num_draft_tokens, int) else DEFAULT_NUM_DRAFT_TOKENS


def _peer_name(drafter: str, num_draft_tokens: int) -> str:
    return PEER_PLAIN if drafter == "none" else f"transformers {drafter}:{num_draft_tokens}"


def transformers_generators(
    target: LoadedModel,
    draft: LoadedModel | None,
    methods: Mapping[str, tuple[str, int]],
    compiled_length: int | None = None,
) -> dict[str, GenerateFn]:
    """Returns greedy generation by transformers in each way of `peer_methods`.

    Args:
      target: the target.
      draft: the draft model, if there is one.
      methods: drafters and numbers of drafts, by name.
      compiled_length: tokens of prompt and answer for plain decoding compiled as well; None leaves
        it out.
    """
    peer = Peer(target, draft)
    generators = {name: peer.method(*method) for name, method in methods.items()}
    if compiled_length is not None:
        generators[PEER_COMPILED] = peer.compiled_method(compiled_length)
    return generators


def working_peers(
    target: LoadedModel,
    draft: LoadedModel | None,
    methods: Mapping[str, tuple[str, int]],
    *,
    compiled_length: int | None,
    warm_up: Callable[[dict[str, GenerateFn]], None],
) -> tuple[dict[str, GenerateFn], dict[str, str]]:
    """Returns those of `transformers_generators` that work, and why others are left out, by name.

    What torch's compiler needs, a C compiler for one, may not be there: the rest is measured.

    Args:
      target: the target.
      draft: the draft model, if there is one.
      methods: see `transformers_generators`.
      compiled_length: likewise.
      warm_up: answers something in each of some methods.
    """
    working, left_out = {}, {}
    try:
        peers = transformers_generators(target, draft, methods, compiled_length)
    except Exception as error:  # whatever another library may raise, here and below
        peers, left_out = {}, dict.fromkeys(methods, _reason(error))
    for name, generate in peers.items():
        try:
            warm_up({name: generate})
            working[name] = generate
        except Exception as error:
            left_out[name] = _reason(error)
    for name, reason in left_out.items():
        print(f"note: {name} is left out: {reason}", file=sys.stderr, flush=True)
    return working, left_out


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
