"""Seconds of a whole step, side by side with TRL's GRPOTrainer (``loss_type="dapo"``): above 1, ours is faster.

    bash tools/setup_env.sh benchmark                  # adds trl to .venv
    python benchmarks/against_trl.py [--runs 3] [--steps 12] [--only "29M equal"]

Four cases: a model of 0.3M and one of 29M parameters, with responses of ragged lengths (random weights: each token ends the
response with a probability of about 1/32, at most 128 tokens: as ragged as DAPO's, whose mean is a fifth of the limit) and of one
length. Same weights, prompts, reward, updates, optimizer; fp32; a learning rate of 1e-9, so
that lengths stay. The two programs alternate, each in its fastest way on this machine: TRL as one process with all cores as
threads, ours as --processes. The first three steps of a run are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pairs import spread

ROOT = Path(__file__).parents[1]
SKIPPED = 3
SHAPES = {
    "0.3M": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    "29M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 9, "num_attention_heads": 8},
}
CHARACTERS = "0123456789+-*/=(). abcde"
MAX_RESPONSE = {"ragged": 128, "equal": 64}


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each program per case")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="ours; TRL has as many threads")
    parser.add_argument("--only", default="", help="cases whose name has this part")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megatron_dapo_bench_") as name:
        folder = Path(name)
        write_data(folder / "data.jsonl")
        print("TRL over ours: whole step, generation, training; tokens per response; GiB of ours and TRL's", flush=True)
        for size, shape in SHAPES.items():
            for kind in ("ragged", "equal"):
                if given.only in (name := f"{size} {kind}"):
                    write_policy(folder / name, shape, never_ends=kind == "equal")
                    compare(folder, name, given)


def compare(folder: Path, name: str, given: Any) -> None:
    """Run both in turn and print the ratios of their medians."""
    found: dict[str, list[float]] = {"step": [], "gen": [], "train": []}
    for run in range(given.runs):
        out = folder / f"{name}_{run}".replace(" ", "_")
        ours, theirs = run_ours(folder, name, out, given), run_trl(folder, name, out, given)
        for part, ratios in found.items():
            ratios.append(theirs[part] / ours[part])
    ratios = ", ".join(f"{part} {spread(values)}" for part, values in found.items())
    lengths, memory = (
        f"{ours['length']:.0f} and {theirs['length']:.0f} tokens",
        f"{ours['gib']:.2f} and {theirs['gib']:.2f} GiB",
    )
    last = f"last: {ours['step']:.3f} s of ours ({ours['gen']:.3f} + {ours['train']:.3f}), {theirs['step']:.3f} s"
    print(f"{name}: {ratios}; {lengths}; {memory}; {last}", flush=True)


def run_ours(folder: Path, name: str, out: Path, given: Any) -> dict[str, float]:
    """Median seconds per step and phase of ``megatron_dapo train``."""
    recipe = {
        "hf_checkpoint": folder / name, "tokenizer_model": folder / name, "load": folder / name, "run_dir": out,
        "prompt_data": folder / "data.jsonl", "prompt_template": "none", "reward": "coin:coin", "num_rollout": given.steps,
        "rollout_batch_size": 16, "over_sampling_batch_size": 16, "n_samples_per_prompt": 8, "global_batch_size": 64,
        "num_steps_per_rollout": 2, "rollout_max_prompt_len": 16, "rollout_max_response_len": longest(name),
        "embedded_batch_size": 128, "max_tokens_per_gpu": 8192, "lr": 1e-9, "adam_beta2": 0.99, "lr_warmup_rollouts": 0,
        "overlong_buffer_len": 0, "reward_num_workers": 1, "save_interval": 0,
    }  # fmt: skip
    words = [str(w) for key, value in recipe.items() for w in ("--" + key.replace("_", "-"), value)]
    words += ["--no-dynamic-sampling", "--no-progress"]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={given.processes}",
        "-m",
    ]
    run([*launcher, "megatron_dapo", "train", *words], threads=1, out=out.with_suffix(".ours"))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return medians([
        {
            "step": row["timing_s/step"], "gen": row["timing_s/gen"], "length": row["response_length/mean"],
            "train": row["timing_s/update_actor"] + row["timing_s/old_log_prob"] + row["timing_s/prepare"],
            "gib": row["perf/max_memory_gb"],
        }
        for row in rows
    ])  # fmt: skip


def run_trl(folder: Path, name: str, out: Path, given: Any) -> dict[str, float]:
    """Median seconds per step and phase of TRL."""
    words = ["--model", folder / name, "--data", folder / "data.jsonl", "--out", out.with_suffix(".jsonl")]
    words += ["--steps", given.steps, "--max-response", longest(name)]
    run([sys.executable, ROOT / "benchmarks/trl_side.py", *words], threads=given.processes, out=out.with_suffix(".trl"))
    return medians([json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()])


def longest(name: str) -> int:
    """Most tokens of a response in a case."""
    return MAX_RESPONSE[name.split()[1]]


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of the steps that count."""
    return {name: statistics.median(row[name] for row in rows[SKIPPED:]) for name in rows[0]}


def run(command: list[Any], threads: int, out: Path) -> None:
    """Run a program to its end; what it says goes to a file, and is shown where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    with open(out, "w") as said:
        done = subprocess.run([str(word) for word in command], stdout=said, stderr=said, env=environment)
    if done.returncode:
        sys.exit(f"against_trl: {command[:4]} ended with {done.returncode}:\n{out.read_text()[-4000:]}")


def write_data(path: Path) -> None:
    """Short sums."""
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(30) for b in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_policy(folder: Path, shape: dict[str, int], never_ends: bool) -> None:
    """A Qwen2 of random weights with a tokenizer of single characters. One that ``never_ends`` has a hidden channel that is
    always positive, and an end token whose logit falls with it."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocab = {"<pad>": 0, "<|endoftext|>": 1, **{c: i + 2 for i, c in enumerate(dict.fromkeys(CHARACTERS))}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<pad>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32, num_key_value_heads=shape["num_attention_heads"] // 2, max_position_embeddings=256,
        tie_word_embeddings=False, eos_token_id=1, pad_token_id=0, bos_token_id=None, dtype="float32", **shape,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    if never_ends:
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 1.0
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
            model.lm_head.weight[1, 0] = -100.0
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
