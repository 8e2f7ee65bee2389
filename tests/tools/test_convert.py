"""The two converters from the command line, there and back, and a run that exports what it trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny import write_task

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/weights"))

from hf_models import save_model  # noqa: E402

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def run(*words: object, ok: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=ENVIRONMENT, capture_output=True, text=True, timeout=240, cwd=ROOT
    )
    assert (done.returncode == 0) is ok, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout if ok else done.stderr


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def test_there_and_back_is_bit_exact(tmp_path):
    save_model(tmp_path / "hf", "qwen3 moe")
    hf, megatron, out = tmp_path / "hf", tmp_path / "megatron", tmp_path / "out"
    run("tools/convert_hf_to_megatron.py", "--hf-checkpoint", hf, "--save", megatron)
    parallel = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    flags = ("--expert-model-parallel-size", 2)
    run(*parallel, "tools/convert_megatron_to_hf.py", "--load", megatron, "--hf-checkpoint", hf, "--out", out, *flags)
    before, after = tensors(hf), tensors(out)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys() and len(set(index["weight_map"].values())) == 2
    again = run("tools/convert_hf_to_megatron.py", "--hf-checkpoint", hf, "--save", megatron, ok=False)
    assert "there is a checkpoint already" in again and again.count("\n") == 1


def test_a_run_starts_from_a_hugging_face_folder_and_exports_what_it_trained(tmp_path):
    from megatron_dapo.data.tokenizer import load_tokenizer

    recipe = write_task(tmp_path, num_rollout=1, save_interval=0)
    vocab = load_tokenizer(str(tmp_path / "tokenizer")).vocab_size
    save_model(tmp_path / "hf", "qwen2", vocab_size=vocab)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "hf" / name).write_bytes((tmp_path / "tokenizer" / name).read_bytes())
    kept = (
        "seed",
        "rollout",
        "n_samples",
        "over",
        "global",
        "num_",
        "prompt",
        "reward",
        "max_num",
        "on_",
        "lr",
        "progress",
        "run",
    )
    lines = [line for line in recipe.read_text().splitlines() if line.startswith(kept)]
    recipe.write_text(
        "\n".join(line for line in lines if not line.startswith(("num_layers", "num_att", "num_query"))) + "\n"
    )
    run("-m", "megatron_dapo", "train", recipe, "--hf-checkpoint", tmp_path / "hf", "--save-hf-interval", 1)
    exported = tmp_path / "run/hf/step_000001"
    before, after = tensors(tmp_path / "hf"), tensors(exported)
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    problems = ("--eval-prompt-data", tmp_path / "problems.jsonl", "--n-samples-per-eval-prompt", 1)
    out = run(
        "-m", "megatron_dapo", "eval", recipe, "--hf-checkpoint", exported, "--run-dir", tmp_path / "eval", *problems
    )
    assert "eval after 0 rollouts | default acc" in out and not (tmp_path / "eval/metrics.jsonl").exists()
    assert (exported / "tokenizer.json").is_file() and json.loads((exported / "config.json").read_text())[
        "vocab_size"
    ] == vocab
