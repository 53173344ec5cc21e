"""How many slots a cache has: one of a few sizes, so that few programs are compiled."""

_SMALLEST_CAPACITY = 512
_SMALLEST_IN_BETWEEN = 3072


def capacity_for(max_length: int, head_room: int) -> int:
    """Returns the smallest of a few capacities that is enough: 512, 1024, 2048, 3072, 4096, ...

    A block of `head_room` tokens may be written after the last token of a row.
    """
    num_slots = max_length + head_room
    double = max(_SMALLEST_CAPACITY, 1 << (num_slots - 1).bit_length())
    between = double // 4 * 3  # doubling a large cache is expensive
    return between if between >= max(num_slots, _SMALLEST_IN_BETWEEN) else double


def next_smaller(capacity: int) -> int:
    """Returns the capacity below one of them; 0 below the smallest."""
    if capacity <= _SMALLEST_CAPACITY:
        return 0
    if capacity & (capacity - 1):  # three quarters of a power of two
        return capacity // 3 * 2
    return capacity // 4 * 3 if capacity > _SMALLEST_IN_BETWEEN else capacity // 2
