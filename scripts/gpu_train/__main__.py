"""Trains a head for SmolLM2 on a GPU in a quarter of an hour, from prompts to a folder.

    python -m scripts.gpu_train --prompts_file=PROMPTS.jsonl --results=FOLDER --models=PARTS
    python -m scripts.gpu_train --rehearse --results=FOLDER     every step, tiny, on any machine

The program ends within 585 s of its start. It is made of steps, each within its seconds (s); what a
step does not use, later ones may.

| step | s | what it does |
|---|---|---|
| answers | 230 | answers all prompts, at temperature 0 and then, as often as time allows, at temperature 1 with other seeds |
| speed | 60 | trains a few steps, to measure what a step takes |
| training | 230 | trains for as many steps as fit, and writes the head |
| check | 60 | counts the tokens per target call on held-out prompts: the new head's, the shipped head's |

Hidden states are not kept: the target reads each batch in the step that trains on it. The answers
stay in a temporary folder. What is worth keeping is in --results: `session.jsonl`, a line for all
that was done; `metrics.jsonl`, the curve; `head`, in int8, as `--draft_head` takes it; and
`weights.00`, `weights.01`, which joined are head's `model.safetensors` in bfloat16, for
`--config.init_head` of a later run. No file is larger than 16 MiB.

`--drafter=dflash` and `dspark` train a block drafter, from nothing; `eagle` begins with the shipped
head. `--config.NAME` of `jspec.train` is `--fields='{"NAME": VALUE}'` here. Run the same command
again on the same machine to go on: steps that are done are not run again.

A large file of a model can be brought in parts: see `scripts.gpu_session`.
"""  # noqa: E501

import hashlib
import json
import os
import pathlib
import sys
import tempfile

if __name__ == "__main__":  # before JAX is imported
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is asked of a hub, nor waited for

import jax
from absl import flags

from jspec.cli import program as cli
from jspec.common.errors import InputError
from jspec.common.journal import Journal
from jspec.common.user_cache import use_compile_cache
from jspec.generation.prompts import read_prompts
from jspec.kernels import environment
from jspec.weights.published import SMOLLM2
from scripts.gpu_session import BEGIN
from scripts.gpu_session.session import Session, run_steps
from scripts.gpu_session.subjects import check_backend, check_models, join_models
from scripts.gpu_train.steps import FIELDS, Plan, steps_of
from tests.tiny_models import save_folder

CALL_SECONDS = 585
_PATIENCE = 4  # a rehearsal's steps may take as many times as long
_REHEARSED = 24  # prompts

_PROMPTS_FILE = flags.DEFINE_string("prompts_file", None, "JSON lines with the prompts.")
_RESULTS = flags.DEFINE_string("results", None, "The folder for what is kept.")
_MODELS = flags.DEFINE_string("models", None, "A folder with SmolLM2's file, whole or in parts.")
_DRAFTER = flags.DEFINE_enum("drafter", "eagle", list(FIELDS), "What to train.")
_ROWS = flags.DEFINE_integer("rows", 512, "Answers that are made at a time.", 1, 4096)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "Most tokens of an answer.", 1, 2048)
_FIELDS_JSON = flags.DEFINE_string("fields", "{}", "Fields of the training, as a JSON object.")
_SECONDS = flags.DEFINE_integer(
    "seconds", CALL_SECONDS, "Seconds from the start to the end.", 60, 3600
)
_REHEARSE = flags.DEFINE_bool("rehearse", False, "Run every step with a tiny model, to test it.")


def read_plan() -> Plan:
    """Returns the plan of the flags; writes nothing.

    Raises:
      InputError: a flag that is missing, or that cannot be read.
    """
    is_rehearsal = _REHEARSE.value
    if not _RESULTS.value or not (_PROMPTS_FILE.value or is_rehearsal):
        raise InputError("expected --results, and --prompts_file or --rehearse")
    try:
        fields = json.loads(_FIELDS_JSON.value)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise InputError(f"expected a JSON object in --fields, got {_FIELDS_JSON.value}")
    results = pathlib.Path(_RESULTS.value)
    if results.exists() and not results.is_dir():
        raise InputError(f"expected a folder in --results, got {results}")
    if _MODELS.value is not None:
        check_models(_MODELS.value)
    name = hashlib.sha256(str(results.absolute()).encode()).hexdigest()[:12]
    scratch = pathlib.Path(tempfile.gettempdir()) / f"jspec-gpu-train-{name}"
    source = _PROMPTS_FILE.value or "configs/prompts.jsonl"
    prompts = [prompt.text for prompt in read_prompts(source)]
    target, rows, most = SMOLLM2, _ROWS.value, _MAX_NEW_TOKENS.value
    if is_rehearsal:
        target, rows, most = str(scratch / "target"), 4, 16
        prompts = [prompt[:20] for prompt in prompts[:_REHEARSED]]
    plan = Plan(
        target, tuple(prompts), _DRAFTER.value, fields, rows, most, scratch, results, is_rehearsal
    )
    plan.config(1)  # checks the fields
    return plan


def make_folders(plan: Plan) -> None:
    """Makes the plan's folders, and a rehearsal's model.

    Raises:
      InputError: the folder for results cannot be made.
    """
    try:
        plan.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make --results, {plan.results}: {error.strerror}") from None
    plan.scratch.mkdir(exist_ok=True)
    if plan.is_rehearsal and not pathlib.Path(plan.target).exists():
        save_folder(pathlib.Path(plan.target))


def main() -> None:
    """Runs the steps of the flags; the exit status is 1 if one has failed or was ended."""
    plan = read_plan()
    check_backend(is_rehearsal=plan.is_rehearsal)
    lines = [] if _MODELS.value is None else join_models(pathlib.Path(_MODELS.value))
    make_folders(plan)
    scale = _PATIENCE if plan.is_rehearsal else 1
    session = Session(
        Journal(plan.results / "session.jsonl"), BEGIN, is_rehearsal=plan.is_rehearsal
    )
    use_compile_cache()
    command = ["python", "-m", "scripts.gpu_train", *sys.argv[1:]]
    session.write("call", f"begins: {jax.devices()[0].device_kind}", command=command,
                  models=lines, **environment())  # fmt: skip
    problems = run_steps(session, steps_of(plan), until=_SECONDS.value * scale, scale=scale)
    said = "; ".join(f"{name}: {reason}" for name, reason in problems.items())
    session.write("end", said or "all steps are done", seconds=round(session.elapsed(), 1))
    session.close()
    sys.stdout.flush()
    os._exit(int(bool(problems)))  # whatever abandoned threads are still doing


if __name__ == "__main__":
    cli.run_main(main)
