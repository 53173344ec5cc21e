"""The steps of `scripts.gpu_train`: answers, the speed of training, training, a check."""

import dataclasses
import functools
import json
import pathlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions
from jspec.drafters.head_folder import round_head
from jspec.drafters.spec import find_head, shipped_head
from jspec.generation.generator import Generator
from jspec.generation.prompts import read_prompts
from jspec.generation.request import Request, SamplingParams
from jspec.lab.auditing.subject import cast
from jspec.training.config import TrainingConfig
from jspec.training.run import read_config, run_training
from jspec.weights.published import SMOLLM2
from jspec.weights.resolver import LoadedModel, load_model
from scripts.gpu_session.session import Step, Work

_PIECE = 15 << 20  # bytes of a part of the weights
_WARM_UP, _TIMED = 5, 20  # steps that are trained to measure their time
_SAVING = 25.0  # seconds of training's step that are left for the last evaluation and the folder
_SHARE = 0.9  # of the time that is left, for which steps are planned
_NUM_CHECKED = 64
_LONGEST_PROMPT = 256  # tokens

# What suits a GPU: large batches, chains as long as drafts are.
FIELDS = {
    "eagle": {"vocab_size": 11264, "freeze_head": True, "chain_steps": 4, "score_prompts": True},
    "dflash": {"vocab_size": 11264, "num_layers": 2},
    "dspark": {"vocab_size": 11264, "num_layers": 2},
}
_SIZES = {"batch_size": 48, "seq_len": 512, "num_held_out": 128}
_SMALL = {"batch_size": 2, "seq_len": 64, "num_held_out": 2}
_RECIPE = {"learning_rate": 5e-4, "compute_dtype": "bfloat16", "warmup_steps": 100}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is trained, and where things lie.

    Attributes:
      target: the model's name or folder.
      prompts: all that are answered.
      drafter: a key of `FIELDS`.
      fields: of the training, besides the usual ones.
      rows: answers that are made at a time.
      max_new_tokens: of each answer.
      scratch: the folder for answers and checkpoints.
      results: the folder for what is kept.
      is_rehearsal: whether the model is tiny.
    """

    target: str
    prompts: tuple[str, ...]
    drafter: str
    fields: Mapping[str, Any]
    rows: int
    max_new_tokens: int
    scratch: pathlib.Path
    results: pathlib.Path
    is_rehearsal: bool

    @property
    def answers(self) -> pathlib.Path:
        """The file of the answers."""
        return self.scratch / "answers.jsonl"

    @functools.cached_property
    def model(self) -> LoadedModel:
        """The target in bfloat16."""
        model = load_model(self.target, dtype="bfloat16", quantization="none")
        return cast(model, "float32") if self.is_rehearsal else model

    def config(self, num_steps: int) -> TrainingConfig:
        """Returns the training of that many steps, which scores held-out texts six times.

        Raises:
          InputError: a field that the training does not have.
        """
        recipe = _RECIPE | {"num_steps": num_steps, "evaluate_every": max(num_steps // 6, 1)}
        fields = {"drafter": self.drafter, "target": self.target} | FIELDS[self.drafter] | _SIZES
        if self.is_rehearsal:
            fields |= _SMALL | {"vocab_size": 200, "dtype": "float32"}
        elif self.drafter == "eagle":
            fields["init_head"] = str(find_head(str(shipped_head("eagle", SMOLLM2))))
        given = dict(self.fields)
        recipe |= given.pop("recipe", {})
        return read_config(fields | given | {"texts": (str(self.answers),), "recipe": recipe})


def make_answers(plan: Plan, work: Work) -> str:
    """Answers the prompts, again and again with other seeds, until the time of the step is over."""
    most = plan.max_new_tokens
    longest = min(most + _LONGEST_PROMPT, plan.model.config.max_seq_len)
    generator = Generator(plan.model, drafter="none", batch_size=plan.rows, max_seq_len=longest)
    requests = [Request(ids) for ids in _short_prompts(generator, plan.prompts)]
    work.record("prompts", count=len(requests), left_out=len(plan.prompts) - len(requests))
    counts, begin = [0, 0], time.monotonic()
    with plan.answers.open("w") as file:
        for number in range(1_000_000):
            for prompt, answer in _one_pass(generator, requests, number, most):
                file.write(json.dumps({"prompt_token_ids": prompt, "token_ids": answer}) + "\n")
                counts[0] += 1
                counts[1] += len(answer)
                if work.left() < 5 or (plan.is_rehearsal and number == 2):
                    break
            else:
                continue
            break
    seconds = time.monotonic() - begin
    work.record("answers", count=counts[0], tokens=counts[1], passes=number + 1,
                tokens_a_second=counts[1] / seconds)  # fmt: skip
    return f"{counts[0]} answers of {counts[1]} tokens"


def _short_prompts(generator: Generator, prompts: Sequence[str]) -> list[list[int]]:
    encoded = (generator.encode_prompt(prompt) for prompt in prompts)
    return [ids for ids in encoded if len(ids) <= _LONGEST_PROMPT]


def _one_pass(
    generator: Generator, requests: Sequence[Request], number: int, max_new_tokens: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields prompt and answer of each request; pass 0 is greedy."""
    temperature, first = (1.0 if number else 0.0), number * len(requests)
    seeded = [
        dataclasses.replace(request, settings=SamplingParams(
            max_new_tokens=max_new_tokens, temperature=temperature, seed=first + index,
        ))
        for index, request in enumerate(requests)
    ]  # fmt: skip
    for chunk in generator.run(seeded):
        if chunk.result is not None and chunk.result.token_ids:
            yield list(chunk.result.prompt_token_ids), list(chunk.result.token_ids)


def measure_speed(plan: Plan, work: Work) -> str:
    """Trains a few steps and throws the head away; records the seconds of a step."""
    times = []

    def is_over(step: int) -> bool:
        times.append(time.monotonic())
        return step == _WARM_UP + _TIMED or work.left() < 10

    run_training(plan.config(10_000), _emptied(plan.scratch / "speed"), is_over=is_over)
    if len(times) <= _WARM_UP:
        raise InputError(f"expected {_WARM_UP} steps in the time of this step, got {len(times)}")
    seconds = (times[-1] - times[_WARM_UP - 1]) / (len(times) - _WARM_UP)
    config = plan.config(1)
    per_second = config.batch_size * config.seq_len / seconds
    work.record("speed", seconds_a_step=seconds, tokens_a_second=per_second)
    return f"a step takes {seconds:.3f} s"


def train_head(plan: Plan, work: Work) -> str:
    """Trains for the time that is left, and writes head, weights and curve."""
    seconds = work.session.figures("speed", "speed")[-1]["seconds_a_step"]
    begin = time.monotonic()
    # The program is compiled once more, from the cache: some five steps' worth and the evaluations.
    num_steps = max(int((work.left() - _SAVING) * _SHARE / seconds), 1)
    if plan.is_rehearsal:
        num_steps = min(num_steps, 12)
    config, folder = plan.config(num_steps), _emptied(plan.scratch / "training")
    taken = []

    def is_over(step: int) -> bool:
        taken[:] = [step]
        return work.left() < _SAVING

    scores = run_training(config, folder, is_over=is_over)
    work.record("training", planned=num_steps, steps=taken[0], seconds=time.monotonic() - begin,
                held_out=dict(scores))  # fmt: skip
    keep(folder, config.OUTPUT, plan.results)
    return f"{taken[0]} of {num_steps} steps"


def keep(workdir: pathlib.Path, output: str, results: pathlib.Path) -> None:
    """Writes what is worth keeping of a run: the curve, the head in int8, its weights in parts."""
    shutil.copyfile(workdir / "metrics.jsonl", results / "metrics.jsonl")
    if (results / "head").exists():
        shutil.rmtree(results / "head")
    round_head(workdir / output, results / "head")
    weights = (workdir / output / "model.safetensors").read_bytes()
    for number, first in enumerate(range(0, len(weights), _PIECE)):
        (results / f"weights.{number:02}").write_bytes(weights[first : first + _PIECE])


def check_heads(plan: Plan, work: Work) -> str:
    """Counts tokens per target call on prompts that were not trained on."""
    heads = {"new": str(plan.results / "head")}
    if not plan.is_rehearsal:
        heads["shipped"] = str(shipped_head("eagle", SMOLLM2))
    prompts = [prompt.text for prompt in read_prompts("configs/prompts.jsonl")]
    counts: dict[str, float] = {}
    for name, head in heads.items():
        drafter = "eagle" if plan.drafter == "eagle" or name == "shipped" else "dflash"
        generator = Generator(
            plan.model, drafter=drafter, num_draft_tokens=4, batch_size=min(plan.rows, 64),
            acceptance="rejection", drafter_options=DrafterOptions(draft_head=head),
        )  # fmt: skip
        for temperature in (0.0, 1.0):
            work.check_time()
            most = 8 if plan.is_rehearsal else 128
            settings = SamplingParams(max_new_tokens=most, temperature=temperature, seed=0)
            results = generator.generate(
                prompts[: 2 if plan.is_rehearsal else _NUM_CHECKED], settings
            )
            emitted = sum(result.stats.num_round_tokens for result in results)
            calls = sum(result.stats.num_target_calls for result in results)
            counts[f"{name}, {temperature:g}"] = emitted / max(calls, 1)
    work.record("tokens a call", **counts)
    return ", ".join(f"{name}: {count:.2f}" for name, count in counts.items())


def _emptied(folder: pathlib.Path) -> pathlib.Path:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def steps_of(plan: Plan) -> tuple[Step, ...]:
    """Returns the steps in their order."""
    runs = {
        "answers": (230, make_answers),
        "speed": (60, measure_speed),
        "training": (230, train_head),
        "check": (60, check_heads),
    }
    return tuple(
        Step(name, 1, seconds, functools.partial(run, plan))
        for name, (seconds, run) in runs.items()
    )
