"""Times products and layers by the CUDA C++ alone, in several variants, in half a minute.

    python -m scripts.gpu_session.tuning --lines=FILE

Layers have the shapes of Llama 3.2 1B and 3B, in bfloat16. They run without XLA, so this says what
the kernels of `jspec/kernels/cuda` can reach; each product is compared with a plain loop. A variant
is the tiles that a warp takes together, and the steps of them that are under way: the library's is
the first. Programs are compiled beside each other, and run one after another. Each prints JSON, a
line for each product; one with an error above 0.001 is wrong.

It needs nvcc; the GPU is the first one, an H100 or H200.
"""

import concurrent.futures
import datetime
import json
import pathlib
import subprocess
import sys
import tempfile

import jax
from absl import flags

from jspec.cli import program as cli
from jspec.common.errors import InputError
from jspec.common.json_lines import check_output
from jspec.generation.provenance import git_state
from jspec.kernels import library

VARIANTS = (4, 2), (4, 3), (4, 4), (2, 4), (2, 6)  # tiles, steps
SOURCE = pathlib.Path(__file__).with_suffix(".cu")
_SECONDS = 60  # of a program at most

_LINES = flags.DEFINE_string("lines", None, "The file to write the lines of JSON to.")


def main() -> None:
    """Compiles the variants, and runs them."""
    if _LINES.value is None:
        raise InputError("expected a file in --lines, got none")
    output = check_output(_LINES.value)
    with tempfile.TemporaryDirectory() as folder:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            programs = list(pool.map(lambda variant: build(folder, *variant), VARIANTS))
        command = ["python", "-m", "scripts.gpu_session.tuning", *sys.argv[1:]]
        about = {"date": str(datetime.date.today()), "command": command, **(git_state() or {})}
        lines = [json.dumps(about)]
        for program in programs:
            lines += run(program)
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def build(folder: str, tiles: int, depth: int) -> str:
    """Returns the program of a variant, compiled into the folder.

    Raises:
      InputError: there is no nvcc, or it fails.
    """
    if (nvcc := library.find_nvcc()) is None:
        raise InputError("expected nvcc on the PATH or in $CUDA_HOME, found none")
    program = str(pathlib.Path(folder) / f"tuning-{tiles}-{depth}")
    recipe = library.cuda_recipe("sm_90a")
    includes = [f"-I{jax.ffi.include_dir()}", f"-I{recipe.headers[0].parent}"]
    variant = [f"-DTILES={tiles}", f"-DDEPTH={depth}"]
    sources = [str(SOURCE), str(recipe.headers[0].with_name("attention.cu"))]
    command = [nvcc, *recipe.options, *includes, *variant, *recipe.link_options, *sources]
    built = subprocess.run([*command, "-o", program], capture_output=True, text=True)
    if built.returncode:
        errors = [line for line in built.stderr.splitlines() if "error" in line]
        raise InputError(f"nvcc failed: {(errors or built.stderr.splitlines() or ['no text'])[0]}")
    return program


def run(program: str) -> list[str]:
    """Returns the lines that a program prints.

    Raises:
      InputError: it fails, or takes longer than a minute.
    """
    try:
        ran = subprocess.run([program], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise InputError(f"expected {program} to end in {_SECONDS} s, it did not") from None
    lines = ran.stdout.splitlines()
    if ran.returncode:
        raise InputError(f"{program} failed: {(lines or [f'status {ran.returncode}'])[-1]}")
    return lines


if __name__ == "__main__":
    cli.run_main(main)
