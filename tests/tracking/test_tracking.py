"""What a run leaves behind: metrics.jsonl across resumes, W&B, TensorBoard, console line, alarms, clock."""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

import megatron_dapo
from megatron_dapo.config import Options, TrackingOptions
from megatron_dapo.tracking import (
    METRICS,
    Clock,
    RolloutProgress,
    Tracker,
    alarms,
    average,
    check_places,
    console_line,
    row_of,
    unknown_metrics,
)
from megatron_dapo.tracking.reporter import Reporter
from megatron_dapo.types import InputError

PARTS = "critic|actor|prompt_length|response_length|reward|sampling|mismatch|text|timing_s|perf"
METRIC_LITERAL = re.compile(rf"(?:{PARTS})/\w+(?:/\w+)*")

DOCUMENTED = """
critic/score/mean critic/rewards/mean response_length/mean response_length/max response_length/clip_ratio
actor/pg_loss actor/entropy actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/grad_norm actor/lr
timing_s/step timing_s/gen timing_s/reward timing_s/old_log_prob timing_s/update_actor timing_s/update_weights
timing_s/save_checkpoint timing_s/testing perf/throughput perf/mfu perf/max_memory_gb
val-core/aime-2024/acc/mean@32 val-core/HuggingFaceH4/aime_2024/acc/mean@32 val-core/all/acc/maj@8
"""


def tracker(run_dir: Path, *, enabled: bool = True, options: TrackingOptions | None = None, **given) -> Tracker:
    return Tracker(run_dir, options or TrackingOptions(), enabled=enabled, **given)


def lines(run_dir: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def steps(run_dir: Path, name: str = "metrics.jsonl") -> list[int]:
    return [line["step"] for line in lines(run_dir, name)]


def test_documented_metrics_are_in_the_table():
    assert unknown_metrics(DOCUMENTED.split()) == []
    assert all(row.unit and row.meaning for row in METRICS.values())


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("timing_s/reward", "timing_s/reward"),
        ("timing_s/gen", "timing_s/<part>"),
        ("val-core/a/b/acc/mean@32", "val-core/<source>/acc/mean@<k>"),
        ("val-core/a/b/acc/mean@x", None),
        ("perf", None),
    ],
)
def test_the_row_of_a_metric(name, row):
    assert row_of(name) == row


def test_seconds_of_the_reward_are_those_of_all_waves(tmp_path):
    given = {"wandb_project": None, "wandb_entity": None, "wandb_exp_name": None, "tensorboard_dir": None}
    args = Namespace(world_size=1, run_dir=str(tmp_path), resolved={}, **given)
    reporter = Reporter(args, Options.from_args(), 0)
    reporter.step(1, {"reward/seconds": (3.0, 2.0)}, {"timing_s/step": 10.0}, 50, 1.0, mfu=0.4)
    reporter.step(2, {}, {"timing_s/step": 10.0}, 50, 1.0)
    first, second = lines(tmp_path)
    assert first["reward/seconds"] == 1.5 and first["timing_s/reward"] == 3.0 and first["perf/mfu"] == 0.4
    assert "timing_s/reward" not in second and "perf/mfu" not in second


def test_a_metric_without_a_row_is_found():
    wrong = ["actor/entropi", "val-core/aime/acc/mean@", "critic/score", "xcritic/score/mean", "step"]
    assert unknown_metrics([*wrong, "actor/entropy"]) == sorted(wrong)


def test_every_metric_written_down_in_the_package_is_in_the_table():
    found: dict[str, str] = {}
    for path in Path(megatron_dapo.__file__).parent.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        found |= {text: path.name for text in texts if METRIC_LITERAL.fullmatch(text)}
    assert {"actor/grad_norm", "sampling/keep_rate", "response_length/clip_ratio"} <= found.keys()
    stems = {name.rpartition("/")[0] for name in METRICS}  # "critic/score", that /mean and /max are added to
    assert {name: found[name] for name in unknown_metrics(found.keys() - stems)} == {}


def test_sums_are_divided_once_and_the_uncounted_left_out():
    sums = {"sampling/acc": (3.0, 8.0), "response_length/max": (9.0, 1.0), "actor/entropy": (0.0, 0.0)}
    assert average(sums) == {"sampling/acc": 0.375, "response_length/max": 9.0}


class Time:
    """A clock's time, moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_clock_counts_parts_and_what_is_left():
    time = Time()
    clock = Clock(time)
    time.now += 50  # before the first part: building the model is no step's time
    for part, seconds in [("gen", 4.0), ("update_actor", 2.0), ("gen", 1.0)]:
        with clock(part):
            time.now += seconds
        time.now += 0.5
    lap = clock.lap()
    assert lap == {
        "timing_s/gen": 5.0,
        "timing_s/update_actor": 2.0,
        "timing_s/other": 1.5,
        "timing_s/step": 8.5,
    }
    time.now += 3
    assert clock.lap() == {"timing_s/other": 3.0, "timing_s/step": 3.0}


def test_clock_counts_a_part_that_fails_and_goes_on():
    time = Time()
    clock = Clock(time)
    with pytest.raises(KeyError), clock("gen"):
        time.now += 2
        raise KeyError
    with clock("gen"):
        time.now += 1
    assert clock.lap()["timing_s/gen"] == 3.0


def test_clock_refuses_nested_parts():
    clock = Clock()
    with pytest.raises(AssertionError, match="do not nest"), clock("gen"), clock("reward"):
        pass


def test_metrics_are_json_lines_with_null_for_what_is_not_finite(tmp_path):
    log = tracker(tmp_path / "run")
    log.log(1, {"actor/grad_norm": float("nan"), "actor/lr": 1e-6, "perf/throughput": float("inf")})
    assert "NaN" not in (tmp_path / "run/metrics.jsonl").read_text()
    (line,) = lines(tmp_path / "run")
    assert line.pop("time") > 1.7e9
    assert line == {"step": 1, "actor/grad_norm": None, "actor/lr": 1e-6, "perf/throughput": None}


def test_other_ranks_leave_nothing(tmp_path):
    options = TrackingOptions(wandb_mode="offline")
    silent = tracker(tmp_path / "run", enabled=False, options=options, tensorboard_dir=str(tmp_path / "tb"))
    silent.truncate_after(0)
    silent.log(1, {"actor/lr": 1.0})
    silent.close()
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_has_every_step_once_and_nothing_is_lost(tmp_path):
    first = tracker(tmp_path)
    for step in range(1, 6):
        first.log(step, {"sampling/acc": 0.1 * step})
    first.close()
    before = (tmp_path / "metrics.jsonl").read_text()
    for resumed_at, bak in [(3, "metrics.jsonl.bak-1"), (2, "metrics.jsonl.bak-2")]:
        again = tracker(tmp_path)
        again.truncate_after(resumed_at)
        assert steps(tmp_path) == list(range(1, resumed_at + 1))
        again.log(resumed_at + 1, {"sampling/acc": 0.9})
        assert steps(tmp_path, bak) == list(range(resumed_at + 1, {3: 6, 2: 5}[resumed_at]))
    assert [line["sampling/acc"] for line in lines(tmp_path)] == [0.1, 0.2, 0.9]
    kept = "".join(before.splitlines(keepends=True)[3:])
    assert (tmp_path / "metrics.jsonl.bak-1").read_text() == kept


def test_resuming_where_the_file_ends_changes_nothing(tmp_path):
    log = tracker(tmp_path)
    log.truncate_after(4)
    log.log(4, {"sampling/acc": 0.5})
    log.truncate_after(4)
    assert steps(tmp_path) == [4] and [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("tail", ['{"step": 2, "samp', '{"step": 2, "sampling/acc": 0.1}'])
def test_a_half_written_line_is_put_aside(tmp_path, tail):
    log = tracker(tmp_path)
    log.log(1, {"sampling/acc": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)  # the newline is missing, whatever else is there
    log.truncate_after(2)
    log.log(2, {"sampling/acc": 0.6})
    assert [line["sampling/acc"] for line in lines(tmp_path)] == [0.5, 0.6]
    assert (tmp_path / "metrics.jsonl.bak-1").read_text() == tail


def test_a_run_that_starts_over_starts_with_an_empty_file(tmp_path):
    log = tracker(tmp_path)
    for step in (0, 1):
        log.log(step, {"sampling/acc": 0.5})
    log.truncate_after(0)
    log.log(0, {"sampling/acc": 0.4})
    assert [line["sampling/acc"] for line in lines(tmp_path)] == [0.4]
    assert steps(tmp_path, "metrics.jsonl.bak-1") == [0, 1]


def test_wandb_offline_keeps_its_id_over_a_resume(tmp_path, monkeypatch):
    for proxy in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")  # nothing answers there: offline must not ask
    ids = []
    for step in (1, 2):
        log = tracker(tmp_path, options=TrackingOptions(wandb_mode="offline"), config={"lr": 1e-6})
        log.log(step, {"critic/score/mean": -0.5})
        ids.append((tmp_path / "wandb_id").read_text().strip())
        log.close()
    assert ids[0] == ids[1]
    runs = [p for p in (tmp_path / "wandb").rglob(f"run-{ids[0]}.wandb") if "latest-run" not in p.parts]
    assert runs
    for run in runs:  # W&B's own process writes them, and may still be at it
        deadline = time.monotonic() + 60
        while not all(name in run.read_bytes() for name in (b"rollout/step", b"critic/score/mean")):
            assert time.monotonic() < deadline, run.read_bytes()
            time.sleep(0.05)
    assert steps(tmp_path) == [1, 2]


def test_wandb_online_without_a_key_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(InputError, match="--wandb-mode online: .*--wandb-mode offline") as refused:
        tracker(tmp_path / "run", options=TrackingOptions(wandb_mode="online"))
    assert "\n" not in str(refused.value)


def test_tensorboard_has_every_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in [(0, 3), (2, 4)]:
        log = tracker(tmp_path / "run", tensorboard_dir=str(tmp_path / "tb"))
        log.truncate_after(first)
        for step in range(first + 1, last + 1):
            log.log(step, {"actor/entropy": 10.0 * first + step})
        log.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/entropy")] == [(1, 1), (2, 2), (3, 23), (4, 24)]


FULL = {
    "sampling/acc": 0.4123,
    "critic/score/mean": -0.1754,
    "response_length/mean": 5312.4,
    "response_length/clip_ratio": 0.0312,
    "actor/entropy": 0.4199,
    "actor/pg_clipfrac": 0.0021,
    "actor/grad_norm": 0.11,
    "sampling/keep_rate": 0.612,
    "sampling/waves": 2.1,
    "timing_s/gen": 411.7,
    "timing_s/update_actor": 260.2,
    "timing_s/update_weights": 9.04,
    "perf/throughput": 1234.2,
}


def test_console_line_in_full():
    assert console_line(12, 500, FULL) == (
        "step 12/500 | acc 0.41 | score -0.18 | len 5312 (clip 3.1%) | H 0.42 | clip 0.21% | gnorm 0.11 | "
        "kept 61% (2.1 batches) | gen 412s train 260s sync 9.0s | 1234 tok/s"
    )


def test_console_line_leaves_out_what_is_absent():
    assert console_line(1, 2, {}) == "step 1/2"
    skipped = {"actor/skipped_nonfinite": 1.0, "actor/skipped_no_tokens": 0.0, "sampling/acc": 0.5}
    assert console_line(1, 2, skipped) == "step 1/2 | acc 0.50 | 100% of the updates SKIPPED (not finite)"
    assert "50% of the updates SKIPPED (no tokens)" in console_line(1, 2, {"actor/skipped_no_tokens": 0.5})
    some = {"sampling/acc": 1.0, "timing_s/update_actor": 0.31}
    assert console_line(1, 2, some) == "step 1/2 | acc 1.00 | train 0.3s"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"actor/entropy": 0.09}, "entropy 0.090 is below 0.1"),
        ({"actor/entropy": 1.51}, "entropy 1.510 is above 1.5"),
        ({"sampling/keep_rate": 0.09}, "keep rate 9.0% is below 1 / 10"),
        ({"actor/entropy": 0.1, "sampling/keep_rate": 0.1}, None),
        ({"actor/entropy": 1.5, "sampling/keep_rate": 1.0}, None),
        ({"actor/entropy": float("nan")}, None),
        ({"reward/no_answer": 0.5}, "50% of the responses have no answer to judge: read the mode's rules"),
        ({"reward/no_answer": 0.49}, None),
        ({"reward/no_answer": 1.0, "sampling/keep_rate": 0.0}, "100% of the responses have no answer"),
        ({"reward/error": 0.08, "reward/timeout": 0.02}, "no verdict on 10% of the samples (8% errors, 2% timeouts)"),
        ({"reward/error": 0.09}, None),
        ({"reward/error": 1.0, "sampling/keep_rate": 0.0}, "no verdict on 100% of the samples"),
        ({"sampling/keep_rate": 0.0, "sampling/all_right": 1.0}, "too easy, or the reward always says right"),
        ({"sampling/keep_rate": 0.0, "sampling/all_wrong": 1.0}, "too hard, or the reward never says right"),
        ({}, None),
    ],
)
def test_alarms_on_one_step(values, words):
    found = alarms([values], max_num_gen_batches=10, entropy_range=(0.1, 1.5), no_answer_hint="read the mode's rules")
    assert len(found) == (words is not None)
    assert all(words in sentence for sentence in found.values())


@pytest.mark.parametrize(("now", "steps_ago", "rings"), [(690, 10, True), (710, 10, False), (690, 9, False)])
def test_alarm_on_responses_that_shrink_within_ten_steps(now, steps_ago, rings):
    """Measured against the one step that lies ten back, not its neighbours."""
    lengths = [1000.0, *[700.0] * (steps_ago - 1), float(now)]
    history = [{"response_length/mean": length} for length in lengths]
    found = alarms(history, max_num_gen_batches=10, entropy_range=(0.1, 1.5))
    assert bool(found) is rings and all("from 1000 to 690" in sentence for sentence in found.values())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("screen", "enabled", "shown"),
    [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)],
)
def test_progress_bar_is_for_terminals(monkeypatch, screen, enabled, shown):
    monkeypatch.setattr(sys, "stderr", screen())
    bar = RolloutProgress("rollout 3", 8, enabled=enabled)
    bar(3, 8, 2)
    bar.close()
    drawn = sys.stderr.getvalue()
    assert ("kept 3/8, 2 batches" in drawn and "rollout 3" in drawn) if shown else drawn == ""


@pytest.mark.parametrize("flag", ["--run-dir", "--tensorboard-dir"])
def test_a_place_that_cannot_be_written_is_refused_before_a_run(tmp_path, flag):
    file = tmp_path / "file"
    file.write_text("")
    run, board = (file, None) if flag == "--run-dir" else (tmp_path / "run", str(file / "below"))
    with pytest.raises(InputError, match=f"{flag} {file}.*name a"):
        check_places(run, "disabled", board)
    check_places(tmp_path / "a/b", "disabled", str(tmp_path / "c/d"))
    assert (tmp_path / "a/b").is_dir() and (tmp_path / "c/d").is_dir()


@pytest.mark.parametrize(("mode", "board", "words"), [("offline", None, "wandb"), ("disabled", "x", "tensorboard")])
def test_a_tracker_that_is_not_installed_is_named(tmp_path, monkeypatch, mode, board, words):
    monkeypatch.setattr("megatron_dapo.tracking.tracker.find_spec", lambda package: None)
    with pytest.raises(InputError, match=f"{words} is not installed"):
        check_places(tmp_path, mode, board and str(tmp_path / board))
