"""A peer: one step of plain decoding by transformers' Llama, compiled by torch, on a static cache.

    python -m scripts.gpu_session.torch_step SHAPES

It prints a line when a step is compiled, and the steps' times once a line comes on standard input:
it compiles in the background of other steps, and is timed alone. Weights are random, of the same
shapes; the token that a step chooses is the input of the next, on the device.
"""

import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.models.families.hf_config import to_hf_config
from scripts.gpu_session.session import LeftOut, Work
from scripts.gpu_session.subjects import SIZES, shape_of

MODULE = "torch_step"
_CAPACITY = 512
_STEPS = 32
_REPEATS = 5
_WARM_STEPS = 6  # the first ones compile, and record a graph
_PACKAGES = "torch", "transformers"


def start(work: Work) -> str:
    """Starts the process that compiles; the step that times it comes later."""
    from jspec.lab.benchmarking.baselines import has_transformers

    if not has_transformers():
        raise LeftOut("torch or transformers is not installed")
    configs = {size: to_hf_config(shape_of(size, is_rehearsal=work.is_rehearsal)) for size in SIZES}
    child = work.start(MODULE, json.dumps(configs))
    work.children.remove(child)  # it outlives this step
    work.session.shared[MODULE] = child
    return "compiles in the background"


def run(work: Work) -> str:
    """Has the steps timed, one after another, and puts them beside jspec's plain rounds."""
    child = work.session.shared.get(MODULE)
    if child is None:
        raise LeftOut("it was not started in this call")
    work.children.append(child)
    ready, speeds = 0, []
    for record in child.records(work.deadline):
        if "compiled" in record:
            work.record("compiled", **record)
            ready += 1
            if ready == len(SIZES):
                child.tell("go")
        elif "step" in record:
            speeds.append(_beside(work, record))
            if len(speeds) == len(SIZES):
                break
    if not speeds:
        raise TimeoutError(child.problem() or "no step was timed")
    return "; ".join(speeds)


def _beside(work: Work, record: Mapping[str, Any]) -> str:
    size, seconds = record["step"], record["seconds"]
    rounds = [figure for figure in work.session.figures("models", "rounds")
              if (figure["model"], figure["rows"]) == (size, 1)]  # fmt: skip
    best = min((figure["milliseconds"] for figure in rounds), default=None)
    times = None if best is None else 1e3 * seconds / best
    work.record(
        "torch", model=size, milliseconds=1e3 * seconds, versions=record["versions"],
        jspec_milliseconds=best, jspec_times_torch=times,
    )  # fmt: skip
    return f"{size}: {1e3 * seconds:.2f} ms, jspec {'unknown' if times is None else f'{times:.2f}'}"


def make_step(config: Mapping[str, Any], device: str) -> Callable[[Any, Any], Any]:
    """Returns a compiled step, (token [1 1], position [1 1]) -> the next token."""
    import torch
    import transformers

    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
        torch.set_default_dtype(torch.float32)
    cache = transformers.StaticCache(config=model.config, max_cache_len=_CAPACITY)
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"  # from 5.24 on, before it

    def step(token: Any, position: Any) -> Any:
        logits = model(token, position_ids=position, **{name: cache}).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    with torch.inference_mode():  # allocates the cache outside the graph
        step(torch.ones([1, 1], dtype=torch.long, device=device),
             torch.zeros([1, 1], dtype=torch.long, device=device))  # fmt: skip
    is_gpu = device == "cuda"
    mode = "reduce-overhead" if is_gpu else "default"
    compiled = torch.compile(step, fullgraph=True, dynamic=False, mode=mode)

    def next_token(token: Any, position: Any) -> Any:
        if is_gpu:
            torch.compiler.cudagraph_mark_step_begin()
        return compiled(token, position).clone()  # a graph writes its result to one place

    next_token.reset = cache.reset  # type: ignore[attr-defined]
    return next_token


def time_steps(step: Any, device: str, number: int) -> float:
    """Returns the seconds of a step, the mean over `number` of them on a cache that is reset."""
    import torch

    with torch.inference_mode():
        step.reset()
        token = torch.ones([1, 1], dtype=torch.long, device=device)
        position = torch.zeros([1, 1], dtype=torch.long, device=device)
        _finish(device)
        begin = time.perf_counter()
        for _ in range(number):
            token = step(token, position)
            position += 1
        _finish(device)
    return (time.perf_counter() - begin) / number


def _finish(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def main(argv: Sequence[str]) -> None:
    """Compiles a step of each shape, waits for a line, and times them."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    steps = {}
    for size, config in json.loads(argv[0]).items():
        begin = time.monotonic()
        steps[size] = make_step(config, device)
        time_steps(steps[size], device, _WARM_STEPS)
        print(json.dumps({"compiled": size, "seconds": time.monotonic() - begin}), flush=True)
    sys.stdin.readline()
    for size, step in steps.items():
        seconds = statistics.median(time_steps(step, device, _STEPS) for _ in range(_REPEATS))
        print(json.dumps({"step": size, "seconds": seconds, "versions": versions}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
