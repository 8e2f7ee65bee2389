"""The two converters from the command line, there and back: what they write and hold in memory; a run that exports what it
trains."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conversion.common as convert_common
import convert_hf_to_megatron
import convert_megatron_to_hf
import pytest
import torch
from distributed_helper import run_ranks
from hf_models import save_model
from megatron.core import dist_checkpointing
from safetensors.torch import load_file
from tiny import write_task
from torch.distributed.checkpoint import FileSystemReader

from megatron_dapo.training import checkpoint
from megatron_dapo.training.arguments import parse
from megatron_dapo.training.setup import build_trainer
from megatron_dapo.weights import hf_io
from megatron_dapo.weights.gather import save_hf
from megatron_dapo.weights.mapping import read_config, rules

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
MB = 2**20


def run(*words: object, ok: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=ENVIRONMENT, capture_output=True, text=True, timeout=500, cwd=ROOT
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
    assert "After rollout step 1 of recipe recipe.toml." in (exported / "README.md").read_text()
    assert [path.name for path in exported.glob("*.safetensors*")] == ["model.safetensors"]
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


def convert(tool: Callable[[list[str]], int], ranks: int, *words: object, status: int = 0) -> None:
    """Run a converter on several ranks, forked from this process."""

    def work() -> int:
        convert_common.shut_down = lambda: None  # the ranks meet once more behind it
        return tool(list(map(str, words)))

    assert run_ranks(work, ranks) == [status] * ranks


def built(folder: Path, *flags: object) -> Any:
    """A trainer that trains nothing."""
    args, options = parse(["--run-dir", str(folder), *map(str, flags)], purpose="convert")
    args.skip_train = args.no_save_optim = args.no_save_rng = True
    return build_trainer(args, options)


def saved_by_megatron(folder: Path, hf: Path, ranks: int, *flags: str) -> None:
    """The checkpoint as Megatron writes it, of a model that is held in memory."""
    words = ("--hf-checkpoint", hf, "--save", folder, *flags)
    run_ranks(lambda: checkpoint.save(built(folder / "run", *words), 0, None), ranks)


def contents(folder: Path) -> tuple[dict[str, Any], dict[Any, Any], dict[str, Any]]:
    """Of a Megatron checkpoint: its keys with shapes, dtypes and chunks, every tensor, and what is no tensor."""
    path = folder / "iter_0000000"
    metadata = FileSystemReader(path).read_metadata()
    keys, values = {}, {}
    for key, value in metadata.state_dict_metadata.items():
        chunks = sorted((tuple(c.offsets), tuple(c.sizes)) for c in getattr(value, "chunks", ()))
        keys[key] = (chunks, getattr(value, "size", None), getattr(value, "properties", None))
    for index, place in metadata.storage_data.items():
        content = (path / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        values[index.fqn, index.offset] = torch.load(io.BytesIO(content), weights_only=False)
    common = dist_checkpointing.load_common_state_dict(str(path))
    common["args"] = {k: v for k, v in vars(common["args"]).items() if k not in ("save", "run_dir", "resolved")}
    common["files"] = {name: (path / name).read_text() for name in ("metadata.json",)}
    common["planner"], common["version"] = metadata.planner_data, metadata.version
    return keys, values, common


@pytest.mark.parametrize(("name", "ranks"), [("qwen2 tied", 1), ("qwen3 moe", 2), ("llama", 3)])
def test_the_streamed_checkpoint_is_the_one_that_megatron_saves(tmp_path, name, ranks):
    save_model(tmp_path / "hf", name)
    words = ("--hf-checkpoint", tmp_path / "hf", "--save", tmp_path / "ours", "--bf16")
    convert(convert_hf_to_megatron.main, ranks, *words)
    saved_by_megatron(tmp_path / "theirs", tmp_path / "hf", ranks, "--bf16")
    ours, theirs = contents(tmp_path / "ours"), contents(tmp_path / "theirs")
    assert ours[0] == theirs[0] and ours[2] == theirs[2] and ours[1].keys() == theirs[1].keys()
    tensors_of = [{key: t for key, t in found[1].items() if torch.is_tensor(t)} for found in (ours, theirs)]
    assert len(tensors_of[0]) > 20
    assert all(torch.equal(t, tensors_of[1][key]) and t.dtype == torch.bfloat16 for key, t in tensors_of[0].items())
    names = [
        sorted(p.relative_to(tmp_path / w).as_posix() for p in (tmp_path / w).rglob("*")) for w in ("ours", "theirs")
    ]
    assert names[0] == [name for name in names[1] if not name.startswith("run") or name.startswith("rollout_state")]


PARALLEL = {
    "tp2 pp2": (4, ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--pipeline-model-parallel-size", 2)),
    "pp2 vpp2": (2, ("--pipeline-model-parallel-size", 2, "--num-virtual-stages-per-pipeline-rank", 2)),
    "ep2": (2, ("--expert-model-parallel-size", 2)),
    "ep2 pp2": (4, ("--expert-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)),
}


@pytest.mark.parametrize(
    ("name", "layouts"),
    [("qwen2 tied", ["tp2 pp2", "pp2 vpp2"]), ("qwen3", ["tp2 pp2"]), ("qwen3 moe", ["ep2", "ep2 pp2", "pp2 vpp2"])],
)
def test_every_layout_loads_it_and_what_every_layout_saves_comes_back(tmp_path, name, layouts):
    save_model(tmp_path / "hf", name)
    hf, megatron, before = tmp_path / "hf", tmp_path / "megatron", tensors(tmp_path / "hf")
    convert(convert_hf_to_megatron.main, 1, "--hf-checkpoint", hf, "--save", megatron)
    for layout in layouts:
        ranks, flags = PARALLEL[layout]

        def work(folder: Path, flags: tuple[object, ...]) -> None:
            words = ("--hf-checkpoint", hf, "--load", megatron, "--save", folder / "saved", *flags)
            trainer = built(folder / "run", *words)
            save_hf(trainer.model, str(hf), str(folder / "out"))
            checkpoint.save(trainer, 0, None)

        here = tmp_path / layout.replace(" ", "_")
        run_ranks(work, ranks, here, flags)
        words = ("--hf-checkpoint", hf, "--load", here / "saved", "--out", here / "back", *flags)
        convert(convert_megatron_to_hf.main, ranks, *words)
        for folder in ("out", "back"):
            after = tensors(here / folder)
            assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before), layout
            index = json.loads((here / folder / "model.safetensors.index.json").read_text())
            assert index["weight_map"].keys() == before.keys()


def written(folder: Path, state: dict[str, torch.Tensor]) -> int:
    """A checkpoint in shards; how many."""
    writer = hf_io.HfWriter(folder, "x", [(name, value.dtype, tuple(value.shape)) for name, value in state.items()])
    for name, value in state.items():
        writer.add(name, value)
    writer.flush()
    hf_io.write_index(folder, writer.where, writer.total)
    return writer.number


def in_shards(folder: Path, monkeypatch: pytest.MonkeyPatch, tensor: str = "", value: float = 0.0) -> None:
    """Cut a checkpoint of one file into many, one entry of a tensor changed."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if tensor:
        state[tensor].view(-1)[-1] = value
    monkeypatch.setattr(hf_io, "SHARD_BYTES", 20_000)
    names = sorted(state, key=lambda name: name == tensor)  # the changed one is the last
    assert written(folder, {name: state[name] for name in names}) > 3


def test_nan_in_the_last_shard_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    save_model(tmp_path / "hf", "qwen2")
    in_shards(tmp_path / "hf", monkeypatch, "lm_head.weight", torch.nan)
    words = ("--hf-checkpoint", tmp_path / "hf", "--save", tmp_path / "megatron")
    said = run("tools/convert_hf_to_megatron.py", *words, ok=False)
    assert said.count("\n") == 1 and "tensor lm_head.weight holds NaN or infinity" in said
    assert not (tmp_path / "megatron").exists()
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/notes.txt").write_text("mine")
    convert(convert_hf_to_megatron.main, 2, *words, status=2)  # the other rank has found nothing wrong
    assert [p.name for p in (tmp_path / "megatron").iterdir()] == ["notes.txt"]


def damaged(folder: Path, how: str) -> None:
    """Make a good checkpoint one of another shape, or a shorter one."""
    file = folder / "model.safetensors"
    state = load_file(file)
    name = "model.layers.3.mlp.up_proj.weight"
    if how == "missing":
        del state[name]
    else:
        state[name] = state[name][:-1].clone()
    file.unlink()
    written(folder, state)


@pytest.mark.parametrize(
    ("how", "words"), [("missing", "up_proj.weight is missing"), ("shape", "config.json makes it")]
)
def test_a_checkpoint_that_is_not_whole_leaves_nothing(tmp_path, capfd, how, words):
    save_model(tmp_path / "hf", "qwen3")
    damaged(tmp_path / "hf", how)
    save = tmp_path / "megatron"
    capfd.readouterr()
    convert(convert_hf_to_megatron.main, 1, "--hf-checkpoint", tmp_path / "hf", "--save", save, status=2)
    said = capfd.readouterr().err
    assert not save.exists() and words in said and said.count("\n") == 1


def test_a_conversion_that_is_cut_off_does_not_load(tmp_path, monkeypatch):
    """As if the process had been killed between the tensors and what makes a checkpoint of them."""
    save_model(tmp_path / "hf", "qwen2")
    monkeypatch.setattr("conversion.streams.FileSystemWriter.finish", lambda *args: os._exit(9))
    with pytest.raises(AssertionError, match="died without a word"):
        convert(convert_hf_to_megatron.main, 1, "--hf-checkpoint", tmp_path / "hf", "--save", tmp_path / "megatron")
    assert list((tmp_path / "megatron").rglob("*.distcp")) and not checkpoint.has_checkpoint(str(tmp_path / "megatron"))


PEAK = """
import sys
sys.path.insert(0, "tools")
import conversion.streams
from importlib import import_module

def peak():  # of this process alone; getrusage begins with what the process had that started it
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak()
assert import_module(sys.argv[1]).main(sys.argv[2:]) == 0
print(peak() - before)
"""


def test_neither_way_holds_the_model(tmp_path, monkeypatch):
    """Beyond what the imports take: less than two shards and a layer, of a model of many."""
    raw = {
        "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 20, "hidden_size": 1024, "torch_dtype": "bfloat16",
        "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 8000,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    }  # fmt: skip
    hf, megatron, out = tmp_path / "hf", tmp_path / "megatron", tmp_path / "out"
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps(raw))
    monkeypatch.setattr(hf_io, "SHARD_BYTES", 64 * MB)
    made = [pair for _, rule in rules(read_config(raw, "")) for pair in zip(rule.hf, rule.shapes, strict=True)]
    writer = hf_io.HfWriter(hf, "x", [(name, torch.bfloat16, shape) for name, shape in made])
    for name, shape in made:
        writer.add(name, torch.full(shape, 0.5, dtype=torch.bfloat16))
    writer.flush()
    hf_io.write_index(hf, writer.where, writer.total)
    layer = 30 * MB
    assert writer.total > 600 * MB and writer.number >= 10
    flags = ("--hf-checkpoint", hf, "--bf16")
    there = int(run("-c", PEAK, "convert_hf_to_megatron", *flags, "--save", megatron).split()[-1])
    back = int(run("-c", PEAK, "convert_megatron_to_hf", *flags, "--load", megatron, "--out", out).split()[-1])
    assert max(there, back) < 2 * 64 * MB + layer, f"{there / MB:.0f} and {back / MB:.0f} MB"


@pytest.mark.parametrize("tool", [convert_hf_to_megatron, convert_megatron_to_hf], ids=lambda tool: tool.__name__)
def test_a_converter_without_arguments_is_a_mistake(tool, capsys):
    assert tool.main([]) == 2
    out, error = capsys.readouterr()
    assert not out and "--hf-checkpoint" in error
    assert tool.main(["--help"]) == 0 and "--hf-checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tool", "words", "names"),
    [
        (convert_megatron_to_hf, ["--load", "x"], "--out DIR is missing"),
        (convert_megatron_to_hf, ["--load", "x", "--out"], "--out: expected one argument"),
        (
            convert_megatron_to_hf,
            ["--load", "absent", "--out=y", "--vocab-size", "9", "--hf-checkpoint"],
            "--hf-checkpoint",
        ),
        (convert_hf_to_megatron, ["--save", "y", "--tensor-model-parallel-size"], "--tensor-model-parallel-size"),
    ],
)
def test_a_converters_flag_without_a_value(tool, words, names, capsys):
    assert tool.main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and names in lines[0]
