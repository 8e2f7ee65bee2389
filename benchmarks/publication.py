"""Bytes a second of publishing weights to a real SGLang server, over a plain broadcast of the same bytes to a process.

A publication includes pausing, gathering, packing, the server's loading and all checks but the probe; aim: 0.8 of the
broadcast and more. One server, one rank, on this machine's CPU.

    python benchmarks/publication.py [--layers 8] [--hidden 1024]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conversion import write_checkpoint
from pairs import seconds, spread

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]


def receive(port: int, sizes: list[int]) -> None:
    """The other end of the plain broadcast: takes the buckets again and again until it is told to end."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2)
    go = torch.zeros(1)
    while True:
        dist.broadcast(go, 0)
        if go.item() == 0:
            return
        for size in sizes:
            dist.broadcast(torch.empty(size, dtype=torch.uint8), 0)
        dist.barrier()


def time_broadcast(flats: list[torch.Tensor], repeats: int) -> list[float]:
    """Seconds that two processes take for the same buckets, a new tensor for each as the server has it."""
    from megatron_dapo.servers.fleet import free_port

    port = free_port()
    other = mp.get_context("spawn").Process(target=receive, args=(port, [flat.numel() for flat in flats]))
    other.start()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)

    def send() -> None:
        dist.broadcast(torch.ones(1), 0)
        for flat in flats:
            dist.broadcast(flat, 0)
        dist.barrier()

    send()
    times = [seconds(send) for _ in range(repeats)]
    dist.broadcast(torch.zeros(1), 0)
    other.join()
    dist.destroy_process_group()
    return times


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="megatron_dapo_bench_"))
    write_checkpoint(folder / "hf", given.layers, given.hidden)
    from served import served

    with served(folder / "serve", folder / "hf", 1, "--bf16") as urls:
        measure(folder, urls, given)
    shutil.rmtree(folder)


def measure(folder: Path, urls: list[str], given: Any) -> None:
    """Buckets of the model once for the broadcast, then publications."""
    from megatron_dapo import compat

    compat.install()
    from megatron_dapo.servers.buckets import buckets
    from megatron_dapo.servers.engine import SglangEngine
    from megatron_dapo.training.arguments import parse
    from megatron_dapo.training.probe import policy_of
    from megatron_dapo.training.setup import build_trainer, shut_down

    words = ["--run-dir", str(folder / "run"), "--bf16", "--hf-checkpoint", str(folder / "hf"), "--no-weight-probe"]
    words += ["--allow-longer-context"]
    words += ["--rollout-engine", "sglang", "--rollout-server-urls", *urls, "--weight-bucket-mb", str(given.bucket_mb)]
    args, options = parse(words)
    args.skip_train = True
    trainer = build_trainer(args, options)
    engine = SglangEngine(args, options, policy_of(trainer), lambda ids: "", lambda text: None)
    engine.publish(0)
    before = engine.publisher.sent_bytes
    publications = [seconds(lambda: engine.publish(1)) for _ in range(given.repeats)]
    size = (engine.publisher.sent_bytes - before) // given.repeats
    with trainer.inference():
        flats = [bucket.flat.clone() for bucket in buckets(engine.publisher.weights.tensors(), given.bucket_mb * 2**20)]
    engine.close()
    shut_down()
    plain = time_broadcast(flats, given.repeats)
    rates = [size / 2**30 / spent for spent in publications]
    print(f"{size / 2**30:.2f} GiB in {len(flats)} buckets; a publication moves {spread(rates)} GiB/s")
    print(f"over a plain broadcast: {spread([p / q for p, q in zip(plain, publications, strict=True)])}")


if __name__ == "__main__":
    main()
