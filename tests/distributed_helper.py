"""Run a function on several gloo ranks, forked from the test process so that nothing is imported twice.

Example::

    def total(start):
        x = torch.tensor(float(start + dist.get_rank()))
        dist.all_reduce(x)
        return x.item()

    assert run_ranks(total, 2, 10) == [21.0, 21.0]
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

GRACE_S = 3.0
"""Seconds that the other ranks get to end by themselves, and to report, after one has failed."""


class RankError(AssertionError):
    """A rank raised, died or did not end in time; the message names it and carries its traceback."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, deadline_s: float = 800.0) -> list[Any]:
    """``fn(*args)`` on ``world_size`` ranks of one gloo group; what each returned (pickled), in rank order.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set as a launcher would. ``fn`` may be a closure.
    No rank outlives the call, and nothing that it wrote to the temporary directory: a fork ends without its clean-up.

    Raises:
        RankError: on the first rank that raises or dies, or when ``deadline_s`` seconds have passed.
    """
    forks = multiprocessing.get_context("fork")
    folder = tempfile.TemporaryDirectory(prefix="ranks_", ignore_cleanup_errors=True)
    port = forks.Value("i", 0)
    pipes = [forks.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        forks.Process(
            target=_rank,
            args=(fn, args, rank, world_size, port, deadline_s, [write for _, write in pipes], folder.name),
        )
        for rank in range(world_size)
    ]
    patience = 0.0
    try:
        for process in ranks:
            process.start()
        for _, write in pipes:
            write.close()
        results = _collect([read for read, _ in pipes], time.monotonic() + deadline_s)
        patience = GRACE_S
        return results
    finally:
        for process in ranks:
            if process.pid is not None:
                process.join(timeout=patience)
                process.kill()
                process.join()
        folder.cleanup()


def _rank(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: Any,
    deadline_s: float,
    pipes: list[Connection],
    folder: str,
) -> None:
    torch.set_num_threads(1)  # threads of a pool that the test process has used do not live on in a fork
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    out = pipes.pop(rank)
    for others in pipes:  # inherited: held open here, they would hide that another rank has died
        others.close()
    store = None
    try:
        store = _rendezvous(rank, port)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        dist.init_process_group("gloo", timeout=timedelta(seconds=max(deadline_s, GRACE_S * 40)))  # it ends none first
        result = fn(*args)
        dist.barrier()  # no rank may close its connections while another still talks to it
        # Plain pickle: a pipe's own would hand tensors over in shared memory, which ends with the process that owns it.
        answer = pickle.dumps((True, result))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    out.send_bytes(answer)
    out.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    del store


def _rendezvous(rank: int, port: Any) -> dist.TCPStore | None:
    """Rank 0 opens the store on a free port and tells the others. The test process must not: a store runs a thread,
    and to fork beside it hangs a rank now and then."""
    store = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.value = store.port
    while port.value == 0:
        time.sleep(0.002)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port.value), TORCHELASTIC_USE_AGENT_STORE="True")
    return store


def _collect(reads: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = dict(zip(reads, range(len(reads)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for read in ready:
            assert isinstance(read, Connection)
            rank = waiting.pop(read)
            try:
                ok, value = pickle.loads(read.recv_bytes())
            except EOFError:
                ok, value = False, "died without a word"
            (results if ok else failures)[rank] = value
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if not failures and waiting:
        failures = {rank: "had not ended by the deadline" for rank in waiting.values()}
    if failures:
        raise RankError("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
    return [results[rank] for rank in range(len(reads))]
