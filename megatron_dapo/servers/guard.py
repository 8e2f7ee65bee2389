"""Runs a server and takes it, with all its children and its temporary files, along when the process that asked for it is
gone, however that died.

python guard.py COMMAND ...        # standard input is a pipe that the parent holds open
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

GRACE_S = 1.0
"""Seconds between asking a server to stop and killing it."""


def main(command: list[str]) -> int:
    """Run ``command`` in a process group of its own until it ends or standard input does; its exit status."""
    with tempfile.TemporaryDirectory(prefix="server_", ignore_cleanup_errors=True) as folder:
        return _run(command, folder)


def _run(command: list[str], folder: str) -> int:
    """A server that is killed leaves the sockets of its processes behind, so ``folder`` is its temporary directory. Compiled
    kernels stay where they are: the next server has a use for them."""
    kernels = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    environment = {"TORCHINDUCTOR_CACHE_DIR": kernels, **os.environ, "TMPDIR": folder}
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: stopping.set())
    threading.Thread(target=_wait_for_parent, args=(stopping,), daemon=True).start()
    threading.Thread(target=_stop, args=(child, stopping), daemon=True).start()
    status = child.wait()
    _signal(child.pid, signal.SIGKILL)  # what a crashed server left behind
    return status


def _wait_for_parent(gone: threading.Event) -> None:
    """The pipe on standard input ends when its other end is closed, by the parent or by the kernel for it."""
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    gone.set()


def _stop(child: subprocess.Popen[bytes], stopping: threading.Event) -> None:
    stopping.wait()
    _signal(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.05)
    _signal(child.pid, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
