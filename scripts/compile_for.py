"""Compiles what jspec would run on a GPU or a TPU, without having one, and counts what it does.

`python scripts/compile_for.py --device=h200 --target=llama-3.2-3b --draft=llama-3.2-1b`

Models are presets (or Hugging Face folders, of which config.json is read), and no weight is made.
The figures of `run` are of one round in which every draft is made. Times are estimates, nothing is
measured: bytes at the memory's full bandwidth, on a GPU + 1.5 µs a launch + 15 µs a wait of the
host. --batch_size and --cache may be given several times.
"""

import dataclasses
import functools
import itertools
import math
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from flax.traverse_util import unflatten_dict

from jspec import kernels
from jspec.common import cli
from jspec.common.errors import InputError, check_among
from jspec.common.json_lines import JsonLinesWriter
from jspec.common.memory import tree_bytes
from jspec.common.text_table import format_table, number_cell
from jspec.drafters import BuiltDrafter, DrafterSpec
from jspec.drafters.eagle import ENTRY, make_eagle_drafter
from jspec.drafters.heads.eagle_module import (
    EagleConfig,
    default_feature_layers,
    init_eagle_params,
)
from jspec.evaluation.accelerators.compiled import compile_for, compiled_with
from jspec.evaluation.accelerators.devices import Accelerator, find_accelerator
from jspec.evaluation.accelerators.rounds import Assumptions
from jspec.evaluation.analysis.byte_model import load_config
from jspec.evaluation.analysis.call_cost import CallCost
from jspec.generation import answer_flags, drafter_flags
from jspec.generation.answer_flags import read_method, read_settings
from jspec.generation.batch import needed_switches
from jspec.generation.programs import Programs
from jspec.kernels.packed import STRIP
from jspec.sampling.settings import Switches
from jspec.weights.assemble import as_dtype
from jspec.weights.quantize import (
    KINDS,
    Q4_0,
    block_format,
    check_kind,
    is_quantizable,
    num_bytes,
    quantize,
)
from jspec.weights.resolver import LoadedModel
from jspec.weights.tensor_names import Parameter, parameter_table
from jspec.weights.tokenizers.byte_tokenizer import ByteTokenizer

flags.adopt_module_key_flags(drafter_flags)  # so that --help lists them
flags.adopt_module_key_flags(answer_flags)
flags.FLAGS.set_default("target", "llama-3.2-1b")
flags.FLAGS.set_default("temperature", 0.0)
_DEVICE = flags.DEFINE_string("device", "h200", "The device: h200, h100, a100, v5e or v6e.")
_PROGRAMS = flags.DEFINE_list(
    "programs", "run", "What to compile: run, prefill:TOKENS, call:TOKENS, separated by commas."
)
_BATCH_SIZE = flags.DEFINE_multi_integer("batch_size", [1], "Rows.", lower_bound=1)
_CACHE = flags.DEFINE_multi_integer("cache", [1024], "Slots of a row's cache.", lower_bound=1)
_NUM_LINES = flags.DEFINE_integer("num_lines", 0, "Lines to list by launches.", lower_bound=0)
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write a JSON object a program here.")
_PROGRAM = re.compile(r"run|(prefill|call):([1-9]\d{0,3})")
_HEAD_VOCAB = 32_000  # tokens that published heads of EAGLE-3 can propose

_COLUMNS = {  # of the table: figure, unit and format
    "launches": ("launches_per_round", 1, ",.0f"), "waits": ("host_waits", 1, ".0f"),
    "MB": ("bytes_moved", 1e6, ",.0f"), "ideal": ("bytes_ideal", 1e6, ",.0f"),
    "temporary": ("temporary_bytes", 1e6, ",.1f"), "copies": ("copies", 1, ".0f"),
    "transposes": ("transposes", 1, ".0f"), "conversions": ("conversions", 1, ".0f"),
    "pads": ("pads", 1, ".0f"), "around": ("moves_around_rounds", 1, ".0f"),
    "sorts": ("sorts", 1, ".0f"),
    "est. µs": ("estimated_us", 1, ",.0f"), "compiled in s": ("seconds_to_compile", 1, ".0f"),
}  # fmt: skip


def main() -> None:
    """Compiles each program for each size, prints a table, writes JSON."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # only the device could load an entry
    accelerator = find_accelerator(_DEVICE.value)
    accelerator.device()  # is there a compiler?
    output = None if _OUTPUT_JSON.value is None else JsonLinesWriter(_OUTPUT_JSON.value)
    rows, kernels_of, names = [], {}, _PROGRAMS.value
    for rows_, cache, name in itertools.product(_BATCH_SIZE.value, _CACHE.value, names):
        with kernels.compiling_for(accelerator.backend):
            subject = make_subject(accelerator, rows_, cache)
            found = subject.compile(name)
        numbers = [(found.get(key), form, 1 / unit) for key, unit, form in _COLUMNS.values()]
        is_one_graph = {True: "yes", False: "no", None: "-"}[found["is_one_graph"]]
        cells = [name, str(rows_), str(cache), is_one_graph]
        rows.append([*cells, *(number_cell(*number) for number in numbers)])
        if output is not None:
            about = {"device": accelerator.name, "batch_size": rows_, "cache": cache}
            about |= {"command": sys.argv[1:], "settings": subject.programs.describe()}
            output.write(about | compiled_with() | found)
        kernels_of.setdefault(name, found["kernels"])  # of the first size
    print(format_table(["program", "rows", "slots", "one graph", *_COLUMNS], rows))
    for name, lines in kernels_of.items():
        top = [[line, *map("{:,.2f}".format, (*ns[:2], ns[2] / 1e6))] for line, ns in lines.items()]
        if top := top[: _NUM_LINES.value]:
            print(format_table([f"launches of {name} by line", "all", "a layer", "MB"], top))


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is compiled: models of shapes with drafter and rule, for a device and a cache."""

    accelerator: Accelerator
    programs: Programs
    draft: LoadedModel | None
    capacity: int
    switches: Switches
    is_random: bool

    def check_room(self) -> None:
        """Checks that weights and caches fit the device; an `InputError` says what would."""
        device, rows = self.accelerator, self.programs.batch_size
        sizes = (self.programs.engine.state_bytes(rows, n, self.switches) for n in (1, 2))
        one, two = (tree_bytes(self.programs.params) + size for size in sizes)
        most = 1 + int((device.memory - one) // (two - one))
        if self.capacity > most:
            advice = f"--cache={most} would fit" if most > 0 else "the weights alone do not fit"
            needed = (one + (self.capacity - 1) * (two - one)) / 1e9
            expected = f"weights and caches within {device.memory / 1e9:.0f} GB of {device.name}"
            raise InputError(f"expected {expected}, got {needed:.0f} GB: {advice}")

    def ideal_bytes(self, width: int, rows: int, num_calls: int, head_cache: int) -> float:
        """Returns the bytes where weights and full caches are read once a call, and no more.

        Of a round these are a call of the target and `num_calls` of the draft, which may be a head
        with a cache of `head_cache` bytes.
        """
        draft, sizes = self.draft, {"context": self.capacity, "batch_size": rows}
        target, params = self.programs.target, self.programs.params.draft
        total = CallCost(target.config, None, target.quantization).call_bytes(width, **sizes)
        if draft is not None:
            cost = CallCost(draft.config, None, draft.quantization)
            return total + num_calls * cost.call_bytes(1, **sizes)
        # EAGLE's fuses the features of all tokens once a round.
        is_fusing = num_calls > 0 and isinstance(params, dict) and "fc" in params
        once = tree_bytes(params["fc"]) if is_fusing else 0
        return total + num_calls * (tree_bytes(params) - once + head_cache) + once

    def compile(self, name: str) -> dict[str, Any]:
        """Returns the figures of "run", "prefill:TOKENS" or "call:TOKENS"; see `compile_for`."""
        if (parsed := _PROGRAM.fullmatch(name)) is None:
            raise InputError(f"expected a program run, prefill:TOKENS or call:TOKENS, got {name!r}")
        engine, params = self.programs.engine, self.programs.params
        kind, width = parsed[1], int(parsed[2] or 1)
        if width > self.capacity:
            raise InputError(f"expected at most --cache={self.capacity} tokens, got {name}")
        rows = 1 if kind == "prefill" else self.programs.batch_size
        state = engine.empty_state.eval_shape(rows, self.capacity, self.switches)
        tokens = jax.ShapeDtypeStruct((rows, width), jnp.int32)
        number = engine.num_draft_tokens if kind is None else 0
        num_calls = number and (getattr(engine.drafter, "tree_depth", 0) or number)  # one a level
        assumed = Assumptions(number, self.is_random) if kind is None else None
        function, arguments = engine._run, (params, state, tokens.update(shape=()))
        if kind == "prefill":
            lengths = tokens.update(shape=(1,))
            function, arguments = engine._prefill, (params, state, tokens, lengths)
        elif kind == "call":
            function = jax.jit(engine.apply, donate_argnums=2)
            arguments = params.target, tokens, state.target_cache
        layers = self.programs.target.config.num_layers
        layers += num_calls * (1 if self.draft is None else self.draft.config.num_layers)
        found = compile_for(self.accelerator, function, arguments, assumed, layers)
        head_cache = tree_bytes(getattr(state.draft, "cache", ()))
        ideal = self.ideal_bytes(width + number, rows, num_calls, head_cache)
        return {"program": name, "bytes_ideal": ideal} | found


def make_subject(accelerator: Accelerator, batch_size: int, cache: int) -> Subject:
    """Returns what the flags ask for."""
    settings, values = read_settings(), flags.FLAGS
    method = read_method(settings)
    if method["drafter_options"].draft_vocab_size:
        raise InputError("expected no --draft_vocab_size here: it cuts weights, and there are none")
    target = shape_model(values.target, values.dtype, values.target_quantization)
    draft = values.draft and shape_model(values.draft, values.dtype, values.draft_quantization)
    if method["drafter"] == ENTRY.name and method["drafter_options"].draft_head is None:
        method["drafter"] = dataclasses.replace(ENTRY, build=build_eagle)
    programs = Programs(target, draft, **method, batch_size=batch_size)
    is_random, switches = settings.temperature > 0, needed_switches([settings])
    subject = Subject(accelerator, programs, draft, cache, switches, is_random)
    subject.check_room()
    return subject


def shape_model(name: str, dtype: str, quantization: str) -> LoadedModel:
    """Returns a model whose parameters are shapes.

    Raises:
      InputError: no such model, or one that cannot be rounded so.
    """
    config, float_type = load_config(re.sub(r"^llama-", "llama", name)), as_dtype(dtype)
    check_among("quantization", quantization, ("auto", "none", *KINDS))
    kind = quantization if quantization in KINDS else None
    check_kind(config, kind)
    params = {}
    for entry in parameter_table(config):
        leaf = jax.ShapeDtypeStruct(entry.shape, entry.dtype_in(float_type))
        if kind == Q4_0 and is_quantizable(entry):
            leaf = packed_shape(entry, float_type)
        elif kind is not None and is_quantizable(entry):
            how = {"path": entry.path, "kind": kind, "dtype": float_type}
            leaf = jax.eval_shape(functools.partial(quantize, **how), leaf)
        params[entry.path] = leaf
    tokenizer = ByteTokenizer(config.vocab_size, config.bos_id, config.eos_ids)
    # As with random weights, all ids are used.
    return LoadedModel(config, unflatten_dict(params), tokenizer, name, True, kind)


def packed_shape(entry: Parameter, dtype: Any) -> kernels.PackedKernel:
    """Returns a kernel as in a GGUF file of Q4_0, of shapes."""
    outputs = math.prod(entry.shape[:-1])
    strips = -(-outputs // STRIP)
    own: Any = jax.ShapeDtypeStruct((strips, num_bytes(entry, Q4_0, 0) // strips), jnp.uint8)
    form = block_format(entry.path)
    return kernels.PackedKernel(own, form, entry.shape, jnp.dtype(dtype), takes_bytes=True)


def build_eagle(spec: DrafterSpec) -> BuiltDrafter:
    """Returns a head of shapes, those of the published heads."""
    target, own = spec.target_config, {"vocab_size": _HEAD_VOCAB, "tie_embeddings": False}
    layer = dataclasses.replace(target.as_llama(), num_layers=1, **own)
    read = default_feature_layers(target.num_layers)
    config = EagleConfig(layer, target.vocab_size, read, target.num_layers)
    params = jax.eval_shape(functools.partial(init_eagle_params, config), jax.random.key(0))
    params = jax.tree.map(
        lambda leaf: leaf.update(dtype=spec.dtype) if leaf.dtype == jnp.float32 else leaf, params
    )
    return BuiltDrafter(make_eagle_drafter(spec, config), params)


if __name__ == "__main__":
    cli.run_main(main)
