"""Metadata comes from settings.ini, the version from the package: nothing is written twice."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
config = ConfigParser(delimiters=["="])
config.read(here / "settings.ini", encoding="utf-8")
meta = config["DEFAULT"]
version = re.search(
    r'__version__ = "(.+?)"', (here / meta["lib_path"] / "__init__.py").read_text()
).group(1)

setup(
    name=meta["lib_name"],
    version=version,
    description=meta["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    keywords=meta["keywords"],
    author=meta["author"],
    license=meta["license"],
    python_requires=f">={meta['min_python']}",
    packages=find_packages(include=[meta["lib_path"], f"{meta['lib_path']}.*"]),
    package_data={
        meta["lib_path"]: [
            "py.typed",
            "*.pyi",
            "reports/*.ipynb",
            "reports/*.css",
            "reports/*.j2",
            "presets/*.yaml",
            "presets/*/*.yaml",
            "presets/hosts/*",
            "presets/results/gpu/shares.json",
            "presets/pocket/studies/*/*.yaml",
            "presets/pocket/looks/*/*.yaml",
        ],
        f"{meta['lib_path']}.evaluation": ["*.json", "*/*"],
        f"{meta['lib_path']}.reward_serving": ["*.txt"],
        f"{meta['lib_path']}.cli": ["*.yaml"],
        f"{meta['lib_path']}.rewards": ["*.txt"],
        f"{meta['lib_path']}.pocket": [
            "*.json",
            "*.txt",
            "*.jsonl",
            "*.safetensors",
            "*/*",
            "*/*/*",
            "*/*/*/*",
        ],
    },
    install_requires=meta["requirements"].split(),
    extras_require={
        key.removesuffix("_requirements"): value.split()
        for key, value in meta.items()
        if key.endswith("_requirements")
    },
    entry_points={"console_scripts": [meta["console_scripts"]]},
    zip_safe=False,
)
