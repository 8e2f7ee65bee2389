"""What only a GPU can show, in under 8 minutes on one: run it, keep what it prints in docs/gpu.md.

    python tests/gpu/check_gpu.py                 all sections, each in a process of its own, as JSON lines
    python tests/gpu/check_gpu.py --tiny          the same on this machine's CPU with a tiny model: that the script runs

    layers      Transformer Engine's layers against the portable ones, from one checkpoint: log-probs in fp32 and bf16
    fp8         a step with every FP8 recipe against the same step in bf16: loss and gradient norm
    step        tokens/s and MFU of a packed training step, Qwen2.5 0.5B and 1.5B
    decode      tokens/s of the embedded engine, Qwen2.5 0.5B
    kernels     log-prob and entropy over the vocabulary: ours and the naive way, seconds and peak memory

Prints one JSON object a measurement; a section that cannot run here says why and is no failure.
"""

from __future__ import annotations

import argparse
import atexit
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECTION_SECONDS = {"layers": 100, "fp8": 120, "step": 130, "decode": 70, "kernels": 40}
SHAPES = {
    "0.5B": (24, 896, 4864, 14, 2, 64), "1.5B": (28, 1536, 8960, 12, 2, 128), "tiny": (2, 64, 128, 4, 2, 16),
}  # fmt: skip
"""Layers, hidden, ffn, heads, key-value groups, head size."""


def model_flags(name: str, vocab: int) -> list[str]:
    layers, hidden, ffn, heads, groups, head = SHAPES[name]
    return [
        "--num-layers", str(layers), "--hidden-size", str(hidden), "--ffn-hidden-size", str(ffn),
        "--num-attention-heads", str(heads), "--group-query-attention", "--num-query-groups", str(groups),
        "--kv-channels", str(head), "--vocab-size", str(vocab), "--make-vocab-size-divisible-by", "64",
        "--normalization", "RMSNorm", "--norm-epsilon", "1e-6", "--swiglu", "--disable-bias-linear", "--add-qkv-bias",
        "--position-embedding-type", "rope", "--rotary-base", "1000000",
    ]  # fmt: skip


def trainer_of(name: str, lengths: tuple[int, int], samples: int, *flags: str, vocab: int = 151936) -> Any:
    """A trainer whose optimizer step has ``samples`` responses of at most ``lengths`` (prompt, response) tokens."""
    from megatron_dapo import compat

    compat.install()
    from megatron_dapo.training.arguments import parse
    from megatron_dapo.training.setup import build_trainer

    steps = [
        "--rollout-batch-size", str(samples // 4), "--n-samples-per-prompt", "4", "--global-batch-size", str(samples),
        "--num-steps-per-rollout", "1", "--rollout-max-prompt-len", str(lengths[0]),
        "--rollout-max-response-len", str(lengths[1]), "--overlong-buffer-len", "0", "--lr", "1e-6",
        "--lr-warmup-rollouts", "0", "--run-dir", temporary("dapo_gpu_"), "--save-interval", "0",
    ]  # fmt: skip
    return build_trainer(*parse([*model_flags(name, vocab), *steps, *flags]))


def rows_of(lengths: tuple[int, int], samples: int, vocab: int = 151936) -> Any:
    """Ragged samples between a half and the whole of ``lengths``."""
    import numpy as np

    from megatron_dapo.types import Trajectories

    rng = np.random.default_rng(0)
    prompt, response = (rng.integers(max(1, n // 2), n + 1, samples) for n in lengths)
    return Trajectories(
        tokens=[rng.integers(0, vocab, p + r) for p, r in zip(prompt, response, strict=True)],
        prompt_lengths=prompt,
        rollout_logprobs=[np.full(r, -12.0, np.float32) for r in response],
        loss_mask=[np.ones(r, bool) for r in response],
        advantages=rng.normal(size=samples) + 0.5,
        rewards=np.zeros(samples),
        acc=np.zeros(samples),
        group=np.arange(samples) // 4,
        weight_version=np.zeros(samples, np.int64),
    )


def temporary(prefix: str) -> str:
    """A folder that is gone with this process."""
    folder = tempfile.mkdtemp(prefix=prefix)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def synchronised() -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def median_seconds(work: Callable[[], object], times: int = 5) -> float:
    """Median of ``times`` calls after two for warming up."""
    work(), work()
    taken = []
    for _ in range(times):
        start = synchronised()
        work()
        taken.append(synchronised() - start)
    return sorted(taken)[times // 2]


def loss_and_norm(name: str, lengths: tuple[int, int], samples: int, vocab: int, flags: list[str]) -> dict[str, float]:
    """One step's loss, gradient norm and the mean log-prob of its tokens; in a process of its own."""
    from megatron_dapo.training.batch import build_minibatch

    trainer = trainer_of(name, lengths, samples, *flags, vocab=vocab)
    batch = build_minibatch(rows_of(lengths, samples, vocab), trainer.options, trainer.layout)
    trainer.fill_old_logprobs([batch, batch])
    logprobs = [value for micro in batch for value in micro.old_logprobs.tolist()]
    for micro in batch:
        micro.old_logprobs = None
    metrics, norm = trainer.gradients(batch)
    loss = metrics["actor/entropy"]
    return {"entropy": loss[0] / loss[1], "norm": norm, "logprobs": logprobs}  # type: ignore[dict-item]


def in_process(function: str, *args: Any) -> Any:
    """``function(*args)`` of this file in a fresh process: Megatron's globals are made once per process."""
    code = f"import json, check_gpu; print('RESULT' + json.dumps(check_gpu.{function}(*{args!r})))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT / "tests/gpu", capture_output=True, text=True
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if done.returncode or not found:
        raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
    return json.loads(found[0].removeprefix("RESULT"))


def save_policy(name: str, lengths: tuple[int, int], vocab: int, folder: str) -> None:
    """A checkpoint of random weights that all variants load."""
    from megatron_dapo.training import checkpoint

    trainer = trainer_of(name, lengths, 8, "--save", folder, vocab=vocab)
    checkpoint.save(trainer, 0, None)


def variants(tiny: bool) -> dict[str, list[str]]:
    portable = ["--transformer-impl", "local"]
    if tiny:
        return {"portable fp32": portable, "portable bf16": [*portable, "--bf16"]}
    te = ["--transformer-impl", "transformer_engine"]
    return {
        "portable fp32": portable, "te fp32": te, "portable bf16": [*portable, "--bf16"], "te bf16": [*te, "--bf16"],
    }  # fmt: skip


def layers(tiny: bool) -> None:
    """Log-probs of every implementation against the portable layers in fp32."""
    shape, lengths, vocab = ("tiny", (8, 24), 97) if tiny else ("0.5B", (256, 768), 151936)
    folder = temporary("dapo_gpu_policy_")
    in_process("save_policy", shape, lengths, vocab, folder)
    found = {
        name: in_process("loss_and_norm", shape, lengths, 8, vocab, [*flags, "--load", folder])
        for name, flags in variants(tiny).items()
    }
    base = found["portable fp32"]
    for name, result in found.items():
        gaps = [abs(a - b) for a, b in zip(result["logprobs"], base["logprobs"], strict=True)]
        mean, norm = sum(gaps) / len(gaps), result["norm"] / base["norm"] - 1
        report(section="layers", variant=name, mean_gap=mean, max_gap=max(gaps), norm_relative=norm)
        assert mean < (2e-4 if "fp32" in name else 5e-2), (name, mean)


def fp8(tiny: bool) -> None:
    """Every recipe that this GPU has, against bf16."""
    import torch

    shape, lengths, vocab = ("tiny", (8, 24), 97) if tiny else ("0.5B", (256, 768), 151936)
    folder = temporary("dapo_gpu_policy_")
    in_process("save_policy", shape, lengths, vocab, folder)
    base = variants(tiny)["portable bf16" if tiny else "te bf16"] + ["--load", folder]
    bf16 = in_process("loss_and_norm", shape, lengths, 8, vocab, base)
    blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10
    for recipe in () if tiny else ("delayed", "tensorwise", "blockwise", *(["mxfp8"] if blackwell else [])):
        flags = [*base, "--fp8-format", "hybrid" if recipe == "delayed" else "e4m3", "--fp8-recipe", recipe]
        result = in_process("loss_and_norm", shape, lengths, 8, vocab, flags)
        gap = sum(abs(a - b) for a, b in zip(result["logprobs"], bf16["logprobs"], strict=True)) / len(bf16["logprobs"])
        norm = result["norm"] / bf16["norm"] - 1
        report(section="fp8", recipe=recipe, mean_gap=gap, norm_relative=norm, entropy=result["entropy"])
        assert 0 < gap < 0.5 and abs(norm) < 0.3, f"{recipe}: a gap of exactly 0 means that FP8 was silently off"
    report(section="fp8", recipe="bf16", entropy=bf16["entropy"], norm=bf16["norm"])


def flops_a_token(name: str, length: float, vocab: int) -> float:
    """Training FLOPs a token: 6 a weight in a matrix product, and causal attention over ``length`` tokens."""
    layer, hidden, ffn, heads, groups, head = SHAPES[name]
    weights = layer * hidden * (2 * heads * head + 2 * groups * head + 3 * ffn) + hidden * vocab
    return 6.0 * weights + 6.0 * layer * heads * head * length


def step_speed(name: str, lengths: tuple[int, int], samples: int, vocab: int, flags: list[str]) -> dict[str, float]:
    """Seconds and tokens of an optimizer step."""
    from megatron_dapo.training.batch import build_minibatch

    trainer = trainer_of(name, lengths, samples, *flags, vocab=vocab)
    rows = rows_of(lengths, samples, vocab)
    batch = build_minibatch(rows, trainer.options, trainer.layout)
    seconds = median_seconds(lambda: trainer.update(batch))
    return {"seconds": seconds, "tokens": float(sum(len(t) for t in rows.tokens))}


def step(tiny: bool) -> None:
    """Tokens a second and model FLOPs utilisation of an optimizer step."""
    import torch

    from megatron_dapo.compat import peak_flops

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    peak = peak_flops()
    shapes = ["tiny"] if tiny else ["0.5B", "1.5B"]
    lengths, samples, vocab = ((8, 24), 8, 97) if tiny else ((512, 3584), 32, 151936)
    for name in shapes:
        flags = ["--bf16", *([] if tiny else ["--max-tokens-per-gpu", "16384"])]
        found = in_process("step_speed", name, lengths, samples, vocab, flags)
        rate = found["tokens"] / found["seconds"]
        flops = rate * flops_a_token(name, found["tokens"] / samples, vocab)
        report(
            section="step",
            shape=name,
            tokens_per_s=rate,
            seconds=found["seconds"],
            mfu=peak and flops / peak,
            device=gpu,
        )


def decode(tiny: bool) -> None:
    """Tokens a second of the embedded engine."""
    from megatron_dapo.rollout.embedded import EmbeddedEngine
    from megatron_dapo.types import Prompt, Request, SamplingParams

    name, batch, new, vocab = ("tiny", 8, 16, 97) if tiny else ("0.5B", 256, 256, 151936)
    trainer = trainer_of(name, (32, new), 8, "--bf16", vocab=vocab)
    engine = EmbeddedEngine(trainer.model, trainer.inference, lambda ids: "", vocab, batch)
    requests = [Request(Prompt(str(i), "", tuple(range(2, 34)), "", ""), i) for i in range(batch)]
    seconds = median_seconds(lambda: engine.generate(requests, SamplingParams(new)), times=3)
    report(section="decode", shape=name, batch=batch, tokens_per_s=batch * new / seconds)


def kernels(tiny: bool) -> None:
    """Log-prob and entropy of bf16 logits."""
    import torch

    from megatron_dapo.training.logprobs import logprobs_and_entropy

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, vocab = (64, 97) if tiny else (8192, 151936)
    leaf = torch.randn(tokens, vocab, device=device, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)

    def ours() -> None:
        logp, entropy = logprobs_and_entropy(leaf, targets, 1.0, vocab, None)
        torch.autograd.grad((logp + 0.01 * entropy).sum(), leaf)

    def naive() -> None:
        every = torch.log_softmax(leaf.float(), -1)
        logp, entropy = every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every).sum(-1)
        torch.autograd.grad((logp + 0.01 * entropy).sum(), leaf)

    shard = leaf.numel() * leaf.element_size()
    for name, work in (("ours", ours), ("naive", naive)):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        seconds = median_seconds(work, times=3)
        peak = (torch.cuda.max_memory_allocated() - before) / shard if device == "cuda" else None
        report(section="kernels", way=name, seconds=seconds, peak_logit_shards=peak)
        assert name != "ours" or peak is None or peak <= 1.2, f"{peak} logit shards"


SECTIONS = {"layers": layers, "fp8": fp8, "step": step, "decode": decode, "kernels": kernels}


def run_section(name: str, tiny: bool) -> bool:
    """A section in its own process, within its time; False where it failed."""
    limit = SECTION_SECONDS[name] * (4 if tiny else 1)
    command = [sys.executable, "-W", "ignore", __file__, name, *(["--tiny"] if tiny else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        report(section=name, failed=f"took more than {limit} s")
        return False
    print("".join(line + "\n" for line in done.stdout.splitlines() if line.startswith("{")), end="", flush=True)
    if done.returncode:
        report(section=name, failed=(done.stderr.strip() or "without a word").splitlines()[-1])
    return done.returncode == 0


def main() -> int:
    """All sections, or one in this process; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="?", choices=SECTIONS)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if given.section:
        SECTIONS[given.section](given.tiny)
        return 0
    import torch

    if not given.tiny and not torch.cuda.is_available():
        report(skipped="no GPU here; --tiny runs the script on the CPU")
        return 0
    return int(not all([run_section(name, given.tiny) for name in SECTIONS]))


if __name__ == "__main__":
    sys.exit(main())
