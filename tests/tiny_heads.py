"""Folders with tiny heads, by the drafter that reads them."""

from tests import tiny_blockwise, tiny_eagle, tiny_lookahead, tiny_medusa

# (folder, the target's config) -> the folder as options have it
SAVE_HEAD = {
    "eagle": tiny_eagle.save_head,
    "medusa": tiny_medusa.save_head,
    "blockwise": tiny_blockwise.save_head,
    "lookahead": tiny_lookahead.save_head,
}
