"""Folders with tiny heads, by the drafter that reads them."""

from tests import tiny_eagle, tiny_medusa

# (folder, the target's config) -> the folder as options have it
SAVE_HEAD = {"eagle": tiny_eagle.save_head, "medusa": tiny_medusa.save_head}
