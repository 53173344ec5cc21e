"""What jspec's methods are measured beside: transformers' and llama.cpp's like methods."""

import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

from jspec.drafters import needs_draft_model
from jspec.evaluation.benchmarking.answers import GenerateFn
from jspec.evaluation.benchmarking.llama_cpp_baseline import LLAMA_PLAIN, llama_methods
from jspec.evaluation.benchmarking.methods import JSPEC_PLAIN, Method
from jspec.evaluation.benchmarking.transformers_baseline import TransformersModels
from jspec.generation.generator import DEFAULT_NUM_DRAFT_TOKENS
from jspec.weights.resolver import LoadedModel

TRANSFORMERS_PLAIN = "transformers plain"
_COMPILED = "transformers plain, compiled"
_PLAIN = (JSPEC_PLAIN, TRANSFORMERS_PLAIN, LLAMA_PLAIN)


class Wanted(NamedTuple):
    """Which baselines to measure.

    Attributes:
      transformers: its drafters and numbers of drafts, by name; see `transformers_methods`.
      compiled: whether its plain decoding is measured with a compiled step as well.
      llama_cpp: folder of llama.cpp's programs, or None.
      num_lookup_drafts: of llama.cpp's lookup.
    """

    transformers: Mapping[str, tuple[str, int]]
    compiled: bool
    llama_cpp: str | None
    num_lookup_drafts: int

    @classmethod
    def beside(
        cls, methods: Mapping[str, Method], *, transformers: bool, compiled: bool,
        llama_cpp: str | None,
    ) -> Self:  # fmt: skip
        """Returns the baselines beside some of jspec's methods."""
        alike = transformers_methods(methods)
        lookup = next(number for drafter, number in alike.values() if drafter == "prompt_lookup")
        return cls(alike if transformers else {}, compiled, llama_cpp, lookup)


def transformers_methods(methods: Mapping[str, Method]) -> dict[str, tuple[str, int]]:
    """Returns, by name, transformers' drafters and numbers of drafts that stand beside jspec's.

    Prompt lookup and the draft model have the numbers that jspec's methods have. Where jspec
    chooses the number, and for prompt lookup where jspec does not use it, it is jspec's default.

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
    return {
        TRANSFORMERS_PLAIN if drafter == "none" else f"transformers {drafter}:{number}": (
            drafter,
            number,
        )
        for drafter, number in pairs
    }


def _fixed(num_draft_tokens: int | str) -> int:
    return num_draft_tokens if isinstance(num_draft_tokens, int) else DEFAULT_NUM_DRAFT_TOKENS


def working_baselines(
    wanted: Wanted,
    target: LoadedModel,
    draft: LoadedModel | None,
    texts: Sequence[str],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
) -> tuple[dict[str, GenerateFn], dict[str, str]]:
    """Returns the baselines that work here, and why others are left out, by name.

    What torch's compiler needs, for example a C compiler, may be missing: the rest is measured.
    Each is warmed up on two prompts.

    Args:
      wanted: the baselines.
      target: the target.
      draft: the draft model for transformers, if there is one.
      texts: the prompts.
      prompts: their ids.
      max_new_tokens: of an answer.
    """
    working, left_out = {}, {}
    for names, make in _makers(wanted, target, draft, texts, prompts, max_new_tokens):
        try:
            made = make()
        except Exception as error:  # whatever another library may raise, here and below
            left_out |= dict.fromkeys(names, _reason(error))
            continue
        for name, generate in made.items():
            print(f"warming up {name}", file=sys.stderr, flush=True)
            try:
                for prompt in prompts[:2]:
                    generate(prompt, 0)
                working[name] = generate
            except Exception as error:
                left_out[name] = _reason(error)
    for name, reason in left_out.items():
        print(f"note: {name} is left out: {reason}", file=sys.stderr, flush=True)
    return working, left_out


def _makers(
    wanted: Wanted,
    target: LoadedModel,
    draft: LoadedModel | None,
    texts: Sequence[str],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
) -> Iterator[tuple[list[str], Callable[[], dict[str, GenerateFn]]]]:
    """Yields the names of each library's methods, and what makes them."""

    def make_transformers() -> dict[str, GenerateFn]:
        models = TransformersModels(target, draft)
        made = {
            name: models.method(*one, max_new_tokens) for name, one in wanted.transformers.items()
        }
        if wanted.compiled:
            length = max(map(len, prompts)) + max_new_tokens
            made[_COMPILED] = models.compiled_method(length, max_new_tokens)
        return made

    def make_llama_cpp() -> dict[str, GenerateFn]:
        written = [target.tokenizer.chat_prompt([{"role": "user", "content": t}]) for t in texts]
        by_ids = dict(zip(map(tuple, prompts), written, strict=True))
        folder = pathlib.Path(wanted.llama_cpp or "")
        return llama_methods(folder, by_ids, max_new_tokens, num_drafts=wanted.num_lookup_drafts)

    if wanted.transformers:
        yield list(wanted.transformers), make_transformers
    if wanted.llama_cpp is not None:
        yield [LLAMA_PLAIN], make_llama_cpp


def plain_of(names: Sequence[str]) -> dict[str, str]:
    """Returns, for each method, plain decoding by the same program, or else jspec's.

    Args:
      names: of all methods that are measured.
    """
    found = {}
    for name in names:
        own = next(plain for plain in _PLAIN if name.split()[0] == plain.split()[0])
        found[name] = own if own in names else JSPEC_PLAIN
    return found


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
