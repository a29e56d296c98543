"""Prints what `make install` downloads, with the sizes in runs/results/install.json; needs only Python and pip."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def install_note(pip_settings: str) -> str:
    """Describe the size of the download and of the environment, for the package indexes in the output of `pip config list`."""
    measured = json.loads((ROOT / "runs/results/install.json").read_text())
    sizes = {
        build: f"pip downloads about {size['download_gb']} GB, and .venv takes about {size['disk_gb']} GB of disk"
        for build, size in measured.items()
    }
    if CPU_INDEX in pip_settings:
        return f"{sizes['cpu']}: torch is its CPU build"
    return (
        f"{sizes['cuda']}: PyPI's torch is the build for CUDA. Without a GPU, stop this and take the CPU build: "
        f"{measured['cpu']['download_gb']} GB and {measured['cpu']['disk_gb']} GB with\n"
        f"  PIP_EXTRA_INDEX_URL={CPU_INDEX} make install"
    )


if __name__ == "__main__":
    config = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    )
    print(install_note(config.stdout), flush=True)
