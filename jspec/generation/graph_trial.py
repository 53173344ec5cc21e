"""Whether the rounds of a run may be one CUDA graph on this GPU: a trial of real rounds, kept.

XLA makes a graph when a program runs for the second time, and changes its addresses in later runs.
It may start a loop too early, or go on with old memory (openxla/xla#33073, openxla/xla#35760). So
rounds of tiny models, which hold every kind of loop that jspec has, run several times on new
memory, with and without a graph, and must do the same token for token. (A loop that counts its
turns, as an earlier trial had, is no test: its condition compares two numbers, and so it waits for
what comes before it in any case; see `jspec.kernels.loops`.)

Right or wrong, the verdict is kept as those on kernels are (`kernels.decide`), for jspec's present
sources. An error is not: it may be the moment's.
"""

import concurrent.futures
import contextvars
import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jspec import kernels
from jspec.common.errors import say
from jspec.common.typing import Params
from jspec.drafters import DrafterOptions, make_drafter
from jspec.drafters.eagle import EagleDrafter
from jspec.drafters.eagle_head import EagleConfig, init_eagle_params
from jspec.generation.engine import Engine
from jspec.generation.options import make_spec
from jspec.generation.request import SamplingParams
from jspec.generation.rows import Row
from jspec.models import DecoderConfig
from jspec.sampling.settings import Switches
from jspec.speculation.acceptance import get_rule
from jspec.speculation.beam import BeamLimits, BeamState, num_candidates
from jspec.speculation.types import Drafter, ModelParams, SpecState, StepInfo
from jspec.weights.resolver import LoadedModel
from jspec.weights.tensor_names import parameter_table
from jspec.weights.tokenizers.tokenizer import ByteTokenizer

Options = Mapping[str, int | str]
Runner = Callable[[int], list[np.ndarray]]
"""From the number of a run to what its rounds have done."""

_NUM_RUNS = 6  # the first is no graph, the second makes it, later ones change its addresses
_NUM_ROUNDS = 8
_CAPACITY = 128
_NO_GRAPH = {"xla_gpu_enable_command_buffer": ""}
_SAME_TILINGS = {"xla_gpu_autotune_level": 0}  # or a sum's order may differ, and so a token
_CONFIG = DecoderConfig(
    vocab_size=64, embed_dim=32, hidden_dim=48, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=8, max_seq_len=_CAPACITY,
)  # fmt: skip
_HEAD = EagleConfig(_CONFIG, _CONFIG.vocab_size, (0, 1))
_NUM_BEAMS = 3


@dataclasses.dataclass(frozen=True)
class _Subject:
    """Whose rounds are run; drafts come from a draft model, or else from a head.

    Attributes:
      num_drafts: of a round.
      num_rows: of the batch; one that searches has beams.
      options: of a draft model's drafts.
    """

    num_drafts: int
    num_rows: int
    options: DrafterOptions | None = None


_SUBJECTS = {
    # Rows enough for a verify call of the width that is needed; drafts may end early.
    "chain": _Subject(3, 32, DrafterOptions(draft_confidence=0.02)),
    "tree": _Subject(5, 2, DrafterOptions(tree_depth=2, tree_branches=2)),
    "head": _Subject(3, 2),
    "beams": _Subject(3, _NUM_BEAMS, DrafterOptions()),
}
_STD, _DISTURBANCE = 0.25, 0.03  # of weights, and of the draft's beside them


def check_one_graph() -> None:
    """Finds out whether runs may be one graph on this GPU, unless it is known or the user's choice.

    Where they may not, one line on standard error says why. On other devices nothing is done.
    """
    if not kernels.awaits_graph_trial():
        return
    key = "one graph", kernels.sources_digest(pathlib.Path(__file__).parents[1])
    verdict = kernels.decide(key, ["no graph", "one graph"], _reach)
    for problem in verdict.get("faults", {}).values():
        slow = "the host drives its loops, and short rounds take longer"
        say(f"jspec: a run is not one graph ({problem}): {slow}")
    kernels.allow_one_graph(verdict["choice"] == "one graph")


def _reach() -> kernels.Verdict:
    say("trying whether rounds may be one graph on this GPU, once for this driver and version")
    problem = find_problem(make_runner)
    faults = {"one graph": problem} if problem else {}
    return {"what": "rounds", "choice": "no graph" if problem else "one graph", "faults": faults}


def find_problem(make: Callable[[str, Options], Runner]) -> str:
    """Returns how rounds in a graph differ from those without one; "" if they do not.

    `make` makes runs from the name of a subject and XLA's options. It is called in several threads,
    and so is the first run of each: nearly all of the time goes into compiling.
    """
    kinds = _NO_GRAPH | _SAME_TILINGS, kernels.one_graph_options() | _SAME_TILINGS
    subjects = list(itertools.product(_SUBJECTS, kinds))
    with concurrent.futures.ThreadPoolExecutor(len(subjects)) as pool:
        # In copies of this thread's context, which says that it is a trial.
        begun = [
            pool.submit(contextvars.copy_context().run, _begin, make, name, options)
            for name, options in subjects
        ]
    runs = (future.result() for future in begun)
    for name in _SUBJECTS:
        (without, expected), (in_graph, outcome) = next(runs), next(runs)
        for index in range(_NUM_RUNS):
            if index > 0:
                outcome, expected = in_graph(index), without(index)
            if not all(itertools.starmap(np.array_equal, zip(outcome, expected, strict=True))):
                return f"run {index + 1} of {_NUM_RUNS} with a {name} gave other tokens"
    return ""


def _begin(
    make: Callable[[str, Options], Runner], name: str, options: Options
) -> tuple[Runner, list[np.ndarray]]:
    """Returns a subject's runner, and what its first run has done, for which it is compiled."""
    run = make(name, options)
    return run, run(0)


def make_runner(name: str, options: Options) -> Runner:
    """Returns a function that runs rounds of tiny models; see `find_problem`.

    Every run has its own texts. Every second row is at temperature 0; beams all are.
    """
    subject, is_search = _SUBJECTS[name], name == "beams"
    target = _make_model(0.0)
    drafter, draft_params = _make_drafter(target, subject)
    with kernels.trying_options(dict(options)):
        rule = get_rule("greedy" if is_search else "rejection")
        engine = Engine(target, drafter, rule, (), draft_params)
    params, before = ModelParams(target.params, draft_params), list[Any]()

    def run(index: int) -> list[np.ndarray]:
        if is_search:
            state, infos, _ = engine.search(params, _start_search(engine, params, index))
            outcome = [np.asarray(leaf) for leaf in jax.tree.leaves((state.beams, infos))]
        else:
            state = _start(engine, params, index, subject.num_rows)
            state, infos = engine.run(params, state, _NUM_ROUNDS)
            outcome = _outcome(infos)
        before.append(state)  # kept, so that the next run has other memory
        return outcome

    return run


def _row(index: int) -> Row:
    """Returns the request of run `index`."""
    prompt = [(7 * place + 5 * index) % _CONFIG.vocab_size for place in range(3, 12 + index)]
    return Row(SamplingParams(temperature=1.2), prompt, stop_ids=(), max_length=_CAPACITY)


def _start(engine: Engine, params: ModelParams, index: int, num_rows: int) -> SpecState:
    """Returns the state of rows that have read the prompt of run `index`."""
    state = engine.prefill(params, _row(index), _CAPACITY, Switches())
    state = jax.tree.map(lambda leaf: jnp.repeat(leaf, num_rows, axis=0), state)
    numbers = jnp.arange(num_rows, dtype=jnp.uint32) + jnp.uint32(index)
    settings = state.settings
    temperature = jnp.where(numbers % 2 == 0, 0, settings.temperature)
    return state.replace(seed=numbers, settings=settings.replace(temperature=temperature))


def _start_search(engine: Engine, params: ModelParams, index: int) -> BeamState:
    """Returns the state before the first step of a search after the prompt of run `index`."""
    row = _row(index)
    row = row._replace(settings=SamplingParams(temperature=0.0))
    read = engine.prefill(params, row, _CAPACITY, Switches(), num_unread=1)
    limits = BeamLimits(read.stop_ids[0], jnp.int32(24), jnp.float32(1), jnp.int32(0))
    return engine.begin_beams(
        read,
        np.array(row.prompt[-1:], np.int32),
        limits,
        num_beams=_NUM_BEAMS,
        num_candidates=num_candidates(_NUM_BEAMS, 0),
        max_steps=_CAPACITY,
    )


def _outcome(infos: StepInfo) -> list[np.ndarray]:
    """Returns the tokens of rounds and the counts: a wrong draft may leave the tokens right."""
    tokens, counts = np.asarray(infos.tokens), np.asarray(infos.num_tokens)
    is_token = np.arange(tokens.shape[-1]) < counts[..., None]
    return [
        np.where(is_token, tokens, -1),
        counts,
        np.asarray(infos.num_proposed),
        np.asarray(infos.num_accepted),
    ]


def _make_drafter(target: LoadedModel, subject: _Subject) -> tuple[Drafter, Params]:
    if subject.options is not None:
        draft = _make_model(_DISTURBANCE)
        spec = make_spec(target, draft, "model", subject.options, subject.num_drafts)
        built = make_drafter("model", spec)
        assert built.drafter is not None
        return built.drafter, built.params
    size = _CONFIG.vocab_size
    drafter = EagleDrafter(subject.num_drafts, size, size, config=_HEAD, dtype=jnp.float32)
    shapes = jax.eval_shape(lambda: init_eagle_params(_HEAD, jax.random.key(0)))
    leaves: dict[Any, Any] = dict(flatten_dict(shapes))
    params = _draw({path: leaf.shape for path, leaf in leaves.items()}, 0.0)
    return drafter, params | {"ids": jnp.arange(size, dtype=jnp.int32)}


def _make_model(disturbance: float) -> LoadedModel:
    """Returns a tiny model in float32 whose distributions are peaked."""
    shapes = {parameter.path: parameter.shape for parameter in parameter_table(_CONFIG)}
    params, tokenizer = _draw(shapes, disturbance), ByteTokenizer(_CONFIG.vocab_size)
    return LoadedModel(_CONFIG, params, tokenizer, "trial", is_random=True)


def _draw(shapes: Mapping[tuple[str, ...], tuple[int, ...]], disturbance: float) -> Params:
    """Returns random parameters by path, large ones, and so that norms do little."""
    rng, noise = (np.random.default_rng(seed) for seed in range(2))
    params = {}
    for path, shape in shapes.items():
        values = _STD * rng.normal(size=shape) + disturbance * noise.normal(size=shape)
        params[path] = jnp.asarray(float(path[-1] == "scale") + values, jnp.float32)
    return unflatten_dict(params)
