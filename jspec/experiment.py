"""Runs an experiment: `python -m jspec.experiment --config=NAME --workdir=DIR`.

NAME is a config that comes with jspec, such as smoke, or a Python file of yours.
`--config.FIELD=VALUE` overrides a field of the config; docs/experiments.md lists the configs. A
prompts file is looked for in the current folder, then in the folder above the config's, then among
jspec's configs. Every finished cell is appended to DIR/results.jsonl at once: the same command
resumes a killed run, and several processes may share one DIR, where each cell is measured once (but
the processes slow each other down). Failed cells are recorded, and the next run tries them again;
the exit status is 1 if there are any. Progress goes to standard error. `python -m jspec.report DIR`
makes the report.
"""

import contextlib
import shlex
import sys

from absl import flags

from jspec.cli import config_flag, mesh_flags
from jspec.cli import program as cli
from jspec.cli.config_flag import CONFIG, config_file, read_workdir
from jspec.common.errors import InputError, say
from jspec.lab.experiments.config import to_plain
from jspec.lab.experiments.run import run_experiment

flags.adopt_module_key_flags(config_flag)  # so that --help lists them
for _flag in mesh_flags.OF_PROCESSES:
    flags.declare_key_flag(_flag.name)


def main() -> None:
    """Reads the flags and runs the experiment."""
    workdir = read_workdir()
    argv = ["python", "-m", "jspec.experiment", *sys.argv[1:]]
    base, plain = config_file().resolve().parent.parent, to_plain(CONFIG.value)
    if mesh_flags.MESH.value is not None:
        raise InputError("expected --config.mesh in the place of --mesh, here")
    mesh = plain.get("mesh") if isinstance(plain, dict) else None
    joined = contextlib.nullcontext()  # kinds that run no model want no device
    if mesh_flags.given_of_processes():
        joined = mesh_flags.flagged_mesh(mesh, "--config.mesh")
    try:
        with joined:
            num_failed = run_experiment(plain, workdir, argv, base)
    except KeyboardInterrupt:
        say("\nwhat is finished is kept: the same command goes on")
        raise
    say(f"the report: python -m jspec.report {shlex.quote(workdir)}")
    if num_failed:
        sys.exit(1)


if __name__ == "__main__":
    cli.run_main(main)
