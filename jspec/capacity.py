"""How many slots a cache has: few sizes, so that few programs are compiled."""

import itertools

_SMALLEST_CAPACITY = 256


def capacity_for(max_length: int, head_room: int) -> int:
    """Returns the smallest of a few capacities that is enough: 256, 384, 512, 768, 1024, ...

    Args:
      max_length: tokens a row may come to.
      head_room: tokens of one block, which may stand behind the last token.
    """
    num_slots = max_length + head_room
    sizes = (_SMALLEST_CAPACITY * 2**i * part // 2 for i in itertools.count() for part in (2, 3))
    return next(size for size in sizes if size >= num_slots)
