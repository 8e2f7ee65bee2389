"""SGLang servers: started or attached to, waited for by name, watched, started again, and stopped by process id.

A server gets requests only in the state ``serving``, which publication alone gives it: after a start or a restart it is
``stale``, healthy but with other weights than the trainer's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from megatron_dapo.config import ServerOptions
from megatron_dapo.distributed.launcher import free_port
from megatron_dapo.servers import cpu_platform, guard
from megatron_dapo.servers.control import ServerError, call, call_each
from megatron_dapo.servers.replies import STREAM_INTERVAL
from megatron_dapo.types import InputError

State = Literal["starting", "stale", "serving", "lost"]

CPU_FLAGS = {
    "device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch", "grammar-backend": "none",
    "max-total-tokens": "16384", "disable-overlap-schedule": None, "sleep-on-idle": None,
}  # fmt: skip
"""SGLang's flags on a machine without CUDA. Without a token limit it takes all memory, without sleep half a core."""

HEALTH_PATIENCE_S = 30.0
"""Seconds a health check may take: SGLang itself waits 20 s for its scheduler before it calls itself ill."""

LET_GO_S = 5.0
"""Seconds that a server which was marked failed gets to leave its pause; it is asked again at every health check."""

TRACEBACK_LINES = 200
"""How far from the end of a log the reason of an end is looked for."""

PORT_STRIDE = 10
"""From one started server's port to the next."""


@dataclass
class Server:
    """One server, ours or somebody else's. ``outstanding`` counts the tokens of the requests under way at it."""

    url: str
    gpus: int
    command: list[str] | None = None
    log: Path | None = None
    state: State = "starting"
    process: subprocess.Popen[bytes] | None = None
    outstanding: int = 0
    running: int = 0
    misses: int = 0
    life: int = 0
    why: str = ""
    restarting: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def ours(self) -> bool:
        """True where we started it, and can start it again."""
        return self.command is not None

    def ended(self) -> str:
        """How its process ended; empty while it runs, or where it is not ours."""
        status = self.process.poll() if self.process else None
        return "" if status is None else f"ended with status {status}"

    def last_words(self, lines: int = 5) -> str:
        """The end of its log; before it, what its other threads' tracebacks would hide: that its port was taken."""
        if self.log is None or not self.log.is_file():
            return ""
        written = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        if not written:
            return f"; {self.log} is empty"
        taken = [line for line in written[-TRACEBACK_LINES:-lines] if "already in use" in line]
        return f"; {self.log} ends with: " + " | ".join(taken[-1:] + written[-lines:])


def server_command(
    model: str, host: str, port: int, index: int, gpus: int, dtype: str, extra: dict[str, str | None], seed: int
) -> list[str]:
    """The command line of server ``index``; ``extra`` are SGLang's own flags (None: a switch), which win over ours."""
    flags: dict[str, str | None] = {
        "model-path": model,
        "host": host,
        "port": str(port),
        "tp-size": str(gpus),
        "dtype": dtype,
        "random-seed": str(seed + index),
        "skip-server-warmup": None,
        "incremental-streaming-output": None,  # an event holds what is new, not all from the beginning
        "stream-interval": str(STREAM_INTERVAL),  # sglang-router drops the requests' own
        "log-level": "warning",
    }
    flags |= {"base-gpu-id": str(index * gpus)} if torch.cuda.is_available() else CPU_FLAGS
    flags |= extra
    words = [
        word for name, value in flags.items() for word in ([f"--{name}"] if value is None else [f"--{name}", value])
    ]
    return [sys.executable, "-m", "sglang.launch_server", *words]


def server_environment(gpus: int) -> dict[str, str]:
    """The environment of a server: on a CPU our platform, one thread per rank, a core for each."""
    environment = {**os.environ, "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), "PYTHONUNBUFFERED": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        environment.pop(name, None)  # the trainer's rendezvous is not the server's
    if not torch.cuda.is_available():
        cores = os.cpu_count() or 1
        environment |= {"SGLANG_PLATFORM": cpu_platform.NAME, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if gpus > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % cores) for rank in range(gpus))
    return environment


@dataclass
class Fleet:
    """All servers of a run, on rank 0. ``on_lost`` is called with a server that gets no more requests. While they are
    ``paused``, for a publication, they answer nothing."""

    options: ServerOptions
    servers: list[Server]
    note: Callable[[str], None] = print
    on_lost: list[Callable[[Server], None]] = field(default_factory=list)
    paused: bool = False

    def __post_init__(self) -> None:
        self._guard = threading.RLock()
        self._closing = threading.Event()
        self._watching = threading.Event()
        self._watchers = [threading.Thread(target=self._watch, args=(server,), daemon=True) for server in self.servers]

    @classmethod
    def of(
        cls, options: ServerOptions, model: str, dtype: str, extra: dict[str, str | None], logs: Path, seed: int
    ) -> Fleet:
        """Servers to attach to, or to start for ``model`` (a Hugging Face folder)."""
        gpus = options.rollout_num_gpus_per_engine
        if options.rollout_server_urls:
            return cls(options, [Server(url.rstrip("/"), gpus) for url in options.rollout_server_urls])
        servers = []
        for index in range(options.rollout_num_servers):
            port = options.rollout_server_port + PORT_STRIDE * index if options.rollout_server_port else free_port()
            command = server_command(model, options.rollout_server_host, port, index, gpus, dtype, extra, seed)
            host = "127.0.0.1" if options.rollout_server_host == "0.0.0.0" else options.rollout_server_host
            servers.append(Server(f"http://{host}:{port}", gpus, command, logs / f"sglang_{index}.log"))
        return cls(options, servers)

    def start(self) -> None:
        """Start what is ours and wait for everybody.

        Raises:
            InputError: somebody did not answer within --server-start-timeout-s, or ended; the message names it.
        """
        for server in self.servers:
            if server.ours:
                self._launch(server)
        self.let_go(self.servers)
        self.wait_until_up(self.servers)
        for watcher in self._watchers:
            watcher.start()
        self._watching.set()

    def wait_until_up(self, servers: list[Server]) -> None:
        """Return when every one of ``servers`` answers.

        Raises:
            InputError: one has not by the deadline, or its process has ended.
        """
        deadline = time.monotonic() + self.options.server_start_timeout_s
        missing = list(servers)
        while missing:
            for server in list(missing):
                if self._looks_up(server):
                    missing.remove(server)
                elif ended := server.ended():
                    raise InputError(f"SGLang server {server.url} {ended} before it was up{server.last_words()}")
            if missing and time.monotonic() > deadline:
                names = ", ".join(server.url for server in missing)
                raise InputError(
                    f"SGLang servers without an answer after {self.options.server_start_timeout_s:g} s: {names}; raise "
                    f"--server-start-timeout-s or look at their logs{missing[0].last_words()}"
                )
            time.sleep(0.2)

    def _looks_up(self, server: Server) -> bool:
        """True once it answers; the states starting and lost end there."""
        process = server.process
        if server.state == "lost":
            self.let_go([server])
        try:
            call(server.url, "/health", timeout_s=HEALTH_PATIENCE_S)
            info = call(server.url, "/server_info", timeout_s=HEALTH_PATIENCE_S)
        except ServerError:
            return False
        if isinstance(info, dict):
            server.gpus = int(info.get("tp_size") or server.gpus)
        with self._guard:
            if server.ours and (process is None or process is not server.process):
                return False  # who answered is being ended
            if server.state in ("starting", "lost"):
                server.state, server.misses = "stale", 0
        return True

    def _launch(self, server: Server) -> None:
        assert server.command is not None and server.log is not None
        server.log.parent.mkdir(parents=True, exist_ok=True)
        with open(server.log, "ab") as log:
            server.process = subprocess.Popen(
                [sys.executable, guard.__file__, *server.command],
                stdin=subprocess.PIPE,  # held open by us alone: it ends with us
                stdout=log,
                stderr=log,
                env=server_environment(server.gpus),
                start_new_session=True,
            )
        server.state, server.misses = "starting", 0

    # --- who may be asked ------------------------------------------------------------------------------------------

    def serving(self) -> list[Server]:
        """Servers that hold the current weights."""
        return [server for server in self.servers if server.state == "serving"]

    def healthy(self) -> list[Server]:
        """Servers that weights can be published to."""
        return [server for server in self.servers if server.state in ("serving", "stale")]

    def account(self, server: Server, requests: int, tokens: int) -> None:
        """Requests and tokens more (or fewer) under way at a server."""
        with self._guard:
            server.running += requests
            server.outstanding += tokens

    def mark_stale(self, server: Server, why: str) -> None:
        """It answers, with other weights than the current: no more requests until the next publication."""
        with self._guard:
            if server.state == "serving":
                server.state, server.why = "stale", why
                self.note(f"SGLang server {server.url} {why}: it gets no more requests before the next publication")

    def published(self, servers: list[Server]) -> None:
        """These hold the current weights now; no other does."""
        with self._guard:
            for server in self.servers:
                if server in servers and server.state in ("serving", "stale"):
                    server.state = "serving"
                elif server.state == "serving":
                    server.state = "stale"

    def wait_for_one(self, deadline_s: float | None = None) -> None:
        """Return when a healthy server is there.

        Raises:
            InputError: none is after --server-start-timeout-s.
        """
        deadline = time.monotonic() + (deadline_s or self.options.server_start_timeout_s)
        while not self.healthy():
            if time.monotonic() > deadline:
                reasons = "; ".join(f"{server.url}: {server.why or server.state}" for server in self.servers)
                raise InputError(f"no SGLang server is left, and none came back in time ({reasons})")
            time.sleep(0.1)

    def discard(self, server: Server, why: str) -> None:
        """No more requests for this one. Ours is killed and started again; somebody else's is taken back when it answers."""
        with self._guard:
            if server.state in ("lost", "starting"):
                return
            server.state, server.why, server.life = "lost", why, server.life + 1
        self.note(f"SGLang server {server.url} is marked failed: {why}")
        for callback in self.on_lost:
            callback(server)
        if server.ours:
            threading.Thread(target=self._restart, args=(server,), daemon=True).start()

    def _restart(self, server: Server) -> None:
        """End it and, unless everything ends, start it again."""
        with server.restarting:
            self._kill(server)
            if not self._closing.is_set():
                self._launch(server)

    def let_go(self, servers: list[Server]) -> None:
        """Make those of ``servers`` that are not ours go on after a publication that broke off, ours or a dead trainer's: a
        paused server answers health checks only by chance. Nobody may wait for what they finish with half of the weights."""
        urls = [server.url for server in servers if not server.ours]
        for path in ("/end_weight_update", "/continue_generation"):
            call_each(urls, path, {}, LET_GO_S)

    # --- health ----------------------------------------------------------------------------------------------------

    def watch(self, on: bool) -> None:
        """Look at the servers' health, or not; not while they are paused."""
        self.paused = not on
        (self._watching.set if on else self._watching.clear)()

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """While servers are paused they answer no health check."""
        self.watch(False)
        try:
            yield
        finally:
            self.watch(True)

    def _watch(self, server: Server) -> None:
        """A thread per server: one that hangs keeps nobody from looking at the others."""
        while not self._closing.wait(self.options.server_health_interval_s):
            if self._watching.is_set():
                self._look_at(server)

    def _look_at(self, server: Server) -> None:
        if server.state in ("starting", "lost"):
            if self._looks_up(server):
                self.note(f"SGLang server {server.url} is up again; it gets requests after the next publication")
                return
            with server.restarting:
                if server.ended() and not self._closing.is_set():
                    self._launch(server)
            return
        if ended := server.ended():
            self.discard(server, f"its process {ended}")
            return
        try:
            call(server.url, "/health", timeout_s=HEALTH_PATIENCE_S)
            server.misses = 0
        except ServerError as error:
            server.misses += 1
            if server.misses >= self.options.server_health_failures and self._watching.is_set():
                self.discard(server, f"no answer to {server.misses} health checks ({error})")

    # --- the end ---------------------------------------------------------------------------------------------------

    def _kill(self, server: Server) -> None:
        """Close the pipe its guard waits on; the guard takes the server's whole process group along."""
        with self._guard:
            process, server.process = server.process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(timeout=guard.GRACE_S + 10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Stop the servers that are ours."""
        self._closing.set()
        self._watching.clear()
        stoppers = [threading.Thread(target=self._restart, args=(server,)) for server in self.servers if server.ours]
        for stopper in stoppers:
            stopper.start()
        for stopper in stoppers:
            stopper.join()
