"""Python programs as forks of a process that has their imports: processes as before, begun without seconds of imports.

The program itself is read anew, as by `python -m`. What is about the start of a process, or about signals that end one,
starts the command as a user does, with `commands.command`.
"""

import concurrent.futures.thread
import contextlib
import math
import multiprocessing
import os
import runpy
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing import forkserver, util

PRELOADED = [
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.models.transformers.transformer_flux",
    "peft",
    "accelerate",
    "transformers.models.clip.modeling_clip",
    "transformers.models.t5.modeling_t5",
    "scipy.stats",
    "chunk_grpo.cli.main",
    "chunk_grpo.runs.launch",
    "chunk_grpo.training.trainer",
    "chunk_grpo.evaluation.evaluate",
    "chunk_grpo.evaluation.benchmarks",
    "chunk_grpo.runs.processes",
    "chunk_grpo.reporting.reports",
    "papermill",
    "nbconvert",
    "chunk_grpo.reporting.tables",
    "chunk_grpo.studies.study",
    "frozen",
]
FORKED = ("chunk_grpo.studies.study", "chunk_grpo.runs.processes")
TESTS = os.path.dirname(os.path.abspath(__file__))
MAIN = "chunk_grpo.cli.main"


def server(environment: dict[str, str]):
    """The context whose processes begin with the imports done; one a process of pytest, started by the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = dict(os.environ)
    os.environ |= environment | {
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
    }  # as the command line sets it
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def become(
    module: str,
    words: list[str],
    environment: dict[str, str],
    anew: tuple[str, ...] = (),
    safe: bool = False,
) -> int:
    """Run a module here as `python -m` does (`safe`: `python -P -m`), packages in `anew` read again; its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler
        )
    os.environ.clear()
    os.environ.update(environment)
    places = [
        *[os.getcwd()] * (not safe),
        *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    sys.path[:] = [*places, *(place for place in sys.path if place not in ("", TESTS, *places))]
    sys.stdout, sys.stderr = (open(number, "w", closefd=False, buffering=1) for number in (1, 2))
    sys.argv[:] = [module, *words]
    for name in [name for name in sys.modules if name == module or name.split(".")[0] in anew]:
        del sys.modules[name]
    code = 0
    try:
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # waits for threads, and lets locks go, as the end of a program does
    util._exit_function()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def release_inherited_locks(
    devnull: int,  # an open descriptor of /dev/null
) -> None:
    """Point the regular files that this fork inherited at /dev/null, which releases its hold on their locks.

    Starting a new program closes them. A fork keeps them open, and with them the lock of a run that another
    thread was creating. The descriptors stay in use because objects of the parent still refer to them.
    """
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # the descriptor of this listing is closed by now
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if descriptor > 2 and is_file and not os.get_inheritable(descriptor):
                os.dup2(devnull, descriptor, inheritable=False)


class Forked:
    """What subprocess.Popen gives, for a module in a fork of this process."""

    anew: tuple[str, ...] = ()  # packages that this process may have changed

    def __init__(
        self,
        words,
        stdin=None,
        stdout=None,
        stderr=None,
        env=None,
        start_new_session=False,
        preexec_fn=None,
    ):
        self.args, self.returncode = words, None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # The ends of pipes that the program has: it reads from the first and writes to the second.
        pipes = {}
        if stdin == subprocess.PIPE:
            pipes[0], own = os.pipe()
            self.stdin = open(own, "wb")
        if stdout == subprocess.PIPE:
            own, pipes[1] = os.pipe()
            self.stdout = open(own, "rb")
        self.pid = os.fork()
        if self.pid:
            for end in pipes.values():
                os.close(end)
            return
        code = 1
        try:
            nothing = os.open(os.devnull, os.O_RDWR)
            for number, file in enumerate((stdin, stdout, stderr)):
                if number in pipes:
                    os.dup2(pipes[number], number)
                elif file is not None:
                    os.dup2(nothing if file == subprocess.DEVNULL else file.fileno(), number)
            concurrent.futures.thread._threads_queues.clear()  # the fork of a pool's thread has no pool to wait for
            if start_new_session:
                os.setsid()
            if preexec_fn:
                preexec_fn()
            release_inherited_locks(nothing)
            named = [*map(str, words[words.index("-m") + 1 :])]
            code = become(
                named[0], named[1:], dict(env or os.environ), self.anew, "-P" in words[:2]
            )
        finally:
            os._exit(code)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=None):
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


class Popen(subprocess.Popen):
    """subprocess.Popen that forks for the programs which a command starts, instead of importing all again."""

    forked = Forked

    def __new__(cls, args, *given, **more):
        if (
            isinstance(args, list)
            and args[0] == sys.executable
            and "-m" in args[1:3]
            and args[args.index("-m") + 1] in FORKED
        ):
            return cls.forked(args, *given, **more)
        return super().__new__(cls)


def program(
    words: list[str],
    environment: dict[str, str],
    folder: str,
    files: tuple[str, str],
    module: str = MAIN,
) -> None:
    """What a process of the server does: the command line, or another module or file, in a folder; output in two files."""
    for number, name in enumerate(files, 1):
        with open(name, "wb") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    subprocess.Popen = Popen
    os._exit(
        become(module, words, environment, safe=module == MAIN)
    )  # the installed script has not the folder


_starting = threading.Lock()


def start_process(process) -> None:
    """Start a process that no other thread's start looks after: of two that ask for one end, the second reads 255."""
    with _starting:
        process.start()
        multiprocessing.process._children.discard(process)


class Started:
    """What subprocess.Popen gives, for the command line in a process of the server."""

    def __init__(
        self,
        context,
        words: list[str],
        environment: dict[str, str],
        folder: str,
        files: tuple[str, str],
    ):
        self.process = context.Process(target=program, args=(words, environment, folder, files))
        start_process(self.process)
        self.pid, self.kill, self.terminate = (
            self.process.pid,
            self.process.kill,
            self.process.terminate,
        )

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        return self.process.exitcode


def call(
    context,
    words: list[str],
    environment: dict[str, str],
    folder: str,
    files: tuple[str, str],
    timeout: float,
    module: str = MAIN,
):
    """Run the command line, or another module or file, to its end in a process of the server; its exit code."""
    child = context.Process(target=program, args=(words, environment, folder, files, module))
    start_process(child)
    child.join(timeout)
    if child.is_alive():
        child.kill()
        child.join()
        raise subprocess.TimeoutExpired(words, timeout)
    with contextlib.closing(child):
        return child.exitcode
