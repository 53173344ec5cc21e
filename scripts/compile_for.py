"""Compiles what jspec would run on a GPU or a TPU, without having one, and counts what it does.

`python scripts/compile_for.py --device=h200 --target=llama-3.2-3b --draft=llama-3.2-1b`

Models are presets, with `random:` or without (or Hugging Face folders: config.json is read there),
and no weight is made; --target_quantization and --draft_quantization take int8, int4 and q4_0. The
figures of `run` are of one round in which every draft is made. docs/accelerators.md says what each
column counts; how long a device takes, none of them says. --batch_size and --cache may be repeated.
"""

import dataclasses
import itertools
import math
import os
import re
import subprocess
import sys
from typing import Any

if __name__ == "__main__":
    # From JAX's import on XLA notes that drivers are missing. What ends the process stays.
    _NOTES = "/^(WARNING: All log messages|[IWE][0-9]{4})/d"
    _sieve = subprocess.Popen(["sed", "-u", "-E", _NOTES], stdin=subprocess.PIPE, stdout=os.dup(2))
    assert _sieve.stdin is not None
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(_sieve.stdin.fileno(), 2)

import jax
import jax.numpy as jnp
from absl import flags
from jax.sharding import Mesh

from jspec import kernels
from jspec.cli import answer_flags, drafter_flags
from jspec.cli import program as cli
from jspec.cli.answer_flags import read_method, read_settings
from jspec.common.errors import InputError
from jspec.common.json_lines import JsonLinesWriter
from jspec.common.memory import tree_bytes
from jspec.common.text_table import NOTHING, format_table, number_cell
from jspec.drafters.eagle import ENTRY
from jspec.generation.batch import needed_switches
from jspec.generation.programs import Programs
from jspec.lab.accelerators.compiled import compile_for, compiled_with
from jspec.lab.accelerators.devices import Accelerator, find_accelerator
from jspec.lab.accelerators.rounds import Assumptions
from jspec.lab.accelerators.shapes import build_eagle, shape_model
from jspec.lab.analysis.call_cost import CallCost
from jspec.models.sharding import make_mesh
from jspec.sampling.settings import Switches
from jspec.weights.resolver import LoadedModel

flags.adopt_module_key_flags(drafter_flags)  # so that --help lists them
flags.adopt_module_key_flags(answer_flags)
flags.FLAGS.set_default("target", "llama-3.2-1b")
flags.FLAGS.set_default("temperature", 0.0)
_DEVICE = flags.DEFINE_string("device", "h200", "The device: h200, h100, a100, v5e or v6e.")
_MESH = flags.DEFINE_string("mesh", None, "Several of them, such as model:8; TPUs are 4 or 8.")
_HOSTS = flags.DEFINE_integer("hosts", 1, "The hosts that share the mesh.", lower_bound=1)
_PROGRAMS = flags.DEFINE_list(
    "programs", "run", "What to compile: run, prefill:TOKENS, call:TOKENS, separated by commas."
)
_BATCH_SIZE = flags.DEFINE_multi_integer("batch_size", [1], "Rows.", lower_bound=1)
_CACHE = flags.DEFINE_multi_integer("cache", [1024], "Slots of a row's cache.", lower_bound=1)
_NUM_LINES = flags.DEFINE_integer("num_lines", 0, "Lines to list by launches.", lower_bound=0)
_OUTPUT_JSON = flags.DEFINE_string(
    "output_json", None, "Write a JSON object a program here, in place of what is there."
)
_PROGRAM = re.compile(r"run|(prefill|call):([1-9]\d{0,3})")

_COLUMNS = {  # of the table: figure, unit and format
    "launches": ("launches_per_round", 1, ",.0f"), "waits": ("host_waits", 1, ".0f"),
    "MB": ("bytes_moved", 1e6, ",.0f"), "ideal": ("bytes_ideal", 1e6, ",.0f"),
    "temporary": ("temporary_bytes", 1e6, ",.1f"), "copies": ("copies", 1, ".0f"),
    "transposes": ("transposes", 1, ".0f"), "conversions": ("conversions", 1, ".0f"),
    "pads": ("pads", 1, ".0f"), "around": ("moves_around_rounds", 1, ".0f"),
    "sorts": ("sorts", 1, ".0f"), "collectives": ("collectives", 1, ",.0f"),
    "joined MB": ("collective_bytes", 1e6, ",.2f"),
    "compiled in s": ("seconds_to_compile", 1, ".0f"),
}  # fmt: skip


def main() -> None:
    """Compiles each program for each size, prints a table, writes JSON."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # only the device could load an entry
    accelerator = find_accelerator(_DEVICE.value)
    if _MESH.value is None and _HOSTS.value > 1:
        raise InputError(f"expected --mesh with --hosts, got --hosts={_HOSTS.value} alone")
    mesh = None if _MESH.value is None else mesh_of(accelerator, _MESH.value, _HOSTS.value)
    accelerator.devices()  # is there a compiler?
    output = None if _OUTPUT_JSON.value is None else JsonLinesWriter(_OUTPUT_JSON.value)
    rows, kernels_of, names = [], {}, _PROGRAMS.value
    if not names:
        raise InputError("expected --programs of run, prefill:TOKENS or call:TOKENS, got none")
    with kernels.compiling_for(accelerator.backend):  # all are checked before one is compiled
        subjects = [
            (make_subject(accelerator, *sizes, mesh=mesh), name)
            for *sizes, name in itertools.product(_BATCH_SIZE.value, _CACHE.value, names)
        ]
    for subject, name in subjects:
        subject.check(name)
    for subject, name in subjects:
        rows_, cache = subject.programs.batch_size, subject.capacity
        with kernels.compiling_for(accelerator.backend):
            found = subject.compile(name)
        numbers = [(found.get(key), form, 1 / unit) for key, unit, form in _COLUMNS.values()]
        is_one_graph = {True: "yes", False: "no", None: NOTHING}[found["is_one_graph"]]
        cells = [name, str(rows_), str(cache), is_one_graph]
        rows.append([*cells, *(number_cell(*number) for number in numbers)])
        if output is not None:
            about = {"device": accelerator.name, "batch_size": rows_, "cache": cache}
            about |= {"command": sys.argv[1:], "settings": subject.programs.describe()}
            output.write(about | compiled_with() | found)
        kernels_of.setdefault(name, found["kernels"])  # of the first size
    print(format_table(["program", "rows", "slots", "one graph", *_COLUMNS], rows))
    weights, slot, other = (size / 1e9 for size in subject.needs())
    caches = f"caches {other + cache * slot:.1f} GB ({rows_} x {cache} slots)"
    print(
        f"{accelerator.name}: weights {weights:.1f} GB, {caches}, of {accelerator.memory / 1e9:.1f}"
    )
    for name, lines in kernels_of.items():
        top = [[line, *map("{:,.2f}".format, (*ns[:2], ns[2] / 1e6))] for line, ns in lines.items()]
        if top := top[: _NUM_LINES.value]:
            print(format_table([f"launches of {name} by line", "all", "a layer", "MB"], top))


def mesh_of(accelerator: Accelerator, text: str, hosts: int) -> Mesh:
    """Returns the mesh of that text, of devices that are not here."""
    number = math.prod(map(int, re.findall(r":(\d+)", text)))
    if number % hosts:
        raise InputError(f"expected a mesh of as many devices on each of {hosts} hosts, got {text}")
    return make_mesh(text, accelerator.devices(max(number, 1), hosts))


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is compiled: models of shapes with drafter and rule, for a device and a cache."""

    accelerator: Accelerator
    programs: Programs
    draft: LoadedModel | None
    capacity: int
    switches: Switches
    is_random: bool

    def check(self, name: str) -> None:
        """Checks that a program makes sense and that weights and caches fit; see `compile`.

        Raises:
          InputError: they do not; one line says what would.
        """
        if (parsed := _PROGRAM.fullmatch(name)) is None:
            raise InputError(f"expected a program run, prefill:TOKENS or call:TOKENS, got {name!r}")
        if parsed[1] == "call" and self.programs.target.mesh is not None:
            raise InputError(f"expected a program run or prefill:TOKENS with --mesh, got {name}")
        width, context = int(parsed[2] or 1), self.programs.target.config.max_seq_len
        if parsed[1] is None:
            width += self.programs.engine.num_draft_tokens
        if width > self.capacity:
            raise InputError(f"expected at most --cache={self.capacity} tokens a call, got {width}")
        if self.capacity > context:
            raise InputError(f"expected --cache of at most {context}, the context of the target")
        weights, slot, other = self.needs()
        memory = self.accelerator.memory
        most = int((memory - weights - other) // slot)
        if self.capacity > most:
            rounded = most // 1024 * 1024 or most  # what programs need beside them is not known yet
            advice = f"--cache={rounded} would fit" if most > 0 else "the weights alone do not fit"
            needed = (weights + other + self.capacity * slot) / 1e9
            expected = f"weights and caches within {memory / 1e9:.1f} GB of {self.accelerator.name}"
            raise InputError(f"expected {expected}, got {needed:.1f} GB: {advice}")

    def needs(self) -> tuple[int, int, int]:
        """Returns bytes of weights, of a slot of all rows' caches, and of the rest of the state."""
        engine, rows = self.programs.engine, self.programs.batch_size
        states = (engine.empty_state.eval_shape(rows, n, self.switches) for n in (128, 256))
        own = map(engine.layout.own_shapes, (self.programs.params, *states))
        weights, fewer, more = map(self.accelerator.size_of, own)
        return weights, (more - fewer) // 128, 2 * fewer - more

    def ideal_bytes(self, width: int, rows: int, num_calls: int, head_cache: int) -> float:
        """Returns the bytes where weights and full caches are read once a call, and no more.

        Of a round these are a call of the target and `num_calls` of the draft, which may be a head
        with a cache of `head_cache` bytes.
        """
        draft, sizes = self.draft, {"context": self.capacity, "batch_size": rows}
        target, params = self.programs.target, self.programs.params.draft
        total = CallCost(target.config, None, target.quantization).call_bytes(width, **sizes)
        total /= target.own_config.num_shards
        if draft is not None:
            cost = CallCost(draft.config, None, draft.quantization)
            one = cost.call_bytes(1, **sizes) / draft.own_config.num_shards
            return total + num_calls * one
        # EAGLE's fuses the features of all tokens once a round.
        is_fusing = num_calls > 0 and isinstance(params, dict) and "fc" in params
        once = tree_bytes(params["fc"]) if is_fusing else 0
        return total + num_calls * (tree_bytes(params) - once + head_cache) + once

    def compile(self, name: str) -> dict[str, Any]:
        """Returns the figures of "run", "prefill:TOKENS" or "call:TOKENS"; see `compile_for`."""
        kind, _, tokens_a_call = name.partition(":")
        engine, params, width = self.programs.engine, self.programs.params, int(tokens_a_call or 1)
        rows = 1 if kind == "prefill" else self.programs.batch_size
        state = engine.empty_state.eval_shape(rows, self.capacity, self.switches)
        tokens = jax.ShapeDtypeStruct((rows, width), jnp.int32)
        number = engine.num_draft_tokens if kind == "run" else 0
        num_calls = number and (getattr(engine.drafter, "tree_depth", 0) or number)  # one a level
        assumed = Assumptions(number, self.is_random) if kind == "run" else None
        function, arguments = engine._run, (params, state, tokens.update(shape=()))
        if kind == "prefill":
            lengths = tokens.update(shape=(1,))
            function, arguments = engine._prefill, (params, state, tokens, lengths)
        elif kind == "call":
            function = jax.jit(engine.apply, donate_argnums=2)
            arguments = params.target, tokens, state.target_cache
        layers = self.programs.target.config.num_layers
        layers += num_calls * (1 if self.draft is None else self.draft.config.num_layers)
        arguments = engine.layout.shapes(arguments)
        found = compile_for(self.accelerator, function, arguments, assumed, layers)
        head_cache = tree_bytes(getattr(state.draft, "cache", ()))
        ideal = self.ideal_bytes(width + number, rows, num_calls, head_cache)
        return {"program": name, "bytes_ideal": ideal} | found


def make_subject(
    accelerator: Accelerator, batch_size: int, cache: int, mesh: Mesh | None
) -> Subject:
    """Returns what the flags ask for."""
    settings, values = read_settings(), flags.FLAGS
    method = read_method(settings)
    if method["drafter_options"].draft_vocab_size:
        raise InputError("expected no --draft_vocab_size here: it cuts weights, and there are none")
    target = shape_model(values.target, values.dtype, values.target_quantization, mesh)
    names = values.draft, values.dtype, values.draft_quantization
    try:
        draft = values.draft and shape_model(*names, mesh)
    except InputError:  # one that cannot be split is whole on every device
        draft = shape_model(*names)
    if method["drafter"] == ENTRY.name and method["drafter_options"].draft_head is None:
        method["drafter"] = dataclasses.replace(ENTRY, build=build_eagle)
    programs = Programs(target, draft, **method, batch_size=batch_size)
    is_random, switches = settings.temperature > 0, needed_switches([settings])
    subject = Subject(accelerator, programs, draft, cache, switches, is_random)
    return subject


if __name__ == "__main__":
    cli.run_main(main)
