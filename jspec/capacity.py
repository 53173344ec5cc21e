"""How many slots a cache has: few sizes, so that few programs are compiled."""

_SMALLEST_CAPACITY = 512


def capacity_for(max_length: int, head_room: int) -> int:
    """Returns the smallest of a few capacities that is enough: 512, 1024, 2048, ...

    Args:
      max_length: tokens a row may come to.
      head_room: tokens of one block, which may stand behind the last token.
    """
    num_slots = max_length + head_room
    return max(_SMALLEST_CAPACITY, 1 << (num_slots - 1).bit_length())
