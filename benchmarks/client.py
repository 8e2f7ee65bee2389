"""What the client of SGLang servers costs: requests per second and CPU time per token, against a server that answers at once.

The server is a stand-in in a process of its own, so that only our side is measured. It streams, as servers do.

    python benchmarks/client.py [--requests 2000] [--tokens 1000]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from pairs import spread

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]


def serve(pipe: Connection) -> None:
    """The stand-in; its URL goes into the pipe."""
    from fake_sglang import FakeServer, in_events

    with FakeServer(in_events) as server:
        pipe.send(server.url)
        pipe.recv()


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()

    from megatron_dapo.config import ServerOptions
    from megatron_dapo.servers.client import SglangClient
    from megatron_dapo.servers.fleet import Fleet, Server
    from megatron_dapo.types import Prompt, Request, SamplingParams

    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    process.start()
    fleet = Fleet(ServerOptions(), [Server(ours.recv(), 1, state="stale")])
    fleet.published(fleet.servers)
    client = SglangClient(fleet, fleet.options, lambda ids: "", lambda: 0)
    prompts = [Prompt(str(i), "", tuple(range(1, 200)), "", "") for i in range(given.requests // 16)]
    requests = [Request(prompt, 16 * i + j) for i, prompt in enumerate(prompts) for j in range(16)]

    def cost(tokens: int) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        client.generate(requests, SamplingParams(tokens), lambda: None)
        return time.perf_counter() - wall, time.process_time() - cpu

    cost(8)
    short = [cost(8) for _ in range(given.repeats)]
    long = [cost(given.tokens) for _ in range(given.repeats)]
    n = len(requests)
    print(f"{n} requests of 8 tokens: {spread([n / wall for wall, _ in short])} requests/s")
    tokens = given.tokens * n
    print(f"of {given.tokens} tokens: {spread([1e6 * cpu / tokens for _, cpu in long])} microseconds of CPU a token")
    ours.send(None)
    process.join()


if __name__ == "__main__":
    main()
