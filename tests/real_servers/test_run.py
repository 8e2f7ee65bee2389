"""The whole loop with real servers: it learns what it learns with the embedded engine, and generates beside training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from served import ENVIRONMENT, LAYERS, served, train, write_served_task
from tolerances import CONTROL, logprob_bound

from megatron_dapo.config import RewardOptions
from megatron_dapo.rewards import RewardResult
from megatron_dapo.rollout.replay import load_rollouts
from megatron_dapo.tracking import row_of

STEPS = 8
LEARNS = {
    "num_rollout": STEPS,
    "reward": "test_run:begins_with_a_digit",
    "lr": 1e-2,
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 8,
    "global_batch_size": 32,
    "rollout_max_response_len": 4,
    "overlong_buffer_len": 0,
    "save_interval": 0,
    "dump_rollouts": True,
}
ROUNDING = logprob_bound(LAYERS, [4.0])
"""Of a mean log-prob: ids that are as likely as each other have log 1/25."""
TP2_PP2 = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")


def begins_with_a_digit(response: str, answer: str, extra: dict[str, Any], options: RewardOptions) -> RewardResult:
    """A third of an untrained policy's responses do."""
    return RewardResult.of(response[:1] in "0123456789" and response != "", response[:1])


def rows(recipe: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (recipe.parent / "run/metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def plugin(monkeypatch):
    """Makes ``test_run:begins_with_a_digit`` importable in the run."""
    import served

    here = Path(__file__).parent
    path = f"{served.ENVIRONMENT['PYTHONPATH']}:{here}:{here.parent}"
    monkeypatch.setitem(served.ENVIRONMENT, "PYTHONPATH", path)


def test_reward_rises_as_with_the_embedded_engine(tmp_path, checkpoint, servers, plugin):
    """Two servers, trainer at TP 2 x PP 2, against one rank that generates by itself, from the same policy."""
    ours = write_served_task(tmp_path / "served", checkpoint, servers, **LEARNS)
    train(ours, *TP2_PP2, ranks=4, timeout_s=500)
    other = write_served_task(tmp_path / "embedded", checkpoint, None, **{**LEARNS, "rollout_engine": "embedded"})
    train(other)
    curves = [[row["sampling/acc"] for row in rows(recipe)] for recipe in (ours, other)]
    for curve in curves:
        assert len(curve) == STEPS and curve[0] < 0.65 and curve[-1] > curve[0] + 0.25, curves
    assert abs(curves[0][0] - curves[1][0]) < 0.25, curves  # one policy, other random numbers
    for step, row in enumerate(rows(ours)):
        assert row["mismatch/logprob_abs_diff"] <= ROUNDING and row["rollout/staleness/max"] == 0
        assert row["rollout/lost"] == row["rollout/retries"] == row["rollout/rerouted"] == row["rollout/resumed"] == 0
        assert 0 <= row["rollout/cached_tokens"] <= 1 and "mismatch/probe/max" in row
        assert [name for name in row if row_of(name) is None] == ["step", "time"]
        samples = [sample for group in load_rollouts(ours.parent / "run/rollouts", step) for sample in group.samples]
        assert {sample.weight_version for sample in samples} == {step}


@pytest.mark.parametrize(("mode", "stale"), [("one_step_off", 1), ("async", 2)])
def test_generation_beside_training(tmp_path, checkpoint, servers, plugin, mode, stale):
    """Staleness stays within its bound, is corrected by importance weights, and a resume loses no prompt."""
    few = {**LEARNS, "num_rollout": 4, "save_interval": 2, "rollout_mode": mode, "dynamic_sampling": False}
    recipe = write_served_task(tmp_path, checkpoint, servers, **few)
    train(recipe)
    found = rows(recipe)
    assert found[0]["rollout/staleness/max"] == 0
    for step, row in enumerate(found):  # how far ahead generation gets within the bound is the machine's affair
        assert 0 <= row["rollout/staleness/mean"] <= row["rollout/staleness/max"] <= min(stale, step)
        samples = [s for group in load_rollouts(recipe.parent / "run/rollouts", step) for s in group.samples]
        assert row["rollout/staleness/max"] == step - min(sample.weight_version for sample in samples)
        assert "mismatch/tis_clipfrac" in row
    assert 'rollout_correction = "tis"' in (tmp_path / "run/recipe.toml").read_text()
    before = orders(recipe)
    (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").write_text("2")
    train(recipe)  # from step 2: what was generated ahead of the checkpoint is generated again, from the same prompts
    assert orders(recipe) == before and len(rows(recipe)) == 4


def orders(recipe: Path) -> list[list[tuple[int, str]]]:
    """Serial number and prompt of every group of every step."""
    steps = [load_rollouts(recipe.parent / "run/rollouts", step) for step in range(4)]
    return [[(group.order, group.prompt.uid) for group in groups] for groups in steps]


def test_an_export_is_served_and_agrees_with_the_samples_of_its_step(tmp_path, checkpoint, servers, plugin):
    """What --save-hf-interval wrote after a step is the model that generated the next: SGLang loads it, and a server that
    reads the samples, as well as transformers, gives them the log-probs that they were written with."""
    few = {**LEARNS, "num_rollout": 2, "save_hf_interval": 1, "dynamic_sampling": False}
    recipe = write_served_task(tmp_path, checkpoint, servers, **few)
    train(recipe)
    export = tmp_path / "run/hf/step_000001"
    with served(tmp_path / "serve", export, 1) as urls:
        flags = ["--step", "1", "--url", urls[0]]
        said = compare(tmp_path / "run", *flags, "--hf", str(export))
        first = compare(tmp_path / "run", "--step", "0", "--hf", str(export))  # other weights than wrote them
    found = [float(line.split("largest ")[1].split()[0]) for line in said.splitlines()[1:]]
    samples = [s for group in load_rollouts(tmp_path / "run/rollouts", 1) for s in group.samples]
    bound = logprob_bound(LAYERS, [float(x) for sample in samples for x in sample.logprobs])
    assert len(found) == 2 and max(found) <= bound, said
    assert float(first.split("largest ")[1].split()[0]) >= CONTROL * bound, first


def compare(*words: Any) -> str:
    tool = Path(__file__).parents[2] / "tools/compare_logprobs.py"
    done = subprocess.run([sys.executable, tool, *words], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_colocated_servers_give_their_memory_back_while_the_trainer_works(tmp_path, checkpoint, plugin):
    """Weights by disk, memory released after every step and taken back for the next publication; an evaluation in between
    costs another publication. The servers are the run's own here."""
    few = {
        **LEARNS, "num_rollout": 2, "colocate": True, "weight_transport": "disk", "sglang_skip_tokenizer_init": True,
        "server_start_timeout_s": 240.0, "eval_interval": 1, "n_samples_per_eval_prompt": 2,
        "eval_prompt_data": [str(tmp_path / "problems.jsonl")],
    }  # fmt: skip
    recipe = write_served_task(tmp_path, checkpoint, None, **few)
    train(recipe, "--sglang-log-level", "info", timeout_s=500)
    assert all(row["mismatch/logprob_abs_diff"] <= ROUNDING for row in rows(recipe))
    log = (tmp_path / "run/logs/sglang_0.log").read_text()
    released, resumed = log.count("POST /release_memory_occupation"), log.count("POST /resume_memory_occupation")
    assert released == 4 and resumed >= 3 and log.count("POST /update_weights_from_disk") >= 4
    assert not list((tmp_path / "run/weights").iterdir())
