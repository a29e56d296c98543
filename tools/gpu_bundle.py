"""Prepare a folder that brings along what a GPU host without a package registry lacks, and runs the checks there.

    python tools/gpu_bundle.py FOLDER [--python 3.12] [--cuda 130] [--have NAME ...]

Downloads the wheels of everything that the checks import, for Linux on x86-64, with the versions of constraints.txt,
but for what such hosts have (torch, transformers, accelerate and what these bring; more with --have). Of bitsandbytes,
whose wheel carries a library per version of CUDA, one is kept. Copy the folder into the clone on the host; there

    bash FOLDER/run.sh [OUT] [SECONDS] [CHECK ...]

installs what cannot be imported into a folder of its own, and runs the checks that have a result neither in OUT
(runs/results/gpu if it is left out) nor in runs/results/gpu, or those that are named, for SECONDS seconds (540). Called
again it goes on with the next checks. If OUT is another folder, copy its files to runs/results/gpu before the next call.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
ON_HOST = (  # what a host for transformers has
    "torch triton transformers accelerate tokenizers safetensors huggingface-hub hf-xet numpy scipy pandas matplotlib "
    "pillow pyyaml regex requests packaging filelock fsspec jinja2 psutil pytest pytest-timeout pytest-xdist tqdm "
    "sympy networkx setuptools typing-extensions python-dateutil six certifi idna h11 httpx anyio "
    "markupsafe click colorama contourpy cycler fonttools kiwisolver pyparsing mpmath sentencepiece "
    "protobuf narwhals shellingham rich pygments markdown-it-py mdurl"
).split()
NOT_NEEDED = (  # notebooks, and what tests the book: no check imports them
    "jupyterlab papermill ipywidgets ipykernel nbconvert playwright ray nbdev fastcore execnb "
    "ghapi fastgit jupytext ruff hypothesis tensorboard statsmodels patsy"
).split()
RUN = """#!/usr/bin/env bash
# Installs what is missing here into a folder of its own, then runs the checks that have no result yet.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(git -C "$here" rev-parse --show-toplevel 2>/dev/null || dirname "$here")"
site="${TMPDIR:-/tmp}/chunk-grpo-site"
cd "$root"
export PYTHONPATH="$site:$root" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
missing=()
while read -r module wheel; do
  python3 -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" 2>/dev/null \\
    || missing+=("$here/wheels/$wheel")
done < "$here/wheels.txt"
if [ "${#missing[@]}" -gt 0 ]; then
  python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "${missing[@]}"
fi
exec python3 tools/gpu.py --out "${1:-runs/results/gpu}" --seconds "${2:-540}" "${@:3}"
"""


def normal_name(name: str) -> str:
    """Return a package's name in the normal form of package indexes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed_packages(have: set[str]) -> list[str]:
    """List the packages, with pinned versions, that the checks need and the host lacks, including indirect requirements."""
    from importlib.metadata import distribution

    from packaging.requirements import Requirement

    waiting = ["chunk-grpo"]
    found = {}
    while waiting:
        name = waiting.pop()
        for text in distribution(name).requires or ():
            requirement = Requirement(text)
            wanted = normal_name(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if not applies or wanted in have or wanted in found or wanted in NOT_NEEDED:
                continue
            found[wanted] = distribution(wanted).version
            waiting.append(wanted)
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def download(packages: list[str], python: str, folder: Path) -> None:
    """Download the wheels of some packages for the host's Python."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    words += ["--python-version", python, "--implementation", "cp", "-d", str(folder)]
    for platform in PLATFORMS:
        words += ["--platform", platform]
    subprocess.run([*words, *packages], check=True)


def keep_one_cuda(wheel: Path, cuda: str) -> None:
    """Rewrite the wheel of bitsandbytes with only the library for one version of CUDA."""
    with tempfile.TemporaryDirectory() as tmp:
        smaller = Path(tmp) / wheel.name
        with (
            zipfile.ZipFile(wheel) as source,
            zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as target,
        ):
            for entry in source.infolist():
                library = re.search(r"libbitsandbytes_(\w+)\.so$", entry.filename)
                if library and library[1] not in ("cpu", f"cuda{cuda}"):
                    continue
                target.writestr(entry, source.read(entry))
        wheel.write_bytes(smaller.read_bytes())


def imported_module(wheel: Path) -> str:
    """Return the name under which a wheel's package is imported: its largest top-level package or module."""
    with zipfile.ZipFile(wheel) as archive:
        sizes: dict[str, int] = {}
        for entry in archive.infolist():
            top = entry.filename.split("/")[0]
            if top.endswith((".dist-info", ".data")) or not entry.filename.endswith((".py", ".so")):
                continue
            module = re.sub(r"(\.cpython.*)?\.(py|so)$", "", top)
            sizes[module] = sizes.get(module, 0) + entry.file_size
    return max(sizes, key=sizes.get)


def main() -> int:
    """Fill the folder with all files that the checks need."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the host's Python; 3.12")
    parser.add_argument(
        "--cuda", default="130", help="version of the host's CUDA as bitsandbytes writes it; 130"
    )
    parser.add_argument("--have", nargs="*", default=[], help="further packages that the host has")
    given = parser.parse_args()
    wheels = given.folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for old in wheels.glob("*.whl"):
        old.unlink()
    have = {normal_name(name) for name in [*ON_HOST, *given.have]}
    download([*needed_packages(have), "bitsandbytes"], given.python, wheels)
    for wheel in wheels.glob("bitsandbytes-*.whl"):
        keep_one_cuda(wheel, given.cuda)
    listed = [f"{imported_module(wheel)} {wheel.name}" for wheel in sorted(wheels.glob("*.whl"))]
    (given.folder / "wheels.txt").write_text("\n".join(listed) + "\n")
    (given.folder / "run.sh").write_text(RUN)
    size = sum(wheel.stat().st_size for wheel in wheels.glob("*.whl"))
    print(f"{len(listed)} wheels, {size / 1e6:.1f} MB; on the host: bash {given.folder}/run.sh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
