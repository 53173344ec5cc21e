"""What pyproject.toml cannot say: the folder `configs` is installed inside the package."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["jspec", "jspec.*"]), "jspec.configs"],
    package_dir={"jspec.configs": "configs"},
)
