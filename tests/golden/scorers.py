"""Writes scorers.json: scores of the four scorers on the checkpoints of tests/released.py."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import released  # noqa: E402

from chunk_grpo.rewards import rewards  # noqa: E402


def stored(home: Path) -> dict[str, dict]:
    """The checkpoints, written into a folder: the options of `rewards.load_reward` by name."""
    hps = released.hpsv3(home / "hpsv3")
    places = {
        "clip": {"weights": released.clip(home / "clip", 0)},
        "pickscore": {"weights": released.clip(home / "pick", 1)},
        "imagereward": {"weights": released.imagereward(home / "imagereward")},
        "hpsv3": {"weights": hps, "base": hps / "base"},
    }
    return {
        name: {k: str(v) for k, v in options.items()} | {"device": "cpu"}
        for name, options in places.items()
    }


def asked() -> tuple[list, list[str]]:
    """Six pictures of several sizes and their prompts."""
    images = [released.picture(i, *size) for i, size in enumerate(released.SIZES[:6])]
    return images, list(released.PROMPTS)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        places = stored(Path(home))
        scores = {
            name: rewards.load_reward(name, **options)(*asked()).tolist()
            for name, options in places.items()
        }
    (HERE / "scorers.json").write_text(json.dumps(scores, indent=1) + "\n")
    print(json.dumps(scores, indent=1))
