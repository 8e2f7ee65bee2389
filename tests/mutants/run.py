"""Does the suite notice? One line of a copy of the package is changed at a time, and the tests named for it must fail.

    python tests/mutants/run.py [--only PART-OF-A-NAME] [--limit N] [--workers 2] [--fresh]

Results stay in ``.mutants.json``: a run that is stopped goes on where it was, and what has not changed since (the file, its
tests) is not tried again. Ends with 1 where a mutant survives or its tests do not pass without it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from table import ROOT, Mutant, read_table

STATE = ROOT / ".mutants.json"
TIMEOUT_S = 300
COPIED = ("megatron_dapo", "tests", "tools", "examples", "docs", "slurm", "pyproject.toml", "README.md", "Makefile")
KILLED, SURVIVED, BROKEN = "killed", "survived", "broken"


class Results:
    """What is known of each mutant and of each set of tests without one, on disk after every result."""

    def __init__(self, fresh: bool) -> None:
        self.known: dict[str, str] = {} if fresh or not STATE.is_file() else json.loads(STATE.read_text())

    def put(self, key: str, result: str) -> None:
        self.known[key] = result
        unfinished = STATE.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.known, indent=0, sort_keys=True))
        os.replace(unfinished, STATE)


def key_of(tests: tuple[str, ...], mutant: Mutant | None = None) -> str:
    """Changes when the mutant, the file it is in or a file of its tests does."""
    files = sorted({node.split("::")[0] for node in tests})
    content = b"".join((ROOT / file).read_bytes() for file in files)
    if mutant:
        content += (ROOT / "megatron_dapo" / mutant.file).read_bytes() + repr(mutant).encode()
    name = mutant.name if mutant else "without a mutant: " + " ".join(tests)
    return f"{name} [{hashlib.sha256(content).hexdigest()[:12]}]"


class Copy:
    """A copy of the checkout in which a line may be changed. The process that has it has loaded what all tests import, and
    runs each in a fork of itself; ``shared`` lies beside the copy as it does beside the checkout."""

    def __init__(self, folder: Path) -> None:
        self.root, self.output = folder / "checkout", folder / "output"
        self.root.mkdir(parents=True)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.is_file():
                shutil.copy(source, self.root / name)
        if (ROOT.parent / "shared").exists():
            (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
        os.environ |= {
            "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder),
        }  # fmt: skip
        tempfile.tempdir = str(folder)
        sys.dont_write_bytecode = True
        sys.path[:] = [
            str(self.root),
            *(p for p in sys.path if p and Path(p).resolve() not in (ROOT, Path(__file__).parent)),
        ]
        os.chdir(self.root)
        self.loaded = self._load()

    def _load(self) -> set[Path]:
        """Import what is dear, under the platform that ``conftest.py`` installs; the package's files that this loaded."""
        import hypothesis
        import pytest  # noqa: F401
        import torch  # noqa: F401

        from megatron_dapo import compat

        compat.install()
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # one example that fails is enough
        hypothesis.settings.register_profile("mutants", phases=phases, database=None)
        hypothesis.settings.load_profile("mutants")
        import megatron.training.training  # noqa: F401

        ours = [m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "megatron_dapo" and m.__file__]
        assert all(Path(file).is_relative_to(self.root) for file in ours), ours
        return {Path(file) for file in ours}

    def tested(self, tests: tuple[str, ...], anew: bool = False) -> tuple[int | None, str]:
        """pytest's exit code (None: it ran out of time) and output; ``anew``: by a process that has loaded nothing."""
        words = ["-o", "addopts=-q", "-x", "-p", "no:cacheprovider", *tests]
        child = os.fork()
        if child == 0:
            os.setsid()
            with open(self.output, "wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            if anew:
                os.execv(sys.executable, [sys.executable, "-m", "pytest", *words])
            import pytest

            code = int(pytest.main(words))
            sys.stdout.flush()
            os._exit(code)
        return _ended(child), self.output.read_text(errors="replace")

    def without(self, tests: tuple[str, ...]) -> str:
        """KILLED where the tests pass on the package as it is, without which a kill says nothing."""
        code, output = self.tested(tests)
        if code == 0 and re.search(r"\d+ passed", output):
            return KILLED
        return f"{BROKEN}: without it the tests do not pass or are skipped: {_last_lines(output)}"

    def mutated(self, mutant: Mutant) -> str:
        """What became of a mutant."""
        path = self.root / "megatron_dapo" / mutant.file
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            code, output = self.tested(mutant.tests, anew=path in self.loaded)
        finally:
            path.write_text(source)
        if code in (1, None):
            return KILLED
        return SURVIVED if code == 0 else f"{BROKEN}: pytest ended with {code}: {_last_lines(output)}"


def _ended(child: int) -> int | None:
    """The exit code of ``child``; None where it had to be killed. Nothing of its session is left, whatever happens."""
    deadline, code = time.monotonic() + TIMEOUT_S, None
    try:
        while code is None and time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else None
            time.sleep(0 if done else 0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if code is None:
            os.waitpid(child, 0)
    return code


def _last_lines(output: str) -> str:
    return " | ".join(output.strip().splitlines()[-3:])


Task = tuple[tuple[str, ...], str | None, list[Mutant]]
"""Tests, what they gave without a mutant (None: not known), and the mutants that they must notice."""


def work(folder: Path, tasks: list[Task], taken: Any, answers: Any) -> None:
    """A worker: takes one task after the other, the tests without a mutant first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    copy = Copy(folder)
    while True:
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        if number >= len(tasks):
            return
        tests, plain, mutants = tasks[number]
        if plain is None:
            plain = copy.without(tests)
            answers.send((None, tests, plain))
        for mutant in mutants:
            answers.send((mutant, tests, copy.mutated(mutant) if plain == KILLED else plain))


def run_all(mutants: list[Mutant], results: Results, workers: int) -> None:
    """Try ``mutants``, ``workers`` at a time; the results are in ``results``."""
    forks = multiprocessing.get_context("fork")
    tasks: list[Task] = []
    for tests in dict.fromkeys(m.tests for m in mutants):
        plain = results.known.get(key_of(tests))
        tasks.append((tests, plain if plain == KILLED else None, [m for m in mutants if m.tests == tests]))
    keys = {(m, m.tests): key_of(m.tests, m) for m in mutants} | {(None, m.tests): key_of(m.tests) for m in mutants}
    taken, done = forks.Value("i", 0), 0
    with tempfile.TemporaryDirectory() as folder:
        pipes = [forks.Pipe(duplex=False) for _ in range(workers)]
        processes = [
            forks.Process(target=work, args=(Path(folder, str(n)), tasks, taken, write))
            for n, (_, write) in enumerate(pipes)
        ]
        try:
            for process in processes:
                process.start()
            for _, write in pipes:
                write.close()
            for mutant, tests, result in _answers([read for read, _ in pipes]):
                results.put(keys[mutant, tests], result)
                if mutant:
                    done += 1
                    print(f"{done}/{len(mutants)} {result}: {mutant.name}", flush=True)
        finally:
            for process in processes:
                process.terminate()
                process.join()


def _answers(reads: list[Any]) -> Iterator[tuple[Mutant | None, tuple[str, ...], str]]:
    """What the workers say, until all have ended."""
    while reads:
        for read in multiprocessing.connection.wait(reads):
            try:
                yield read.recv()
            except EOFError:
                reads.remove(read)


def main() -> int:
    """Run what is asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose name holds this")
    parser.add_argument("--limit", type=int, help="at most so many that have no result yet")
    parser.add_argument("--workers", type=int, default=2, help="at a time")
    parser.add_argument("--fresh", action="store_true", help="forget all results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results, table = Results(options.fresh), read_table()
    for mutant in table:  # before anything runs
        mutant.apply((ROOT / "megatron_dapo" / mutant.file).read_text())
    chosen = [m for m in table if not m.equivalent and options.only in m.name]
    fresh = [m for m in chosen if not results.known.get(key_of(m.tests, m))][: options.limit]
    if fresh:
        run_all(fresh, results, options.workers)
    found = {m: results.known.get(key_of(m.tests, m)) for m in chosen}
    bad = {m: result for m, result in found.items() if result not in (KILLED, None)}
    counts = [sum(r == KILLED for r in found.values()), len(bad), sum(r is None for r in found.values())]
    equivalent = sum(bool(m.equivalent) for m in table)
    print("{} killed, {} not, {} not tried".format(*counts) + f"; {equivalent} are equivalent")
    for mutant, result in bad.items():
        print(f"  {result}: {mutant.name}  ({' '.join(mutant.tests)})")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
