"""A generation run call by call says what a Generator says, and tells the drafts besides."""

import dataclasses
import json

import pytest

from jspec.drafters import DrafterOptions
from jspec.generation.request import Request, SamplingParams
from jspec.lab.analysis.trace import answer_tokens, check_trace, round_tokens
from jspec.lab.benchmarking.tracing import record_trace
from jspec.speculation.acceptance import RuleOptions
from tests.cases import slow_unless
from tests.tiny_models import make_generator, target

PROMPT = "abcabcabc"


@pytest.mark.parametrize(
    ("drafter", "temperature"),
    [
        ("prompt_lookup", 1.0),
        slow_unless(False, "model", 0.0),
        slow_unless(False, "layer_skip", 1.0),
    ],
)
def test_a_trace_is_the_generators_own_generation(drafter, temperature):
    """The noise is the seed's and the position's: two programs a round draw what one draws.

    It holds what it takes to repeat it: settings, options and the command.
    """
    options = DrafterOptions(draft_layers=(0,) if drafter == "layer_skip" else None)
    settings = SamplingParams(max_new_tokens=24, temperature=temperature, seed=3, stop=("zz",))
    rule, rule_options = "rejection", RuleOptions()
    if (drafter, temperature) == ("prompt_lookup", 1.0):
        rule, rule_options = "lenient", RuleOptions(lenience=0.25)
    generator = make_generator(
        drafter, acceptance=rule, rule_options=rule_options, drafter_options=options
    )
    argv = ["python", "scripts/trace.py", "--seed=3"]
    recorded = record_trace(generator, PROMPT, settings, argv=argv)
    trace = check_trace(json.loads(json.dumps(recorded)))
    assert SamplingParams(**{k: tuple(v) if isinstance(v, list) else v
                       for k, v in trace["settings"].items()}) == settings  # fmt: skip
    assert trace["drafter_options"]["draft_layers"] == (options.draft_layers and [0])
    assert trace["argv"] == argv
    assert trace["acceptance"] == rule
    assert trace["rule_options"] == dataclasses.asdict(rule_options)
    assert (trace["dtype"], trace["costs"], trace["chat"]) == ("float32", None, None)
    quantized = None if drafter != "model" else "none"
    assert (trace["target_quantization"], trace["draft_quantization"]) == ("none", quantized)
    result = generator.generate(Request(PROMPT, settings))
    counts = [(len(a_round["drafts"]), a_round["num_accepted"]) for a_round in trace["rounds"]]
    assert counts == [a_round[:2] for a_round in result.stats.rounds]
    said = "".join(token.text for token in answer_tokens(trace))
    assert said.removesuffix("<0>") == target().tokenizer.decode(result.token_ids)
    assert trace["finish_reason"] == ("length" if result.finish_reason == "length" else "stop")
    assert sum(len(a_round["drafts"]) - a_round["num_accepted"] for a_round in trace["rounds"]) == (
        result.stats.num_proposed - result.stats.num_accepted
    )


@pytest.mark.slow
def test_a_trace_of_trees_tells_their_paths():
    """The kept drafts are a path that is the text, and not always the block's first ones.

    Some are rejected, and no clock stands still.
    """
    tree = {"num_draft_tokens": 6, "drafter_options": DrafterOptions(tree_depth=3, tree_branches=2)}
    settings = SamplingParams(max_new_tokens=40, temperature=1.0, seed=3)
    generator = make_generator("model", **tree)
    trace = check_trace(record_trace(generator, PROMPT, settings))
    result = generator.generate(Request(PROMPT, settings))
    said = "".join(token.text for token in answer_tokens(trace))
    assert said.removesuffix("<0>") == target().tokenizer.decode(result.token_ids)
    trees = [one for one in trace["rounds"] if "parents" in one]
    assert all([-1, *one["kept"]][:-1] == [one["parents"][i] for i in one["kept"]] for one in trees)
    assert any(one["kept"] != list(range(len(one["kept"]))) for one in trees)
    kinds = {token.kind for one in trace["rounds"] for token in round_tokens(one)}
    assert {"accepted", "rejected", "next"} <= kinds
    begins = [one["begin"] for one in trace["rounds"]]
    assert begins == sorted(begins)
    assert all(one["draft_seconds"] > 0 < one["target_seconds"] for one in trace["rounds"])
    assert len(trace["plain_seconds"]) > 0
    assert result.stats.tree_depth == 3
    assert len(result.stats.to_json()["acceptance_by_position"]) == 3
