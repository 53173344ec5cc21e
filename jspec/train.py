"""Trains a drafter: `python -m jspec.train --config=configs/train_eagle.py --workdir=DIR`.

`--config.FIELD=VALUE` overrides a field of the config. The same command continues a killed
run. DIR gets `config.json`, `metrics.jsonl`, `checkpoints/` and, at the end, the drafter and, if
matplotlib is installed, a figure of the metrics. The drafter is a head in `head/`, for
`--drafter=eagle --draft_head=DIR/head` (or medusa, blockwise, lookahead), or a model in `draft/`,
for `--drafter=model --draft=DIR/draft`. If the target is trained too (the field `train_target` of
medusa), it is another model, in `target/`. docs/train_a_drafter.md is the guide.
"""

import functools
import pathlib
import shutil
from typing import Any

from absl import flags

from jspec.cli import config_flag, mesh_flags
from jspec.cli import program as cli
from jspec.cli.config_flag import CONFIG, read_workdir
from jspec.common import processes
from jspec.common.errors import say
from jspec.common.work_dir import check_or_write_config, make_workdir, write_json
from jspec.lab.experiments.config import to_plain
from jspec.training.loop import describe
from jspec.training.placement import Placement
from jspec.training.run import has_begun, read_config, run_training

flags.adopt_module_key_flags(config_flag)  # so that --help lists them
flags.adopt_module_key_flags(mesh_flags)


def main() -> None:
    """Reads the flags and trains."""
    workdir = pathlib.Path(read_workdir())
    plain = to_plain(CONFIG.value)
    read_config(plain)  # is it one? before other processes are waited for
    with mesh_flags.flagged_mesh() as mesh:
        run(plain, workdir, Placement(mesh))


def run(plain: dict[str, Any], workdir: pathlib.Path, place: Placement) -> None:
    """Trains; of several processes the first one writes, and the others train with it."""
    config, is_new = read_config(plain), not workdir.exists()
    processes.of_first(functools.partial(_claim, workdir, plain))
    output = workdir / config.OUTPUT
    if processes.of_first(output.exists):
        say(f"{output} exists already: nothing to do")
        return
    try:
        metrics = run_training(config, workdir, place)
    finally:
        # Refused, for its texts, say: nothing is left.
        if processes.is_first() and not has_begun(workdir):
            (workdir / "config.json").unlink(missing_ok=True)
            if is_new:
                shutil.rmtree(workdir)
    print(f"{output}: {describe(metrics)}")


def _claim(workdir: pathlib.Path, plain: dict[str, Any]) -> None:
    make_workdir(workdir)
    if has_begun(workdir):
        check_or_write_config(workdir / "config.json", plain)
    else:  # a run that was refused before its first step does not claim the workdir
        write_json(workdir / "config.json", plain)


if __name__ == "__main__":
    cli.run_main(main)
