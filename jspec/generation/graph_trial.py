"""Whether the rounds of a run may be one CUDA graph on this GPU: a trial of real rounds, kept.

XLA makes a graph when a program runs for the second time, and changes its addresses in later runs.
It may start a loop too early, or go on with old memory (openxla/xla#33073, openxla/xla#35760). So
rounds of tiny models, which hold every kind of loop that jspec has, run several times on new
memory, in a graph and without one, and must do the same token for token. (A loop that counts its
turns, as an earlier trial had, is no test: its condition compares two numbers, and so it waits for
what comes before it in any case; see `jspec.kernels.loops`.)

Right or wrong, the verdict is kept in the user's cache for the device, its driver, jaxlib and
jspec's sources. An error is not: it may be the moment's.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import pathlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jspec import kernels
from jspec.common.errors import InputError, describe_error
from jspec.common.json_lines import read_json
from jspec.common.kept import keep, note, read_kept
from jspec.common.typing import Params
from jspec.common.user_cache import cache_dir
from jspec.drafters import DrafterOptions, make_drafter
from jspec.generation.drafter_spec import make_spec
from jspec.generation.engine import Engine
from jspec.generation.request import SamplingParams
from jspec.generation.rows import Row
from jspec.models import DecoderConfig
from jspec.sampling.settings import Switches
from jspec.speculation.acceptance import get_rule
from jspec.speculation.types import ModelParams, SpecState, StepInfo
from jspec.weights.resolver import LoadedModel
from jspec.weights.tensor_names import parameter_table
from jspec.weights.tokenizers.byte_tokenizer import ByteTokenizer

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
# Options of the drafter, number of drafts, rows.
_SUBJECTS = {
    # Rows enough for a verify call of the width that is needed; drafts may end early.
    "chain": (DrafterOptions(draft_confidence=0.02), 3, 32),
    "tree": (DrafterOptions(tree_depth=2, tree_branches=2), 5, 2),
}
_STD, _DISTURBANCE = 0.25, 0.03  # of weights, and of the draft's beside them


def check_one_graph() -> None:
    """Finds out whether runs may be one graph on this GPU, unless it is known or the user's choice.

    Where they may not, one line on standard error says why. On other devices nothing is done.
    """
    if not kernels.awaits_graph_trial():
        return
    if problem := _recall_or_try():
        slow = "the host drives its loops, and short rounds take longer"
        note(f"jspec: a run is not one graph ({problem}): {slow}")
    kernels.allow_one_graph(not problem)


def _recall_or_try() -> str:
    """Returns what is wrong with a graph, "" for nothing, by the user's cache or by a trial."""
    kind, machine = jax.devices()[0].device_kind, _machine()
    try:
        path = cache_dir() / "one_graph.json"
        entries = read_kept(path)
    except InputError:  # no home folder
        path, entries = None, {}
    entry = entries.get(kind)
    if entry is not None:
        problem = entry.get("problem") if isinstance(entry, dict) else None
        if isinstance(problem, str) and entry.get("machine") == machine:
            return problem
        reason = "of another driver or version" if isinstance(problem, str) else "damaged"
        note(f"note: {path}: the entry of {kind} is {reason}: tried again")
    note("trying whether rounds may be one graph on this GPU, once for this driver and version")
    try:
        problem = find_problem(make_runner)
    except Exception as error:  # of XLA, the driver, or Python: whatever it is, no graph
        return describe_error(error)[:200]
    if path is not None:
        with contextlib.suppress(InputError):  # damaged: a line has said so
            entries = read_json(path)  # others may have written meanwhile
        keep(path, entries | {kind: {"machine": machine, "problem": problem}}, "the verdict")
    return problem


def find_problem(make: Callable[[str, Options], Runner]) -> str:
    """Returns how rounds in a graph differ from those without one; "" if they do not.

    `make` makes runs from the name of a subject, "chain" or "tree", and XLA's options.
    """
    for name in _SUBJECTS:
        without = make(name, _NO_GRAPH | _SAME_TILINGS)
        in_graph = make(name, kernels.one_graph_options() | _SAME_TILINGS)
        for index in range(_NUM_RUNS):
            pairs = zip(in_graph(index), without(index), strict=True)
            if not all(itertools.starmap(np.array_equal, pairs)):
                return f"run {index + 1} of {_NUM_RUNS} of a {name} of drafts gave other tokens"
    return ""


def make_runner(name: str, options: Options) -> Runner:
    """Returns a function that runs rounds of a tiny draft model and target; see `find_problem`.

    Every run has texts of its own; rows at temperature 0 and at random take turns.
    """
    drafter_options, num_drafts, num_rows = _SUBJECTS[name]
    target, draft = _make_model(0.0), _make_model(_DISTURBANCE)
    built = make_drafter("model", make_spec(target, draft, "model", drafter_options, num_drafts))
    with kernels.trying_options(dict(options)):
        engine = Engine(target, built.drafter, get_rule("rejection"), (), built.params)
    params, before = ModelParams(target.params, built.params), list[SpecState]()

    def run(index: int) -> list[np.ndarray]:
        state = _start(engine, params, index, num_rows)
        state, infos = engine.run(params, state, _NUM_ROUNDS)
        before.append(state)  # kept, so that the next run has other memory
        return _outcome(infos)

    return run


def _start(engine: Engine, params: ModelParams, index: int, num_rows: int) -> SpecState:
    """Returns the state of rows that have read a prompt of run `index`."""
    prompt = [(7 * place + 5 * index) % _CONFIG.vocab_size for place in range(3, 12 + index)]
    settings = SamplingParams(temperature=1.2 * (index % 2))
    row = Row(settings, prompt, stop_ids=(), max_length=_CAPACITY)
    state = engine.prefill(params, row, _CAPACITY, Switches())
    state = jax.tree.map(lambda leaf: jnp.repeat(leaf, num_rows, axis=0), state)
    return state.replace(seed=jnp.arange(num_rows, dtype=jnp.uint32) + jnp.uint32(index))


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


def _make_model(disturbance: float) -> LoadedModel:
    """Returns a tiny model in float32 whose distributions are peaked."""
    rng, noise = (np.random.default_rng(seed) for seed in range(2))

    def draw(shape: tuple[int, ...], mean: float) -> jax.Array:
        values = _STD * rng.normal(size=shape) + disturbance * noise.normal(size=shape)
        return jnp.asarray(mean + values, jnp.float32)

    params: Params = unflatten_dict(
        {
            parameter.path: draw(parameter.shape, float(parameter.path[-1] == "scale"))
            for parameter in parameter_table(_CONFIG)
        }
    )
    return LoadedModel(_CONFIG, params, ByteTokenizer(_CONFIG.vocab_size), "trial", is_random=True)


@functools.cache
def _machine() -> dict[str, str]:
    """Returns what may change the verdict on one kind of device."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return {
        "driver": kernels.driver_version(),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "sources": digest.hexdigest()[:16],
    }
