"""Tiny heads, and folders with them, by the drafter that reads them."""

from tests import tiny_blockwise, tiny_dflash, tiny_eagle, tiny_lookahead, tiny_medusa
from tests.cases import slow_unless

MODULES = {
    "eagle": tiny_eagle,
    "dflash": tiny_dflash,
    "medusa": tiny_medusa,
    "blockwise": tiny_blockwise,
    "lookahead": tiny_lookahead,
}
# (folder, the target's config) -> the folder as options have it
SAVE_HEAD = {name: module.save_head for name, module in MODULES.items()}


def head_cases(*quick):
    """Returns the drafters' names as cases of a test, slow but for those that are quick."""
    return [slow_unless(name in quick, name) for name in MODULES]
