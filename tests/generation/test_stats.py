"""Counts of rounds, without any model."""

from jspec.generation.result import (
    RoundCounts,
    Stats,
    acceptance_by_position,
    by_drafter,
)

ROUNDS = [
    RoundCounts(3, 3, "lookup"),
    RoundCounts(3, 1, "model"),
    RoundCounts(0, 0),
    RoundCounts(2, 0, "model"),
    RoundCounts(1, 1, "lookup"),
]


def test_acceptance_by_position():
    """Guards against mixed definitions: of all drafts at a position, or of those reached."""
    assert acceptance_by_position(ROUNDS) == [3 / 4, 1 / 3, 1 / 2]
    assert acceptance_by_position(ROUNDS, is_conditional=True) == [3 / 4, 1 / 2, 1]


def test_a_place_whose_turn_never_came_has_no_rate():
    """Guards against 0 / 0, and against 0 where nothing is known."""
    lost = [RoundCounts(3, 0, "a")] * 2
    assert acceptance_by_position(lost, is_conditional=True) == [0.0]
    assert acceptance_by_position(lost) == [0.0, 0.0, 0.0]
    assert acceptance_by_position([RoundCounts(0, 0)]) == []


def test_each_drafter_has_its_own_counts():
    """A silent round belongs to nobody."""
    report = by_drafter(ROUNDS)
    assert list(report) == ["lookup", "model"]
    assert report["lookup"] == {
        "num_rounds": 2, "num_proposed": 4, "num_accepted": 4, "acceptance_rate": 1.0,
    }  # fmt: skip
    assert report["model"] == {
        "num_rounds": 2, "num_proposed": 5, "num_accepted": 1, "acceptance_rate": 1 / 5,
    }  # fmt: skip


def test_a_drafter_that_calls_the_target_takes_two_calls_a_round():
    """Where it proposed; a silent round is a verify call alone."""
    rounds = RoundCounts(2, 2, "lookahead"), RoundCounts(0, 0), RoundCounts(1, 0, "prompt_lookup")
    stats = Stats(rounds, 5, 0.5, 2.0, 1.5, 0.0, 3)
    assert (stats.num_rounds, stats.num_target_calls) == (3, 4)
    assert stats.tokens_per_target_call == stats.to_json()["tokens_per_target_call"] == 5 / 4


def test_rates_of_trees_are_by_depth():
    """Guards against eight drafts of a tree that count as eight positions."""
    rounds = RoundCounts(8, 2, "model"), RoundCounts(8, 1, "model"), RoundCounts(0, 0)
    record = Stats(rounds, 6, 0.5, 2.0, 1.5, 0.0, 8, tree_depth=2).to_json()
    assert record["acceptance_by_position"] == [1, 1 / 2]
    assert record["conditional_acceptance_by_position"] == [1, 1 / 2]
    chain = Stats(rounds, 6, 0.5, 2.0, 1.5, 0.0, 8).to_json()
    assert chain["acceptance_by_position"] == [1, 1 / 2, 0, 0, 0, 0, 0, 0]


def test_totals():
    """Guards against derived numbers that contradict the rounds."""
    stats = Stats(tuple(ROUNDS), 10, 0.5, 2.0, 1.5, 0.0, 3)
    record = stats.to_json()
    assert (stats.num_proposed, stats.num_accepted, record["num_wasted"]) == (9, 5, 4)
    assert record["host_seconds"] == 0.5
    assert record["proposed_per_round"] == [3, 3, 0, 2, 1]
    assert stats.accepted_histogram == [2, 2, 0, 1]
    assert (stats.tokens_per_second, stats.tokens_per_target_call) == (5.0, 2.0)
