"""Bytes a second of reading a Hugging Face checkpoint into Megatron's model and of writing it out, over a plain copy of it.

Both read and write the page cache, as a copy does; aim: 0.7 of the copy and more. Peak memory beside the model is printed.
The two converters, which hold no model, are processes of their own: their bytes per second from the first tensor to the last
(Megatron's start, some seconds, is not in it, the wait for the disk at the end is), and their memory beyond the imports.

    python benchmarks/conversion.py [--layers 24] [--hidden 1024]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pairs import seconds, spread

ROOT = Path(__file__).parents[1]

CONVERTER = """
import json, sys, time
from importlib import import_module
sys.path.insert(0, "tools")
import conversion.streams as convert_streams
from megatron_dapo.weights import gather
taken = []

def timed(work):
    def wrapped(*args):
        start = time.perf_counter()
        work(*args)
        taken.append(time.perf_counter() - start)
    return wrapped

def peak():  # of this process alone; getrusage begins with what the process had that started it
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

convert_streams.StreamedSave.save = timed(convert_streams.StreamedSave.save)
gather.write_hf = timed(gather.write_hf)
before = peak()
assert import_module(sys.argv[1]).main(sys.argv[2:]) == 0
print(json.dumps([taken[0], peak() - before]))
"""


def write_checkpoint(folder: Path, layers: int, hidden: int) -> None:
    """Random bf16 weights of Qwen2's architecture in shards of at most 500 MB."""
    import torch
    from safetensors.torch import save_file

    from megatron_dapo.weights.mapping import read_config, rules

    raw = {
        "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": layers, "hidden_size": hidden, "torch_dtype": "bfloat16",
        "intermediate_size": 4 * hidden, "num_attention_heads": hidden // 64, "num_key_value_heads": 4,
        "vocab_size": 32_000, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
        "model_type": "qwen2", "hidden_act": "silu", "max_position_embeddings": 4096,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    where: dict[str, str] = {}
    waiting: dict[str, torch.Tensor] = {}
    tensors = [pair for _, rule in rules(read_config(raw, "")) for pair in zip(rule.hf, rule.shapes, strict=True)]
    for number, (name, shape) in enumerate(tensors, 1):
        waiting[name] = torch.randn(shape, dtype=torch.bfloat16)
        if number == len(tensors) or sum(t.numel() for t in waiting.values()) > 250_000_000:
            file = f"model-{len(where):05d}.safetensors"
            save_file(waiting, folder / file)
            where |= dict.fromkeys(waiting, file)
            waiting = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def converter(tool: str, *words: object) -> tuple[float, float]:
    """Seconds from the first tensor to the last, and GiB beyond the imports."""
    command = [sys.executable, "-c", CONVERTER, tool, "--bf16", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    taken, kib = json.loads(done.stdout.splitlines()[-1])
    return taken, kib / 2**20


def remove(folder: Path, *names: str) -> None:
    """Take away what was written before: every writer begins without it, and the disk need not keep up."""
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)


def compare_converters(folder: Path, copy: Callable[[], None], pairs: int) -> None:
    """Print the converters' ratios and peaks."""
    rows = []
    for _ in range(pairs):
        remove(folder, "copy", "megatron", "back")
        flags = ("--hf-checkpoint", folder / "hf")
        copied = seconds(copy)
        there = converter("convert_hf_to_megatron", *flags, "--save", folder / "megatron")
        back = converter("convert_megatron_to_hf", *flags, "--load", folder / "megatron", "--out", folder / "back")
        rows.append((copied, there, back))
    for column, title in ((1, "Hugging Face -> Megatron"), (2, "Megatron -> Hugging Face")):
        ratios, peaks = [row[0] / row[column][0] for row in rows], [row[column][1] for row in rows]
        print(f"converter {title}, bytes/s over the copy's: {spread(ratios)}; peak memory {max(peaks):.2f} GiB")


def main() -> None:
    """Print the ratios and the peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="megatron_dapo_bench_"))
    write_checkpoint(folder / "hf", given.layers, given.hidden)
    size = sum(p.stat().st_size for p in (folder / "hf").iterdir())

    def copy() -> None:
        shutil.copytree(folder / "hf", folder / "copy")

    copy()
    compare_converters(folder, copy, min(given.pairs, 3))
    remove(folder, "megatron", "back")

    from megatron_dapo import compat

    compat.install()
    from megatron_dapo.training.arguments import parse
    from megatron_dapo.training.setup import build_trainer
    from megatron_dapo.weights.gather import load_hf, save_hf

    words = ["--run-dir", str(folder / "run"), "--bf16", "--hf-checkpoint", str(folder / "hf")]
    args, options = parse(words, "convert")
    args.skip_train = True
    model = build_trainer(args, options).model
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def read() -> None:
        load_hf(model, str(folder / "hf"))

    def write() -> None:
        save_hf(model, str(folder / "hf"), str(folder / "out"))

    read(), write()
    times = []
    for _ in range(given.pairs):
        remove(folder, "copy", "out")
        times.append((seconds(copy), seconds(read), seconds(write)))
    print(f"{size / 2**30:.2f} GiB; a copy takes {spread([c for c, _, _ in times])} s")
    print(f"reading into the model, bytes/s over the copy's: {spread([c / r for c, r, _ in times])}")
    print(f"writing it out, bytes/s over the copy's: {spread([c / w for c, _, w in times])}")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"peak memory {after / 2**20:.2f} GiB, of which {before / 2**20:.2f} GiB from building and first reading the model"
    )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
