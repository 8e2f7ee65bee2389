"""The main path, end to end on a tiny model: a run, its ladder's rungs, resume after a kill, replay, signals, layouts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tiny import MODEL, write_task
from tolerances import logprob_bound, relative_bound

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
TIMES = ("time", "timing_s/", "perf/", "reward/seconds")


def command(recipe: Path, *flags: str, ranks: int = 1, verb: str = "train") -> list[str]:
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return [*launcher, "megatron_dapo", verb, str(recipe), *flags]


def run(recipe: Path, *flags: str, ranks: int = 1, verb: str = "train") -> str:
    """Run to the end; what it printed."""
    done = subprocess.run(
        command(recipe, *flags, ranks=ranks, verb=verb), env=ENVIRONMENT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def metrics(recipe: Path) -> list[dict[str, Any]]:
    """The run's metrics, one row per step, without what depends on the clock."""
    lines = (recipe.parent / "run/metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(TIMES)} for line in lines]


def weights(recipe: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    from torch.distributed.checkpoint import FileSystemReader, load

    folder = recipe.parent / f"run/checkpoints/iter_{step:07d}"
    listed = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in listed.items() if hasattr(m, "properties")}
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state


SERVED = "SGLang servers"
UNWRITTEN = {
    "actor/kl_loss": "--kl-coef",
    "moe/<name>": "a mixture of experts",
    "mismatch/probe/max": SERVED,
    "rollout/lost": SERVED,
    "rollout/retries": SERVED,
    "rollout/rerouted": SERVED,
    "rollout/resumed": SERVED,
    "rollout/cached_tokens": SERVED,
    "perf/mfu": "a GPU with a known peak",
}
"""What the metrics need that the run below, on a CPU with the embedded engine, does not write."""


def test_a_run_leaves_what_it_should_and_evaluates(tmp_path):
    """It writes each metric that is documented and none that is not."""
    problems = str(tmp_path / "problems.jsonl")
    recipe = write_task(
        tmp_path, eval_prompt_data=[problems], n_samples_per_eval_prompt=2, eval_before_train=True, eval_interval=2,
        dump_rollouts=True, wandb_mode="offline", rollout_correction="tis",
    )  # fmt: skip
    out = run(recipe)
    assert "step 1/2 | acc" in out and "step 2/2 | acc" in out and "eval after 0 rollouts" in out
    folder = tmp_path / "run"
    for name in ("recipe.toml", "env.json", "metrics.jsonl", "rollouts/step_000001.jsonl.gz", "wandb_id"):
        assert (folder / name).is_file(), name
    assert (folder / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"
    rows = metrics(recipe)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (
        rows[1]["mismatch/logprob_abs_diff"] <= logprob_bound(MODEL["num_layers"], [4.0])
        and 0 < rows[1]["text/distinct_2"] <= 1
    )
    assert 0 <= rows[0]["val-core/default/acc/mean@2"] <= 1 and "val-core/default/acc/mean@2" in rows[2]
    report = json.loads(next((folder / "eval").rglob("report.json")).read_text())
    assert report["k"] == 2
    from megatron_dapo.tracking import METRICS, row_of

    written = {key for line in (folder / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
    written -= {"step", "time"}
    assert {name for name in written if row_of(name) is None} == set()
    assert METRICS.keys() - {row_of(name) for name in written} == UNWRITTEN.keys()
    assert all(row["sampling/unknown_ids"] == 0 for row in rows[1:])
    raw = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["timing_s/reward"] <= row["timing_s/gen"] for row in raw[1:])


def test_a_mismatch_beyond_the_limit_stops_the_run_and_loses_nothing(tmp_path):
    """The step that shows it is logged and saved; the rows that pad the vocabulary, sampled here, are counted."""
    recipe = write_task(tmp_path, num_rollout=3, save_interval=100, vocab_size=48)
    done = subprocess.run(
        command(recipe, "--mismatch-stop", "1e-12"), env=ENVIRONMENT, capture_output=True, text=True, timeout=500
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("megatron_dapo: error")]
    assert done.returncode == 2 and len(lines) == 1 and "--mismatch-stop is 1e-12: the step is saved" in lines[0]
    (row,) = metrics(recipe)
    assert row["step"] == 1 and row["mismatch/logprob_abs_diff"] > 1e-12 and "actor/grad_norm" in row
    assert 0 < row["sampling/unknown_ids"] < 1
    assert (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").read_text() == "1"


@pytest.mark.parametrize(
    "flags",
    [
        ["--eps-clip-high", "0.2"],
        ["--no-dynamic-sampling"],
        ["--loss-agg-mode", "seq-mean-token-mean", "--overlong-filtering"],
        ["--policy-loss", "gspo", "--advantage-std", "none", "--entropy-coef", "0.001"],
        ["--old-logprobs", "rollout", "--sampling-budget", "yield_adaptive"],
        ["--rollout-correction", "tis", "--surplus", "keep", "--policy-loss", "cispo"],
    ],
    ids=" ".join,
)
def test_the_rungs_of_the_ladder_are_options(tmp_path, flags):
    recipe = write_task(tmp_path, num_rollout=1, save_interval=100)
    run(recipe, *flags, "--save-interval", "0")
    (row,) = metrics(recipe)
    assert row["actor/grad_norm"] > 0 and row["actor/skipped_nonfinite"] == 0


PLUGINS = """
import zlib
from megatron_dapo.rewards import RewardResult

def coin(response, answer, extra, options):
    return RewardResult.of(zlib.crc32(response.encode()) % 2 == 0, response)

def broken(response, answer, extra, options):
    raise KeyError("no such column")

def never(response, answer, extra, options):
    return RewardResult.of(False, response)

def not_a_number(tokens, options):
    return tokens.logprobs_T * float("nan"), {}
"""


def stopped(recipe: Path, *flags: str, ranks: int = 1) -> tuple[str, str]:
    """A run with PLUGINS that must not end well: its screen, and the one line that says why."""
    (recipe.parent / "plugins_of_test.py").write_text(PLUGINS)
    path = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(recipe.parent)])
    done = subprocess.run(
        command(recipe, *flags, ranks=ranks), env={**ENVIRONMENT, "PYTHONPATH": path}, capture_output=True, text=True, timeout=500
    )  # fmt: skip
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("megatron_dapo: error")]
    assert done.returncode == (2 if ranks == 1 else 1), done.stderr[-4000:]  # torchrun has its own exit code
    return done.stdout, line


def test_a_reward_that_always_raises_stops_the_run_with_its_traceback(tmp_path):
    out, line = stopped(write_task(tmp_path), "--reward", "plugins_of_test:broken")
    assert "32 errors" in line and "KeyError: 'no such column'" in line
    kept = (tmp_path / "run/reward_errors.txt").read_text()
    assert all(t.count("Traceback") == 1 and "plugins_of_test.py" in t for t in (out, kept))
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_loss_that_is_not_finite_stops_all_ranks_and_keeps_the_last_checkpoint(tmp_path):
    """Two skipped updates in the first rollout step, the third in the second one."""
    recipe = write_task(tmp_path, num_rollout=9, save_interval=1)
    flags = ["--reward", "plugins_of_test:coin", "--policy-loss", "plugins_of_test:not_a_number"]
    out, line = stopped(recipe, *flags, ranks=2)
    assert "stopped in rollout step 2: 3 updates in a row" in line and "gradient is not finite" in line
    assert out.count("alarm: an update of rollout step 1 was skipped") == 2 and "100% of the updates SKIPPED" in out
    (row,) = metrics(recipe)
    assert row["actor/skipped_nonfinite"] == 1.0
    assert (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").read_text() == "1"
    assert all(torch.isfinite(t).all() for t in weights(recipe, 1).values() if t.is_floating_point())


@pytest.mark.parametrize("write", ["save", "export"])
def test_weights_that_are_not_finite_are_not_written(monkeypatch, write):
    from megatron_dapo import loop
    from megatron_dapo.types import InputError

    run = object.__new__(loop.Run)
    run.args, run.trainer = Namespace(save="runs/x/checkpoints"), Namespace(weights_are_finite=lambda: False)
    monkeypatch.setattr(loop, "any_rank", lambda flag: flag)
    with pytest.raises(InputError, match="after rollout step 7 the weights hold NaN.*runs/x/checkpoints"):
        getattr(run, write)(7)  # would need a clock and a model for more


def test_a_run_without_a_group_to_train_on_stops(tmp_path):
    recipe = write_task(tmp_path, num_rollout=9, on_exhausted="train_partial", save_interval=0)
    out, line = stopped(recipe, "--reward", "plugins_of_test:never")
    assert "stopped in rollout step 3" in line and "no group has a signal" in line and "--max-skipped-updates" in line
    assert "the first 32 responses all got score -1" in out and "the reward never says right" in out
    assert [row["actor/skipped_no_tokens"] for row in metrics(recipe)] == [1.0, 1.0]


@pytest.mark.parametrize("policy", ["error", "train_partial", "keep_zero_signal", "repeat"])
def test_a_policy_that_is_never_right_ends_as_documented(tmp_path, policy):
    """An untrained model solves nothing: no group has a signal."""
    recipe = write_task(tmp_path, num_rollout=1, save_interval=0, on_exhausted=policy)
    if policy == "error":
        done = subprocess.run(command(recipe), env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
        lines = [line for line in done.stderr.splitlines() if line.startswith("megatron_dapo: error")]
        assert done.returncode == 2 and len(lines) == 1 and "--max-num-gen-batches" in lines[0]
        return
    run(recipe)
    (row,) = metrics(recipe)
    assert row["sampling/keep_rate"] == 0 and row["sampling/waves"] == 2
    assert ("actor/grad_norm" in row) == (policy == "keep_zero_signal")


@pytest.mark.parametrize(("policy", "updates"), [("train_partial", False), ("keep_zero_signal", True)])
def test_gsm8k_rows_and_a_real_tokenizer_go_all_the_way(tmp_path, policy, updates):
    """Plain {question, answer} rows, 152k ids; nothing is right, so the policies decide what is trained on."""
    shared = Path(__file__).parents[2] / "shared/data"
    if not shared.is_dir():
        pytest.skip("the GSM8K files and the Qwen tokenizer do not lie beside this checkout")
    recipe = write_task(
        tmp_path, tokenizer_model=str(shared / "tokenizers/qwen2.5"), prompt_data=[str(shared / "gsm8k/test.jsonl")],
        vocab_size=151936, hidden_size=32, ffn_hidden_size=64,
        prompt_template="dapo", rollout_max_prompt_len=512, rollout_batch_size=4, over_sampling_batch_size=4,
        global_batch_size=8, num_rollout=2, save_interval=0, dump_rollouts=True, on_exhausted=policy,
    )  # fmt: skip
    run(recipe)
    rows = metrics(recipe)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["sampling/waves"] == 2 and row["sampling/generated_groups"] == 8 and row["sampling/acc"] == 0
        assert row["sampling/keep_rate"] == 0 and ("actor/grad_norm" in row) == updates
    from megatron_dapo.rollout.replay import load_rollouts

    groups = [g for step in range(2) for g in load_rollouts(tmp_path / "run/rollouts", step)]
    assert len(groups) == (8 if updates else 0)
    assert all("Solve the following math problem" in g.prompt.text and g.prompt.answer.isdigit() for g in groups)


def test_killed_and_resumed_is_the_uninterrupted_run(tmp_path):
    """Kill -9 after a checkpoint, in the middle of a later step; parameters, optimizer, metrics and prompts are the same."""
    settings = {
        "num_rollout": 5, "save_interval": 1, "dump_rollouts": True, "surplus": "keep", "lr_warmup_rollouts": 4,
        "advantage_mean": "running", "wandb_mode": "offline", "rollout_batch_size": 6, "over_sampling_batch_size": 9,
        "global_batch_size": 12,
    }  # fmt: skip
    whole, broken = write_task(tmp_path / "whole", **settings), write_task(tmp_path / "broken", **settings)
    run(whole)
    own = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}  # who is killed does not clean up
    process = subprocess.Popen(command(broken), env=own, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/5"):
            break
    helpers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert helpers and not psutil.wait_procs(helpers, timeout=500)[1], "a killed run leaves processes behind"
    first_id = (broken.parent / "run/wandb_id").read_text()
    resumed_from = int((broken.parent / "run/checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert 2 <= resumed_from < 5
    run(broken)
    assert (broken.parent / "run/wandb_id").read_text() == first_id
    assert metrics(broken) == metrics(whole)
    for step in range(5):
        name = f"run/rollouts/step_{step:06d}.jsonl.gz"
        from megatron_dapo.rollout.replay import load_rollouts

        one, other = (load_rollouts(recipe.parent / "run/rollouts", step) for recipe in (whole, broken))
        assert [g.prompt.uid for g in one] == [g.prompt.uid for g in other], name
        assert all(
            (a.token_ids == b.token_ids).all()
            for g, h in zip(one, other, strict=True)
            for a, b in zip(g.samples, h.samples, strict=True)
        )
    ours, theirs = weights(whole, 5), weights(broken, 5)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_goes_on_with_other_settings_and_says_so(tmp_path):
    """Another rate, more rollouts, larger groups and batches: the rate of warm-up's steps is that of the new settings."""
    recipe = write_task(
        tmp_path, num_rollout=1, surplus="keep", over_sampling_batch_size=16, lr_warmup_rollouts=4, lr=8e-4
    )
    run(recipe)
    others = ["--num-rollout", "3", "--lr", "1.6e-3", "--n-samples-per-prompt", "8", "--global-batch-size", "32"]
    out = run(recipe, *others)
    assert "resumed after rollout 1/3, with " in out
    said = out.partition("with ")[2].splitlines()[0].split("; ")
    assert sorted(said) == [
        "global_batch_size 16 -> 32", "lr 0.0008 -> 0.0016", "n_samples_per_prompt 4 -> 8", "num_rollout 1 -> 3",
    ]  # fmt: skip
    rows = metrics(recipe)
    assert [row["step"] for row in rows] == [1, 2, 3]
    # two optimizer steps per rollout, warm-up of eight; the metric is their mean
    assert [row["actor/lr"] for row in rows] == pytest.approx([1.5e-4, 7e-4, 1.1e-3])
    assert "nothing is left to do: --num-rollout is 3" in run(recipe, *others)
    assert metrics(recipe) == rows


def test_a_signal_finishes_the_step_saves_and_stops(tmp_path):
    recipe = write_task(tmp_path, num_rollout=10_000, save_interval=10_000)
    process = subprocess.Popen(
        command(recipe), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGTERM)
            break
    rest, _ = process.communicate(timeout=500)
    assert process.returncode == 0 and "finishing this step" in rest
    saved = int((tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert saved == metrics(recipe)[-1]["step"] >= 2


def test_recorded_rollouts_train_the_same(tmp_path):
    first, second = write_task(tmp_path / "a", dump_rollouts=True), write_task(tmp_path / "b")
    run(first)
    run(second, "--load-rollouts", str(tmp_path / "a/run/rollouts"))
    assert all(torch.equal(a, b) for a, b in zip(weights(first, 2).values(), weights(second, 2).values(), strict=True))
    left, right = metrics(first), metrics(second)
    for row, replayed in zip(left, right, strict=True):
        assert replayed.items() <= row.items() and "actor/grad_norm" in replayed and "sampling/acc" not in replayed


def test_rollout_only_never_updates(tmp_path):
    recipe = write_task(tmp_path, num_rollout=1, dump_rollouts=True)
    run(recipe, "--rollout-only")
    (row,) = metrics(recipe)
    assert "actor/grad_norm" not in row and "sampling/acc" in row
    assert not (tmp_path / "run/checkpoints").exists() and (tmp_path / "run/rollouts/step_000000.jsonl.gz").is_file()


def test_evaluations_lie_side_by_side_and_can_be_repeated(tmp_path):
    """Training's own, then two by ``eval``: on other problems, and with the settings and the result of training's."""
    recipe = write_task(
        tmp_path, num_rollout=1, eval_prompt_data=[str(tmp_path / "problems.jsonl")], n_samples_per_eval_prompt=2,
        eval_interval=1,
    )  # fmt: skip
    run(recipe)
    kept = [
        tmp_path / "run" / name for name in ("metrics.jsonl", "recipe.toml", "env.json", "eval/step_000001/report.json")
    ]
    before = [path.read_bytes() for path in kept]
    own = json.loads(before[-1])
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "1+1=", "answer": "2"}\n')
    run(recipe, "--eval-prompt-data", str(other), "--n-samples-per-eval-prompt", "3", verb="eval")
    out = run(recipe, "--eval-name", "again", verb="eval")
    assert [path.read_bytes() for path in kept] == before  # a look at a run changes nothing of it
    assert "iteration 1" in out and "eval after 1 rollouts" in out and str(tmp_path / "run/eval/again") in out
    names = sorted(path.name for path in (tmp_path / "run/eval").iterdir())
    assert (
        len(names) == 3
        and names[0] == "again"
        and names[1].startswith("other-step_000001-")
        and names[2] == "step_000001"
    )
    first, again = (
        json.loads((tmp_path / "run/eval" / name / "report.json").read_text()) for name in (names[1], "again")
    )
    assert (
        first["k"] == 3 and first["setup"]["data"][0]["path"] == str(other) and first["setup"]["problems"]["all"] == 1
    )
    assert again["results"] == own["results"] and again["setup"]["sampling"] == own["setup"]["sampling"]
    assert again["setup"]["checkpoint"] == {"path": str(tmp_path / "run/checkpoints"), "iteration": 1}
    assert own["setup"]["checkpoint"] == {"path": str(tmp_path / "run"), "iteration": 1, "in_training": True}
    assert again["setup"]["command"].endswith("--eval-name again") and (tmp_path / "run/eval/again/report.md").is_file()


@pytest.mark.parametrize(
    "flags",
    [[], ["--tensor-model-parallel-size", "2", "--sequence-parallel"]],
    ids=["data parallel", "tensor parallel"],
)
def test_two_ranks_train_as_one_does(tmp_path, flags):
    """From one checkpoint, on what the two have sampled: the log-probs it was sampled with, losses and gradient norms agree to
    rounding. (The same draws from the same weights are the engine's own test.)"""
    seed_policy = write_task(tmp_path / "seed", num_rollout=1)
    run(seed_policy)
    # Adam divides a gradient by its own size: with a small eps rounding alone would move weights that have no gradient
    settings = {"load": str(tmp_path / "seed/run/checkpoints"), "save_interval": 0, "adam_eps": 1e-4}
    two = write_task(tmp_path / "two", dump_rollouts=True, **settings)
    one = write_task(tmp_path / "one", load_rollouts=str(tmp_path / "two/run/rollouts"), **settings)
    run(two, *flags, ranks=2)
    run(one)
    layers, updates = MODEL["num_layers"], 4
    bound = relative_bound(layers, passes=3 * updates)
    for a, b in zip(metrics(one), metrics(two), strict=True):
        for name in ("critic/rewards/mean", "actor/loss_tokens"):
            assert a[name] == b[name], name
        for name in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
            assert a[name] == pytest.approx(b[name], rel=bound, abs=bound), name
        assert a["mismatch/logprob_abs_diff"] <= logprob_bound(layers, [4.0])
