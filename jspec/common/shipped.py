"""The configs and prompts that come with jspec: inside the package where it is installed.

In a checkout they lie beside the package, in the folder `configs`; see setup.py.
"""

import pathlib

_PACKAGE = pathlib.Path(__file__).parents[1]
_FOLDER = "configs"


def config_folder() -> pathlib.Path:
    """Returns the folder of jspec's configs and prompts."""
    installed = _PACKAGE / _FOLDER
    return installed if installed.is_dir() else _PACKAGE.parent / _FOLDER


def find_shipped(path: str) -> str:
    """Returns the path as given if there is such a file, or else jspec's file of that name.

    jspec's files are named as in a checkout, such as "configs/prompts.jsonl". Where there is
    neither, the path is returned as given.
    """
    given = pathlib.Path(path)
    shipped = config_folder() / given.name
    is_shipped = given.parent == pathlib.Path(_FOLDER) and shipped.is_file()
    return str(shipped) if is_shipped and not given.is_file() else path
