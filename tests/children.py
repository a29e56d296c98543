"""What a process started, and all that they started: to be counted, and ended."""

import psutil


def descendants(number: int) -> list[psutil.Process]:
    """The processes that a process started, and those that they started; none where it has ended."""
    try:
        return psutil.Process(number).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill(processes: list[psutil.Process]) -> None:
    """Kill those that are still there."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def gone(processes: list[psutil.Process], seconds: float = 20.0) -> bool:
    """Whether none of them is left in time; one that only waits to be collected is gone."""
    _, left = psutil.wait_procs(processes, timeout=seconds)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in left if process.is_running())
