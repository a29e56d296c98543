"""What the stages of `make gpu` leave, and how to read it; the page speed of nbs/findings says what each holds."""

from collections.abc import Callable, Mapping
from pathlib import Path

from chunk_grpo.core.files import read_json, write_json
from chunk_grpo.core.settings import PRESETS_DIR

GPU_STAGES = {1: "pocket", 2: "resume", 3: "tests", 4: "size", 5: "speed", 6: "encoders", 7: "sharded"}
GPU_RESULTS = PRESETS_DIR / "results" / "gpu"
NOT_MEASURED = "not measured: "


def stage_file(
    number: int,  # 1 ... 7
    folder: Path = GPU_RESULTS,
) -> Path:
    "The file of a stage."
    return Path(folder) / f"{number}-{GPU_STAGES[number]}.json"


def describe_part(
    part: dict | str,  # numbers, or why there are none
    prefix: str = "",  # of the names
) -> str:
    "The numbers of a part in one line."
    if isinstance(part, str):
        return part
    texts = []
    for name, value in part.items():
        if isinstance(value, dict):
            texts.append(describe_part(value, f"{prefix}{name}."))
        elif value is not None and not isinstance(value, list):
            texts.append(f"{prefix}{name} {value:.4g}" if type(value) is float else f"{prefix}{name} {value}")
    return ", ".join(filter(None, texts))


def measure_parts(
    parts: Mapping[str, Callable[[], dict]],  # by name, each without arguments
    file: Path,  # written after each part
    about: dict,  # stands in the file beside them
    say: Callable[[str], None] = lambda text: None,
) -> dict:  # what the file holds
    "Measure the parts of a stage one after another; what ends a part is written in its place."
    file.parent.mkdir(parents=True, exist_ok=True)
    content = about | {"parts": {name: NOT_MEASURED + "the stage ended before it" for name in parts}}
    for name, measure in parts.items():
        write_json(file, content)
        say(f"  {name} ...")
        try:
            content["parts"][name] = measure()
        except Exception as error:  # a kernel, a library, memory: whatever a new device may lack
            words = (str(error).strip().splitlines() or ["without a word"])[0]
            content["parts"][name] = f"{NOT_MEASURED}{type(error).__name__}: {words}"
        say(f"  {name}: {describe_part(content['parts'][name])}")
    write_json(file, content)
    return content


def read_gpu_stages(
    folder: Path = GPU_RESULTS,
) -> dict[int, dict]:  # by number; those that ran on a GPU in full size
    "The stages that were measured."
    files = {number: stage_file(number, folder) for number in GPU_STAGES}
    found = {number: read_json(file) for number, file in files.items() if file.is_file()}
    return {number: stage for number, stage in found.items() if not stage["small"]}


def gpu_rows(
    found: dict[int, dict],  # of `read_gpu_stages`
) -> list[list[str]]:  # stage, part and its numbers; every stage has a row
    "The stages as a table of texts."
    rows = []
    for number, name in GPU_STAGES.items():
        parts = found[number]["parts"] if number in found else {"": f"{NOT_MEASURED}make gpu STAGE={number}"}
        rows += [[f"{number} {name}", part, describe_part(numbers)] for part, numbers in parts.items()]
    return rows


def gpu_sentence(
    found: dict[int, dict],  # of `read_gpu_stages`
) -> str:
    "What was run on a GPU, in a sentence."
    parts = {n: list(stage["parts"].values()) for n, stage in found.items()}
    measured = {n: found[n] for n, each in parts.items() if any(isinstance(part, dict) for part in each)}
    if not measured:
        return "Nothing here was run on a GPU yet (`make gpu` would, in seven stages of minutes, without weights)"
    devices = ", ".join(dict.fromkeys(stage["device"] for stage in measured.values()))
    gone = sum(isinstance(part, str) for each in parts.values() for part in each)
    return (f"On {devices}, {len(measured)} of {len(GPU_STAGES)} stages of `make gpu` ran, without released "
            f"weights; {gone} of their parts broke")
