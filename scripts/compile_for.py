"""Compiles what jspec would run on a GPU or a TPU, without a device, and checks what comes out.

`python scripts/compile_for.py --device=h200 --target=llama-3.2-3b --draft=llama-3.2-1b`

It checks that the programs compile and fit into the device's memory, and says whether each is one
CUDA graph without loops that start too early, and how many launches only copy. Models are presets,
with `random:` or without, or Hugging Face folders, of which config.json is read; no weight is made.
--target_quantization and --draft_quantization take int8, int4 and q4_0. How long a device takes,
none of this says.
"""

import dataclasses
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
from jspec.cli import answer_flags
from jspec.cli import program as cli
from jspec.cli.answer_flags import read_method, read_settings
from jspec.common.errors import InputError
from jspec.common.json_lines import JsonLinesWriter
from jspec.common.text_table import NOTHING, format_table
from jspec.drafters.registry import REGISTRY
from jspec.generation.generator import Generator
from jspec.lab.accelerators.compiled import (
    Accelerator,
    compile_for,
    compiled_with,
    count_moves,
    find_accelerator,
)
from jspec.lab.accelerators.shapes import build_eagle, shape_model
from jspec.models.sharding import make_mesh

flags.adopt_module_key_flags(answer_flags)  # so that --help lists them
flags.FLAGS.set_default("target", "llama-3.2-1b")
flags.FLAGS.set_default("temperature", 0.0)
_DEVICE = flags.DEFINE_string("device", "h200", "The device: h200, h100, a100, v5e or v6e.")
_MESH = flags.DEFINE_string("mesh", None, "Several of them, such as model:8; TPUs are 4 or 8.")
_HOSTS = flags.DEFINE_integer("hosts", 1, "The hosts that share the mesh.", lower_bound=1)
_PROGRAMS = flags.DEFINE_list(
    "programs", "run", "What to compile: run, or prefill:TOKENS; separated by commas."
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Rows.", lower_bound=1)
_CACHE = flags.DEFINE_integer("cache", 1024, "Slots of a row's cache.", lower_bound=1)
_OUTPUT_JSON = flags.DEFINE_string(
    "output_json", None, "Write a JSON object a program here, in place of what is there."
)
_PROGRAM = re.compile(r"run|prefill:([1-9]\d{0,3})")
_COLUMNS = "program", "one graph", "loops too early", "moves", "arguments GB", "temporary MB"


def main() -> None:
    """Compiles each program, prints a table, writes JSON."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # only the device could load an entry
    accelerator = find_accelerator(_DEVICE.value)
    if _MESH.value is None and _HOSTS.value > 1:
        raise InputError(f"expected --mesh with --hosts, got --hosts={_HOSTS.value} alone")
    mesh = None if _MESH.value is None else mesh_of(accelerator, _MESH.value, _HOSTS.value)
    accelerator.devices()  # is there a compiler?
    output = None if _OUTPUT_JSON.value is None else JsonLinesWriter(_OUTPUT_JSON.value)
    if not _PROGRAMS.value:
        raise InputError("expected --programs of run or prefill:TOKENS, got none")
    rows = []
    with kernels.compiling_for(accelerator.backend):
        generator = make_generator(mesh)
        for name in _PROGRAMS.value:  # all are checked before one is compiled
            check_program(generator, name)
        for name in _PROGRAMS.value:
            record = compile_named(accelerator, generator, name)
            rows.append(_cells(record))
            if output is not None:
                about = {"device": accelerator.name, "batch_size": _BATCH_SIZE.value}
                about |= {"cache": _CACHE.value, "command": sys.argv[1:]}
                output.write(about | {"settings": generator.describe()} | compiled_with() | record)
    print(format_table(_COLUMNS, rows))


def _cells(record: dict[str, Any]) -> list[str]:
    is_one_graph = {True: "yes", False: "no", None: NOTHING}[record["is_one_graph"]]
    loops = record["loops_without_condition"]
    return [
        record["program"],
        is_one_graph,
        NOTHING if loops is None else str(loops),
        str(record["moves"]),
        f"{record['argument_bytes'] / 1e9:.2f}",
        f"{record['temporary_bytes'] / 1e6:.1f}",
    ]


def mesh_of(accelerator: Accelerator, text: str, hosts: int) -> Mesh:
    """Returns the mesh of that text, of devices that are not here."""
    number = math.prod(map(int, re.findall(r":(\d+)", text)))
    if number % hosts:
        raise InputError(f"expected a mesh of as many devices on each of {hosts} hosts, got {text}")
    return make_mesh(text, accelerator.devices(max(number, 1), hosts))


def make_generator(mesh: Mesh | None) -> Generator:
    """Returns models of shapes with the drafter and the rule that the flags ask for."""
    method, values = read_method(read_settings()), flags.FLAGS
    if method.drafter_options.draft_vocab_size:
        raise InputError("expected no --draft_vocab_size here: it cuts weights, and there are none")
    target = shape_model(values.target, values.dtype, values.target_quantization, mesh)
    names = values.draft, values.dtype, values.draft_quantization
    try:
        draft = values.draft and shape_model(*names, mesh)
    except InputError:  # one that cannot be split is whole on every device
        draft = shape_model(*names)
    if method.drafter == "eagle" and method.drafter_options.draft_head is None:
        method = dataclasses.replace(
            method, drafter=dataclasses.replace(REGISTRY["eagle"], build=build_eagle)
        )
    return Generator(target, draft, method, batch_size=_BATCH_SIZE.value)


def check_program(generator: Generator, name: str) -> None:
    """Checks that a program makes sense with --cache.

    Raises:
      InputError: it does not; one line says what would.
    """
    if (parsed := _PROGRAM.fullmatch(name)) is None:
        raise InputError(f"expected a program run or prefill:TOKENS, got {name!r}")
    width = int(parsed[1]) if parsed[1] else 1 + generator.engine.num_draft_tokens
    capacity, context = _CACHE.value, generator.target.config.max_seq_len
    if width > capacity:
        raise InputError(f"expected at most --cache={capacity} tokens a call, got {width}")
    if capacity > context:
        raise InputError(f"expected --cache of at most {context}, the context of the target")


def compile_named(accelerator: Accelerator, generator: Generator, name: str) -> dict[str, Any]:
    """Returns what is said of "run" or "prefill:TOKENS", plain values; see `CompiledProgram`."""
    engine, switches = generator.engine, generator.switches([read_settings()])
    width = int(name.partition(":")[2] or 0)  # 0 for a run
    rows = 1 if width else generator.batch_size
    state = engine.empty_state.eval_shape(rows, _CACHE.value, switches)
    function, arguments = engine._run, (generator.params, state, _integers())
    if width:
        function = engine._prefill
        arguments = (generator.params, state, _integers(rows, width), _integers(rows))
    program = compile_for(accelerator, function, engine.layout.shapes(arguments))
    record = {key: value for key, value in program._asdict().items() if key != "text"}
    return {"program": name, "moves": count_moves(program.text)} | record


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


if __name__ == "__main__":
    cli.run_main(main)
