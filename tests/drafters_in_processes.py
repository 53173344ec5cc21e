"""Answers of every drafter, in one of several processes: coordinator, number, own number, meshes.

Run by `test_processes`. The first process prints the answers, by mesh and drafter.
"""

import pathlib
import sys
import tempfile

from jspec.common import processes
from jspec.drafters import DRAFTERS
from tests.meshes import answers, drafter_options, report


def answer_all(mesh):
    """Returns the answers of each drafter on a mesh, or on one device."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: answers(name, mesh, drafter_options=drafter_options(name, pathlib.Path(folder)))
            for name in DRAFTERS
        }


if __name__ == "__main__":
    coordinator, number, process_id, *meshes = sys.argv[1:]
    if int(number) == 1:
        report(answer_all(None))
    else:
        with processes.joined(coordinator, int(number), int(process_id), {}):
            report({mesh: answer_all(mesh) for mesh in meshes})
