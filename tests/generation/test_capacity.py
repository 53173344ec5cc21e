"""Few sizes of caches, each with room for a block after the last token."""

from jspec.generation.rows import capacity_for


def test_the_block_counts():
    """Guards against a cache that is full before the longest answer has been verified."""
    assert [capacity_for(507, 5), capacity_for(508, 5)] == [512, 1024]


def test_sizes_double_and_then_lie_closer():
    """Small caches in powers of two; where doubling costs much there is one in between."""
    rooms = (1, 512, 513, 1500, 2049, 3073, 4097, 6145)
    assert [capacity_for(room, 0) for room in rooms] == [
        512, 512, 1024, 2048, 3072, 4096, 6144, 8192,
    ]  # fmt: skip
