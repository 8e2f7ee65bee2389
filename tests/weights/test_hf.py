"""Hugging Face checkpoints in and out of every parallel layout: bit-exact round trips, and the same logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_helper import run_ranks
from hf_models import MODELS, save_model
from safetensors.torch import load_file, save_file
from tiny_trainer import STEP
from tolerances import assert_same_logprobs

from megatron_dapo.rollout.embedded import EmbeddedEngine
from megatron_dapo.training.arguments import parse
from megatron_dapo.training.batch import build_minibatch
from megatron_dapo.training.setup import build_trainer
from megatron_dapo.types import InputError, Prompt, Request, SamplingParams, Trajectories
from megatron_dapo.weights.gather import save_hf

SHARED = Path(__file__).parents[3] / "shared/data"
LAYOUTS = {
    "one rank": (1, ()),
    "tp4": (4, ("--tensor-model-parallel-size", "4")),
    "tp2": (2, ("--tensor-model-parallel-size", "2")),
    "pp2": (2, ("--pipeline-model-parallel-size", "2")),
    "tp2 pp2": (4, ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2")),
    "ep2": (2, ("--expert-model-parallel-size", "2")),
    "pp2 vpp2": (
        2,
        ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    ),
}


def trainer_of(folder: Path, checkpoint: Path, *flags: str) -> Any:
    words = [
        word
        for key, value in STEP.items()
        if key != "vocab_size"
        for word in ("--" + key.replace("_", "-"), str(value))
    ]
    run = ("--run-dir", str(folder / "run"), "--save-interval", "0", "--make-vocab-size-divisible-by", "16")
    return build_trainer(*parse([*words, *run, "--hf-checkpoint", str(checkpoint), *flags]))


def sequences(vocab: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, n) for n in (24, 9, 17)]


def logprobs(trainer: Any, vocab: int) -> list[torch.Tensor]:
    """Of every token after the first of each sequence; on the last pipeline stage, else nothing."""
    found = []
    for tokens in sequences(vocab):
        n = len(tokens)
        rows = Trajectories(
            tokens=[tokens] * 2,
            prompt_lengths=np.array([1, 1]),
            rollout_logprobs=[np.zeros(n - 1, np.float32)] * 2,
            loss_mask=[np.ones(n - 1, bool)] * 2,
            advantages=np.zeros(2),
            rewards=np.zeros(2),
            acc=np.zeros(2),
            group=np.array([0, 0]),
            weight_version=np.zeros(2, np.int64),
        )
        batch = build_minibatch(rows, trainer.options, trainer.layout)
        trainer.fill_old_logprobs([batch, batch])
        if batch.microbatches[0].old_logprobs is not None:
            found.append(batch.microbatches[0].old_logprobs[: n - 1])
    return found


def expected_logprobs(model: Any, vocab: int) -> list[torch.Tensor]:
    found = []
    for tokens in map(torch.from_numpy, sequences(vocab)):
        with torch.no_grad():
            logp = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        found.append(logp.gather(1, tokens[1:, None])[:, 0])
    return found


def loaded_by_transformers(folders: list[Path], vocab: int) -> list[list[torch.Tensor]]:
    """Log-probs of checkpoints as ``AutoModelForCausalLM.from_pretrained`` has them. In a process of its own: where
    torch.cuda is answered by the CPU, transformers leaves buffers it makes on the meta device unset."""
    code = f"""
import sys, torch
from transformers import AutoModelForCausalLM
from test_hf import expected_logprobs
torch.save([expected_logprobs(AutoModelForCausalLM.from_pretrained(f).eval(), {vocab}) for f in sys.argv[2:]], sys.argv[1])
"""
    answer = folders[0].parent / "answer.pt"
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parent, here.parents[1])))
    command = [sys.executable, "-W", "ignore", "-c", code, str(answer), *map(str, folders)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(answer)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def round_trip(folder: Path, checkpoint: Path, ranks: int, flags: tuple[str, ...], vocab: int) -> list[torch.Tensor]:
    def work() -> list[torch.Tensor]:
        trainer = trainer_of(folder, checkpoint, *flags)
        save_hf(trainer.model, str(checkpoint), str(folder / "out"))
        return logprobs(trainer, vocab)

    return next(found for found in run_ranks(work, ranks) if found)


def cases() -> list[Any]:
    chosen = []
    for name in MODELS:
        layouts = ["one rank", "tp2 pp2", "ep2"] if "moe" in name else ["one rank", "tp2 pp2"]
        layouts += {"qwen2": ["tp2", "pp2"], "llama": ["tp4"], "qwen2 tied": ["pp2", "pp2 vpp2"]}.get(name, [])
        chosen += [pytest.param(name, layout, id=f"{name}, {layout}") for layout in layouts]
    return chosen


@pytest.mark.parametrize(("name", "layout"), cases())
def test_in_and_out_is_bit_exact_and_the_logits_are_transformers(tmp_path, name, layout):
    model = save_model(tmp_path / "hf", name, **({"num_key_value_heads": 4} if layout == "tp4" else {}))
    ranks, flags = LAYOUTS[layout]
    ours = round_trip(tmp_path, tmp_path / "hf", ranks, flags, vocab=101)
    for got, want in zip(ours, expected_logprobs(model, 101), strict=True):
        assert_same_logprobs(model.config.num_hidden_layers, got, want)
    before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_transformers_loads_an_export_of_every_family(tmp_path):
    folders = []
    for number, name in enumerate(MODELS):
        save_model(tmp_path / f"hf{number}", name)
        round_trip(tmp_path, tmp_path / f"hf{number}", *LAYOUTS["one rank"], vocab=101)
        (tmp_path / "out").rename(tmp_path / f"out{number}")
        folders += [tmp_path / f"hf{number}", tmp_path / f"out{number}"]
    found = loaded_by_transformers(folders, 101)
    for before, after in zip(found[::2], found[1::2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["stories260K", "babyllama_tok105"])
@pytest.mark.parametrize("layout", ["one rank", "tp2"])  # five layers do not divide over two stages
def test_real_models_make_the_round_trip(tmp_path, name, layout):
    checkpoint = SHARED / "models" / name
    if not checkpoint.is_dir():
        pytest.skip("the small real models do not lie beside this checkout")
    ours = round_trip(tmp_path, checkpoint, *LAYOUTS[layout], vocab=105)
    for got, want in zip(ours, loaded_by_transformers([tmp_path / "out"], 105)[0], strict=True):
        assert_same_logprobs(5, got, want)
    before, after = tensors(checkpoint), tensors(tmp_path / "out")
    assert all(torch.equal(after[key], before[key]) for key in after) and set(before) - set(after) <= {"lm_head.weight"}


def test_more_tensor_parallel_ranks_than_key_value_heads_are_refused(tmp_path):
    save_model(tmp_path / "hf", "llama")

    def work() -> None:
        with pytest.raises(
            InputError, match=r"--tensor-model-parallel-size 4 does not divide .* \(key-value heads\) 2"
        ):
            trainer_of(tmp_path, tmp_path / "hf", *LAYOUTS["tp4"][1])

    run_ranks(work, 4)


def test_a_real_model_writes_the_same_story(tmp_path):
    """Greedy, 40 tokens, by the embedded engine on Megatron's weights and by transformers."""
    checkpoint = SHARED / "models/stories260K"
    if not checkpoint.is_dir():
        pytest.skip("the small real models do not lie beside this checkout")
    prompt = [1, 403, 407, 261, 378]

    def work() -> list[int]:
        trainer = trainer_of(tmp_path, checkpoint)
        engine = EmbeddedEngine(trainer.model, trainer.inference, lambda ids: "", 512)
        request = Request(Prompt("story", "", tuple(prompt), "", ""), seed=0)
        (sample,) = engine.generate([request], SamplingParams(40, temperature=0.0))
        return sample.token_ids.tolist()

    code = f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(checkpoint)!r})
out = model.generate(torch.tensor([{prompt}]), do_sample=False, max_new_tokens=40, min_new_tokens=40)
print(out[0, {len(prompt)}:].tolist())
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert run_ranks(work, 1)[0] == json.loads(done.stdout)


def broken(folder: Path, kind: str) -> None:
    """Make a good checkpoint a bad one."""
    file = folder / "model.safetensors"
    state = load_file(file)
    name = "model.layers.1.self_attn.k_proj.weight"
    if kind == "missing tensor":
        del state[name]
    elif kind == "nan":
        state[name][0, 0] = torch.nan
    elif kind == "another shape":
        state[name] = state[name][:-1].clone()
    elif kind == "integers":
        state[name] = state[name].to(torch.int8)
    save_file(state, file, metadata={"format": "pt"})
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "missing shard":
        file.unlink()
        save_file({}, folder / "model-00002-of-00002.safetensors")
        where = dict.fromkeys(state, "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    elif kind == "no config":
        (folder / "config.json").unlink()
    elif kind in ("quantised", "unknown"):
        raw = json.loads((folder / "config.json").read_text())
        raw |= {"quantization_config": {"bits": 4}} if kind == "quantised" else {"architectures": ["MambaForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing tensor", "k_proj.weight is missing"),
        ("nan", "k_proj.weight holds NaN"),
        ("another shape", "is \\[15, 32\\], config.json makes it \\[16, 32\\]"),
        ("integers", "int8"),
        ("truncated", "not a whole safetensors file"),
        ("missing shard", "shard model-00001-of-00002.safetensors is missing"),
        ("no config", "no config.json there"),
        ("quantised", "a quantised checkpoint"),
        ("unknown", "MambaForCausalLM is not mapped; known are .*Qwen2ForCausalLM"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_named(tmp_path, kind, words):
    save_model(tmp_path / "hf", "qwen2")
    broken(tmp_path / "hf", kind)

    def work() -> str:
        with pytest.raises(InputError, match=words) as caught:
            trainer_of(tmp_path, tmp_path / "hf")
        return str(caught.value)

    assert "\n" not in run_ranks(work, 1)[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--num-layers", "6"), "--num-layers 6 contradicts .*config.json, which says 4"),
        (("--rotary-base", "5"), "--rotary-base 5 contradicts"),
    ],
)
def test_a_flag_that_contradicts_the_config_is_refused(tmp_path, flags, words):
    save_model(tmp_path / "hf", "qwen2")
    with pytest.raises(InputError, match=words):
        parse(["--hf-checkpoint", str(tmp_path / "hf"), *flags])


def test_an_export_that_fails_leaves_nothing_that_loads(tmp_path, monkeypatch):
    save_model(tmp_path / "hf", "qwen2")

    def work() -> None:
        trainer = trainer_of(tmp_path, tmp_path / "hf")
        monkeypatch.setattr("megatron_dapo.weights.gather.write_index", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_hf(trainer.model, str(tmp_path / "hf"), str(tmp_path / "out"))

    run_ranks(work, 1)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.unfinished").exists()
