"""Servers as processes: waited for by name, watched, started again, and gone when whoever started them is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from megatron_dapo.config import ServerOptions
from megatron_dapo.distributed.launcher import free_port
from megatron_dapo.servers import guard
from megatron_dapo.servers.fleet import Fleet, Server, server_command, server_environment
from megatron_dapo.types import InputError

STANDS_IN = """
import http.server, subprocess, sys, time
kind, port = sys.argv[1], int(sys.argv[2])
if kind == "dies":
    sys.exit("no room for the KV cache")
if kind == "taken":
    print("[Errno 98] error while attempting to bind on address ('127.0.0.1', 20001): address already in use", file=sys.stderr)
    sys.exit("\\n".join(f"a line of another thread's traceback, {line}" for line in range(90)))
if kind == "sleeps":
    time.sleep(60)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"tp_size": 1, "pids": [%d]}' % child.pid)
    do_POST = do_GET
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def stand_in(folder: Path, kind: str = "serves", number: int = 0) -> Server:
    port = free_port()
    command = [sys.executable, "-c", STANDS_IN, kind, str(port)]
    return Server(f"http://127.0.0.1:{port}", 1, command, folder / f"server_{number}.log")


@pytest.fixture
def fleet_of() -> Iterator[Any]:
    made: list[Fleet] = []

    def make(*servers: Server, **options: Any) -> tuple[Fleet, list[str]]:
        notes: list[str] = []
        quick = {"server_start_timeout_s": 120.0, "server_health_interval_s": 0.2, "server_health_failures": 2}
        made.append(Fleet(ServerOptions(**{**quick, **options}), list(servers), notes.append))
        return made[-1], notes

    yield make
    for fleet in made:
        fleet.close()


def until(holds: Any, seconds: float = 120.0) -> None:
    """Wait for what has to happen; what has not by then never will."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def server_pid(server: Server) -> int:
    """The server itself, under its guard."""
    assert server.process is not None
    return psutil.Process(server.process.pid).children()[0].pid


def test_servers_come_up_stale_and_serve_after_a_publication(tmp_path, fleet_of):
    fleet, _ = fleet_of(stand_in(tmp_path), stand_in(tmp_path, number=1))
    fleet.start()
    assert [s.state for s in fleet.servers] == ["stale", "stale"] and fleet.serving() == []
    fleet.published(fleet.servers[:1])
    assert fleet.serving() == fleet.servers[:1] and len(fleet.healthy()) == 2


def test_a_server_that_ends_before_it_is_up_is_named_with_its_last_words(tmp_path, fleet_of):
    fleet, _ = fleet_of(stand_in(tmp_path), stand_in(tmp_path, "dies", 1))
    with pytest.raises(InputError, match="ended with status 1 before it was up.*no room for the KV cache") as caught:
        fleet.start()
    assert fleet.servers[1].url in str(caught.value) and fleet.servers[0].url not in str(caught.value)


def test_a_taken_port_is_named_whatever_else_the_log_says_after_it(tmp_path, fleet_of):
    """Seen with SGLang: a thread of its start posts to the port's new owner and writes a traceback of 80 lines at last."""
    fleet, _ = fleet_of(stand_in(tmp_path, "taken"))
    with pytest.raises(InputError, match=r"20001.: address already in use \| a line of .* 85 \| .* 89$"):
        fleet.start()


def test_a_server_that_does_not_answer_in_time_is_named(tmp_path, fleet_of):
    fleet, _ = fleet_of(stand_in(tmp_path), stand_in(tmp_path, "sleeps", 1), server_start_timeout_s=1.5)
    with pytest.raises(InputError, match="without an answer after 1.5 s: .*--server-start-timeout-s") as caught:
        fleet.start()
    assert fleet.servers[1].url in str(caught.value) and fleet.servers[0].url not in str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_hangs_is_started_again_and_waits_for_weights(tmp_path, fleet_of, monkeypatch, number):
    monkeypatch.setattr("megatron_dapo.servers.fleet.HEALTH_PATIENCE_S", 0.3)
    fleet, notes = fleet_of(stand_in(tmp_path), stand_in(tmp_path, number=1))
    heard: list[Server] = []
    fleet.on_lost.append(heard.append)
    fleet.start()
    fleet.published(fleet.servers)
    first = fleet.servers[0]
    os.kill(server_pid(first), number)
    until(lambda: heard == [first])
    assert fleet.serving() == [fleet.servers[1]]
    until(lambda: first.state == "stale")
    assert first.life == 1 and "is marked failed" in notes[0] and "up again" in notes[1]
    fleet.published(fleet.servers)
    assert len(fleet.serving()) == 2


def test_an_attached_server_that_comes_back_is_taken_again(tmp_path, fleet_of, monkeypatch):
    monkeypatch.setattr("megatron_dapo.servers.fleet.HEALTH_PATIENCE_S", 0.3)
    owner, _ = fleet_of(stand_in(tmp_path), server_health_interval_s=60.0)
    owner.start()
    fleet, _ = fleet_of(Server(owner.servers[0].url, 1))
    fleet.start()
    fleet.published(fleet.servers)
    os.kill(server_pid(owner.servers[0]), signal.SIGKILL)
    until(lambda: fleet.servers[0].state == "lost")
    owner._kill(owner.servers[0])
    owner._launch(owner.servers[0])
    until(lambda: fleet.servers[0].state == "stale")


def test_a_server_that_is_given_up_again_and_again_is_there_once(tmp_path, fleet_of):
    """By the client and by those who watch it, while it is being started: no process is forgotten, none started beside it."""
    before = set(psutil.Process().children())
    fleet, _ = fleet_of(stand_in(tmp_path), server_health_interval_s=0.01)
    fleet.start()
    server = fleet.servers[0]
    for _ in range(10):
        fleet.published([server])
        threads = [threading.Thread(target=fleet.discard, args=(server, "for this test")) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(0.05)
    until(lambda: server.state == "stale")
    (guarding,) = set(psutil.Process().children()) - before
    assert server.process is not None and guarding.pid == server.process.pid
    assert requests.get(server.url, timeout=60).ok


def test_one_that_hangs_keeps_nobody_from_looking_at_the_others(tmp_path, fleet_of, monkeypatch):
    monkeypatch.setattr("megatron_dapo.servers.fleet.HEALTH_PATIENCE_S", 600.0)
    hung, other = stand_in(tmp_path), stand_in(tmp_path, number=1)
    fleet, _ = fleet_of(hung, other)
    fleet.start()
    fleet.published(fleet.servers)
    os.kill(server_pid(hung), signal.SIGSTOP)
    time.sleep(0.5)  # somebody waits for its answer now
    os.kill(server_pid(other), signal.SIGKILL)
    until(lambda: other.life == 1 and other.state == "stale")
    assert hung.state == "serving"  # patience has not ended yet


def test_no_server_left_is_an_error_with_the_reason_of_each(tmp_path, fleet_of):
    fleet, _ = fleet_of(Server("http://127.0.0.1:9", 1, state="stale"))
    fleet.discard(fleet.servers[0], "it answered garbage")
    with pytest.raises(InputError, match="no SGLang server is left.*it answered garbage"):
        fleet.wait_for_one(0.2)


def test_the_end_of_the_fleet_is_the_end_of_every_process(tmp_path, fleet_of):
    fleet, _ = fleet_of(stand_in(tmp_path))
    fleet.start()
    pids = [server_pid(fleet.servers[0]), *requests.get(fleet.servers[0].url).json()["pids"]]
    fleet.close()
    until(lambda: not any(psutil.pid_exists(pid) and running(pid) for pid in pids))


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_servers_die_with_a_trainer_that_is_killed(tmp_path):
    """kill -9 leaves no one to clean up: the guard's pipe ends with the process that held it."""
    port = free_port()
    code = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, {guard.__file__!r}, sys.executable, "-c", {STANDS_IN!r}, "serves", "{port}"],
                 stdin=subprocess.PIPE, start_new_session=True)
time.sleep(60)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code])
    url = f"http://127.0.0.1:{port}"
    until(lambda: answers(url))
    (child,) = requests.get(url).json()["pids"]
    assert running(child)
    trainer.kill()
    trainer.wait()
    until(lambda: not answers(url) and not running(child))


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=1).ok
    except requests.RequestException:
        return False


def test_the_guard_ends_with_its_servers_status():
    done = subprocess.run([sys.executable, guard.__file__, sys.executable, "-c", "import sys; sys.exit(7)"], input=b"")
    assert done.returncode != 0
    held = subprocess.Popen(
        [sys.executable, guard.__file__, sys.executable, "-c", "import sys; sys.exit(7)"], stdin=subprocess.PIPE
    )
    assert held.wait() == 7


ENDS = ["os.kill(os.getpid(), 9)", "os.kill(os.getppid(), 10)", "sys.exit(0)", "sys.stdin.close() or time.sleep(600)"]


@pytest.mark.parametrize("end", ENDS)
def test_a_servers_temporary_files_go_with_it(tmp_path, end):
    """Killed, told to stop by Slurm, ended, or left by its trainer: SGLang puts half a dozen sockets into that directory."""
    code = f"import os, sys, tempfile, time; tempfile.mkstemp(); open({str(tmp_path / 'made')!r}, 'w').close(); {end}"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    words = [sys.executable, guard.__file__, sys.executable, "-c", code]
    guarding = subprocess.Popen(words, stdin=subprocess.PIPE, env={**os.environ, "TMPDIR": str(temporary)})
    until((tmp_path / "made").exists)
    assert guarding.stdin is not None
    guarding.stdin.close()
    guarding.wait()
    assert list(temporary.iterdir()) == []


def test_the_command_line_of_a_server():
    words = server_command(
        "m", "0.0.0.0", 30010, 1, 2, "bfloat16", {"dtype": "float16", "enable-metrics": None}, seed=5
    )
    flags = dict(zip(words, words[1:], strict=False))
    assert words[1:3] == ["-m", "sglang.launch_server"] and flags["--port"] == "30010" and flags["--tp-size"] == "2"
    assert flags["--dtype"] == "float16" and "--enable-metrics" in words and flags["--random-seed"] == "6"
    assert flags["--device"] == "cpu" and flags["--attention-backend"] == "torch_native"


def test_a_servers_environment_is_not_the_trainers(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MASTER_PORT", "1")
    environment = server_environment(gpus=2)
    assert "RANK" not in environment and "MASTER_PORT" not in environment
    assert environment["SGLANG_PLATFORM"] == "megatron_dapo_cpu"
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
