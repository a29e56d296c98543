"""What the checks of `make gpu` leave, and how to read it: one JSON file per check in runs/results/gpu."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from chunk_grpo.core.files import read_json, write_json
from chunk_grpo.core.settings import PRESETS_DIR

RESULTS = PRESETS_DIR / "results" / "gpu"
STAGES = RESULTS / "stages"  # an earlier measurement, in seven stages
SHARES = RESULTS / "shares.json"  # what `chunk-grpo plan` reads
CHECKS = {
    1: "update",
    2: "ratio-error",
    3: "iteration-80gb",
    4: "one-h200-lora",
    5: "fsdp",
    6: "masked-attention",
    7: "presets-24gb",
    8: "adamw-8bit",
    9: "scorers-decoding",
    10: "bfloat16-learns",
}
NOT_RUN = "not run"


@dataclass(frozen=True)
class Measured:
    """The numbers of one part of a check, and the problem with them."""

    numbers: dict
    problem: str = ""  # empty if there is none


def check_file(number: int, folder: Path = RESULTS) -> Path:
    """Return the file of a check."""
    return Path(folder) / f"check-{number:02d}-{CHECKS[number]}.json"


def partial_file(file: Path) -> Path:
    """Return the file of a repeated check that has not ended, beside the file of its earlier result."""
    return file.with_suffix(".partial.json")


def is_finished(result: Mapping | None) -> bool:
    """Return True if a check ran to its end, whatever its verdict."""
    return result is not None and result["verdict"] in ("passed", "failed")


def verdict_of(
    parts: Mapping[str, dict],
) -> tuple[str, str]:  # passed, failed or unfinished, and the reason
    """Judge a check by its parts, and return its verdict and the reason."""
    failed = {name: part["failed"] for name, part in parts.items() if part.get("failed")}
    if failed:
        name, reason = next(iter(failed.items()))
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return "failed", f"{name}: {reason}{more}"
    missing = [name for name, part in parts.items() if part.get("status") == NOT_RUN]
    if missing:
        return "unfinished", f"ended before {missing[0]}"
    return "passed", ""


def measure_parts(
    parts: Mapping[str, Callable[[], Measured]],  # keyed by name, in order
    # written after each part, so that a killed check keeps its finished parts; an earlier result stays until the last part
    file: Path,
    about: dict,  # entries of the file before the parts
    # returns the largest memory that the process has used on the device
    peak_bytes: Callable[[], int | None] = lambda: None,
) -> dict:  # content of the file
    """Measure the parts of a check one after the other; if a part fails, its reason is recorded."""
    start = time.monotonic()
    has_earlier_result = file.is_file() and is_finished(read_json(file))
    written_file = partial_file(file) if has_earlier_result else file
    content = dict(about)
    results = {name: {"status": NOT_RUN} for name in parts}

    def write() -> None:
        verdict, reason = verdict_of(results)
        peak = peak_bytes()
        content.update(
            verdict=verdict,
            reason=reason,
            seconds=round(time.monotonic() - start, 1),
            peak_gb=None if peak is None else peak / 1e9,
            parts=results,
        )
        write_json(written_file, content)

    file.parent.mkdir(parents=True, exist_ok=True)
    write()
    for name, measure in parts.items():
        began = time.monotonic()
        try:
            measured = measure()
            result = dict(measured.numbers)
            if measured.problem:
                result["failed"] = measured.problem
        except Exception as error:  # a kernel, a library, memory: whatever a new device may lack
            lines = str(error).strip().splitlines() or ["no message"]
            result = {"failed": f"{type(error).__name__}: {lines[0]}"}
        result["part_seconds"] = round(time.monotonic() - began, 1)
        results[name] = result
        write()
    if has_earlier_result:
        written_file.replace(file)
    return content


def read_results(folder: Path = RESULTS) -> dict[int, dict]:  # by number
    """Read the checks that ran on a GPU at full size."""
    files = {number: check_file(number, folder) for number in CHECKS}
    found = {number: read_json(file) for number, file in files.items() if file.is_file()}
    return {number: result for number, result in found.items() if not result["small"]}


def has_result(number: int, folder: Path = RESULTS) -> bool:
    """Return True if a check finished on a GPU at full size, whatever its verdict."""
    return is_finished(read_results(folder).get(number))


def describe_numbers(numbers: Mapping, prefix: str = "") -> str:
    """Format the numbers of a part in one line."""
    texts = []
    for name, value in numbers.items():
        if isinstance(value, Mapping):
            texts.append(describe_numbers(value, f"{prefix}{name} "))
        elif value is not None and not isinstance(value, list):
            shown = f"{value:.4g}" if type(value) is float else str(value)
            texts.append(f"{prefix}{name} {shown}")
    return ", ".join(filter(None, texts))


def describe_check(result: Mapping) -> str:
    """Format the result of a check as the line that `make gpu` prints."""
    peak = "" if result["peak_gb"] is None else f", peak {result['peak_gb']:.1f} GB"
    reason = f": {result['reason']}" if result["reason"] else ""
    name = f"check {result['check']}, {result['name']}"
    return f"{name}: {result['verdict']} in {result['seconds']:.0f} s{peak} on {result['device']}{reason}"


def result_rows(found: Mapping[int, dict]) -> list[list[str]]:  # check, verdict, part, numbers
    """Format the checks as rows of a table; every check has a row."""
    rows = []
    for number, name in CHECKS.items():
        if number not in found:
            rows.append([f"{number} {name}", NOT_RUN, "", f"make gpu CHECK={number}"])
            continue
        for part, numbers in found[number]["parts"].items():
            rows.append(
                [f"{number} {name}", found[number]["verdict"], part, describe_numbers(numbers)]
            )
    return rows


def gpu_sentence(found: Mapping[int, dict]) -> str:  # found: of `read_results`
    """Describe in one sentence which of the ten checks ran on a GPU, and with what verdicts."""
    ended = {n: result for n, result in found.items() if is_finished(result)}
    if not ended:
        return (
            f"None of the {len(CHECKS)} checks of `make gpu` has run on a GPU yet, so no iteration of FLUX.1-dev's "
            "size is known to finish on one"
        )
    devices = " and ".join(sorted({result["device"] for result in ended.values()}))
    failed = [f"{n} ({CHECKS[n]})" for n, result in ended.items() if result["verdict"] == "failed"]
    text = f"On {devices}, with random weights, {len(ended)} of {len(CHECKS)} checks of `make gpu` ran to their end; "
    return text + (f"failed: {', '.join(failed)}" if failed else "all of them passed")


def stage_shares(folder: Path = RESULTS) -> list[dict]:
    """Compute the shares of the rated speed from the earlier measurement: FLUX.1-dev, one row, bfloat16."""
    from chunk_grpo.models.cost import find_model_config, forward_flops
    from chunk_grpo.planning.devices import find_device, recognise_gpu

    file = folder / "stages" / "4-size.json"
    if not file.is_file():
        return []
    result = read_json(file)
    model = "black-forest-labs/FLUX.1-dev"
    device = recognise_gpu(result["device"])
    rated = find_device(device).bfloat16 * 1e12
    rows = []
    for name, part in result["parts"].items():
        if name.startswith("forward at"):
            flops = forward_flops(find_model_config(model), part["pixels"], 512)
            row = {"device": device, "model": model, "dtype": "bfloat16", "phase": "forward"}
            share = flops / part["seconds"] / rated
            row |= {"resolution": part["pixels"], "share": round(share, 4), "gpu": result["device"]}
            rows.append(row | {"torch": result["versions"]["torch"]})
    return rows


def collect_shares(folder: Path = RESULTS) -> list[dict]:
    """Collect the measured shares of the devices' rated speeds, which `plan` uses; a newer one replaces an older one."""
    rows = stage_shares(folder)
    for result in read_results(folder).values():
        for part in result["parts"].values():
            if "share" in part:
                share = round(part["share"]["share"], 4)
                origin = {"gpu": result["device"], "torch": result["versions"]["torch"]}
                rows.append(part["share"] | {"share": share} | origin)
    newest = {
        (row["device"], row["model"], row["dtype"], row["phase"], row["resolution"]): row
        for row in rows
    }
    return list(newest.values())


def write_shares(folder: Path = RESULTS) -> None:
    """Write `shares.json` from the results."""
    write_json(folder / "shares.json", collect_shares(folder))


def read_shares(folder: Path = RESULTS) -> list[dict]:
    """Read `shares.json`."""
    return json.loads((folder / "shares.json").read_text())
