"""Counting on the text of a compiled program: small ones by hand, and one that XLA has written."""

import inspect
import pkgutil
import re

import jax
import jax.numpy as jnp
import pytest

from jspec.lab.accelerators.hlo import Instruction, Module, array_bytes
from jspec.lab.accelerators.rounds import Assumptions, Round, count_round
from jspec.lab.accelerators.traffic import launch_bytes, movement

_MEGABYTE = 1 << 20
_TEXT = """HloModule m, entry_computation_layout={(f32[4])->f32[4]}

FileNames
1 "/x/jspec/drafters/chain.py"
2 "/x/jspec/kernels/norm.py"

FunctionNames
1 "ChainDrafter.draw_chain"
2 "rms_norm"

FileLocations
1 {file_name_id=1 function_name_id=1 line=152 end_line=152 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%update (p0: bf16[1024,1024], p1: bf16[1,1024], p2: s32[]) -> bf16[1024,1024] {
  %p0 = bf16[1024,1024]{1,0} parameter(0)
  %p1 = bf16[1,1024]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %u = bf16[1024,1024]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

%turn (q: bf16[1024,1024]) -> bf16[1024,1024] {
  %q = bf16[1024,1024]{1,0} parameter(0)
  ROOT %t = bf16[1024,1024]{1,0} transpose(%q), dimensions={1,0}
}

%cond (c: (bf16[1024,1024], s32[])) -> pred[] {
  %c = (bf16[1024,1024]{1,0}, /*index=1*/s32[]) parameter(0)
  %n = s32[] get-tuple-element(%c), index=1
  ROOT %less = pred[] compare(%n, %n), direction=LT
}

%body (b: (bf16[1024,1024], s32[])) -> (bf16[1024,1024], s32[]) {
  %b = (bf16[1024,1024]{1,0}, s32[]) parameter(0)
  %cache = bf16[1024,1024]{1,0} get-tuple-element(%b), index=0
  %i = s32[] get-tuple-element(%b), index=1
  %turned = bf16[1024,1024]{1,0} fusion(%cache), kind=kInput, calls=%turn, metadata={stack_frame_id=2}
  ROOT %out = (bf16[1024,1024]{1,0}, s32[]) tuple(%turned, %i)
}

%round (r: (bf16[1024,1024], s32[])) -> (bf16[1024,1024], s32[]) {
  %r = (bf16[1024,1024]{1,0}, s32[]) parameter(0)
  %own = bf16[1024,1024]{1,0} get-tuple-element(%r), index=0
  %row = bf16[1,1024]{1,0} constant({...})
  %at = s32[] get-tuple-element(%r), index=1
  %wrote = bf16[1024,1024]{1,0} fusion(%own, %row, %at), kind=kLoop, calls=%update
  %state = (bf16[1024,1024]{1,0}, s32[]) tuple(%wrote, %at)
  %first = (bf16[1024,1024]{1,0}, s32[]) while(%state), condition=%cond, body=%body, metadata={stack_frame_id=1}
  ROOT %later = (bf16[1024,1024]{1,0}, s32[]) while(%first), condition=%cond, body=%body, metadata={stack_frame_id=1}
}

ENTRY %main (a: (bf16[1024,1024], s32[])) -> (bf16[1024,1024], s32[]) {
  %a = (bf16[1024,1024]{1,0}, s32[]) parameter(0)
  %given = bf16[1024,1024]{1,0} get-tuple-element(%a), index=0
  %count = s32[] get-tuple-element(%a), index=1
  %laid_out = bf16[1024,1024]{0,1} copy(%given)
  %begin = (bf16[1024,1024]{0,1}, s32[]) tuple(%laid_out, %count)
  ROOT %run = (bf16[1024,1024]{1,0}, s32[]) while(%begin), condition=%cond, body=%round
}
"""  # noqa: E501


def test_a_round_is_counted_by_its_loops():
    """Four drafts: one in the first loop of a chain, three in the second; each turns a cache."""
    found = count_round(Module(_TEXT), Assumptions(num_drafts=4, is_random=False))
    # The conditions: one of the run, 1 + 1 and 3 + 1 of the loops.
    assert found.figures["launches_per_round"] == 1 + 4 + 1 + 2 + 4
    assert found.figures["transposes"] == 4
    assert found.figures["copies"] == found.figures["pads"] == found.figures["sorts"] == 0
    assert found.figures["moves_around_rounds"] == 1  # before the first one
    assert found.waits == 1 + 2 + 4
    assert [trips for _, trips, _ in found.loops] == [1, 3]
    # The kernel's own line is no news: the caller says which part of the algorithm it is.
    assert found.kernels["drafters/chain.py:152 draw_chain"] == 4
    conditions, written = 7 * 9, 2 * 2048 + 4
    assert found.figures["bytes_moved"] == 4 * 4 * _MEGABYTE + written + conditions


def test_a_write_in_place_moves_what_it_writes():
    """Guards against counting a whole cache for one token's keys."""
    module = Module(_TEXT)
    computation = module.computations["round"]
    assert launch_bytes(module, computation["wrote"], computation) == 2 * 2048 + 4
    # Of a kernel that is not XLA's the cache is counted once: as what it reads.
    shape = "(bf16[1024,1024]{1,0}, bf16[1,1024]{1,0})"
    aliasing = "output_to_operand_aliasing={{0}: (1, {})}, metadata={stack_frame_id=2}"
    kernel = Instruction("k", shape, "custom-call", ("row", "own"), aliasing, is_root=False)
    assert launch_bytes(module, kernel, computation) == 2 * 2048 + 2 * _MEGABYTE


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("(bf16[512,1024]{1,0}, bf16[512,1024]{1,0:S(1)}, u32[]{:S(2)})", _MEGABYTE),
        ("(bf16[512,1024]{1,0}, bf16[512,1024]{1,0}, u32[]{:S(2)})", 2 * _MEGABYTE),
        ("((bf16[2,512,1024]{1,0}), bf16[1,512,1024]{1,0:S(1)}, s32[]{:S(2)})", _MEGABYTE),
    ],
)
def test_what_is_fetched_to_the_chip_is_read_once_and_is_no_copy(shape, expected):
    """Guards against weights that a TPU fetches ahead being counted twice, or as copies."""
    fetch = Instruction("f", shape, "slice-start", ("a",), "", is_root=False)
    module = Module(_TEXT)
    assert launch_bytes(module, fetch, {}) == expected
    copied = movement(module, fetch._replace(op="copy-start"))
    assert copied == (None if "S(1)" in shape else "copies")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("bf16[2,3]{1,0}", 12),
        ("(s4[8]{0}, pred[3]{0}, /*index=2*/f32[])", 4 + 3 + 4),
        ("f8e4m3fn[7]{0}", 7),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 0),  # on a TPU's chip
        ("token[]", 0),
    ],
)
def test_bytes_of_shapes(shape, expected):
    assert array_bytes(shape) == expected


@pytest.mark.parametrize(
    ("is_random", "trips"), [(False, [0, 0, 1, 0, 3, 0, 1]), (True, [0, 0, 1, 1, 3, 0, 1])]
)
def test_the_trips_that_only_the_device_knows(is_random, trips):
    """Nothing to catch up with, all drafts, by the distribution if any, the widest call."""
    assumed = Assumptions(4, is_random)
    asked = [("_catch_up", 0, 2), ("catch_up", 0, 1), ("draw_chain", 0, 2), ("draw_one", 0, 1),
             ("draw_chain", 1, 2), ("in_narrowest", 0, 2), ("in_narrowest", 1, 2)]  # fmt: skip
    assert [assumed.trips(*loop) for loop in asked] == trips
    assert assumed.trips("draw_chain", 0, 1) == 4


@pytest.mark.parametrize(
    "function",
    [
        "jspec.drafters.model:ModelDrafter._catch_up",
        "jspec.drafters.eagle:EagleDrafter.catch_up",
        "jspec.drafters.chain:ChainDrafter.draw_chain",
        "jspec.drafters.chain:draw_one",
        "jspec.speculation.round:in_narrowest",
    ],
)
def test_the_loops_are_in_the_functions_that_the_assumptions_name(function):
    """Guards against a loop that is moved elsewhere and then counted once, whatever it does."""
    assert re.search(r"(run_if|while_any)\(", inspect.getsource(pkgutil.resolve_name(function)))
    name = function.rpartition(":")[2].rpartition(".")[2]
    found = [Assumptions(2, is_random=False).trips(name, *loop) for loop in ((0, 3), (2, 3))]
    assert found != [1, 1]


@pytest.mark.parametrize(
    "function",
    [
        "jspec.sampling.distribution:sampling_probs",
        "jspec.sampling.noise:gumbel_noise",
        "jspec.speculation.round:judge",
        "jspec.speculation.plain:draw_next",
        "jspec.speculation.round:_draft_keys",
    ],
)
def test_the_branches_that_sample_are_known_by_their_functions(function):
    assert "lax.cond(" in inspect.getsource(pkgutil.resolve_name(function))
    name = function.rpartition(":")[2]
    assert [Assumptions(4, is_random).branch(name) for is_random in (False, True)] == [0, 1]


@pytest.mark.parametrize(
    ("function", "is_random", "launches"),
    [("judge", False, 1), ("judge", True, 4), ("ask", False, 4), ("ask", True, 4)],
)
def test_a_branch_is_taken_by_the_rule_or_is_the_most_expensive(function, is_random, launches):
    """Guards against a head's branch, one of Medusa's or of a blockwise head's, that is chosen as
    if it were sampling: the round would be too cheap.
    """
    branch = "  ROOT %once = bf16[1024,1024]{1,0} negate(%w)\n"
    often = "".join(f"  %n{i} = bf16[1024,1024]{{1,0}} negate(%w)\n" for i in range(3)) + branch
    branches = "".join(
        f"%{name} (w: bf16[1024,1024]) -> bf16[1024,1024] {{\n"
        f"  %w = bf16[1024,1024]{{1,0}} parameter(0)\n{lines}}}\n\n"
        for name, lines in (("rarely", branch), ("often", often))
    )
    text = _TEXT[: _TEXT.index("%update (")].replace("ChainDrafter.draw_chain", function)
    entry = (
        "ENTRY %main (a: bf16[1024,1024], i: s32[]) -> bf16[1024,1024] {\n"
        "  %a = bf16[1024,1024]{1,0} parameter(0)\n  %i = s32[] parameter(1)\n"
        "  ROOT %c = bf16[1024,1024]{1,0} conditional(%i, %a, %a), "
        "branch_computations={%rarely, %often}, metadata={stack_frame_id=1}\n}\n"
    )
    round_ = Round({"launches_per_round": 0.0})
    round_.add(Module(text + branches + entry), "main", Assumptions(4, is_random))
    assert round_.figures["launches_per_round"] == launches


def test_xlas_own_text_is_read():
    """Guards against a version of XLA that writes HLO otherwise; the CPU's is like a GPU's."""

    def run(x, n):
        return jax.lax.while_loop(lambda c: c[1] < n, lambda c: (jnp.sin(c[0]), c[1] + 1), (x, 0))

    text = jax.jit(run).lower(jnp.zeros([512, 1024]), 3).compile().as_text()
    found = count_round(Module(text), Assumptions(0, is_random=False))
    assert found.figures["bytes_moved"] >= 2 * 4 * 512 * 1024
    assert found.figures["launches_per_round"] >= 2


_JOINING = """HloModule m

ENTRY %main (p: f32[256]) -> f32[512] {
  %p = f32[256]{0} parameter(0)
  %sum = f32[256]{0} all-reduce-start(%p), replica_groups={{0,1}}
  %summed = f32[256]{0} all-reduce-done(%sum)
  %all = (f32[256]{0}, f32[512]{0}) all-gather-start(%summed), dimensions={0}
  ROOT %gathered = f32[512]{0} all-gather-done(%all)
}
"""


def test_what_joins_devices_is_counted():
    """One that starts and is done is one; a gather gives all that the devices hold."""
    figures = count_round(Module(_JOINING), None).figures
    assert figures["collectives"] == 2
    assert figures["collective_bytes"] == 4 * (256 + 512)
    assert figures["bytes_moved"] == 2 * figures["collective_bytes"]


def test_a_collective_that_is_a_kernel_is_counted():
    """Guards against sums over devices that XLA writes as fusions, which would count as none."""
    text = """HloModule m

%sum (p: f32[1,2048]) -> f32[1,2048] {
  %p = f32[1,2048]{1,0} parameter(0)
  ROOT %joined = f32[1,2048]{1,0} all-reduce(%p), to_apply=%add
}

ENTRY %main (a: f32[1,2048]) -> f32[1,2048] {
  %a = f32[1,2048]{1,0} parameter(0)
  %start = ((f32[1,2048]{1,0}), f32[1,2048]{1,0}) fusion-start(%a), kind=kCustom, calls=%sum
  ROOT %done = f32[1,2048]{1,0} fusion-done(%start)
}
"""
    figures = count_round(Module(text), None).figures
    assert (figures["launches_per_round"], figures["collectives"]) == (1, 1)
    assert figures["collective_bytes"] == 4 * 2048
