"""Evaluation: estimators against brute force, reports as they are read."""

from __future__ import annotations

import json
from itertools import combinations
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.config import Options, RewardOptions
from megatron_dapo.evaluation import (
    EvalReport,
    ProblemResult,
    evaluate,
    majority_acc,
    mean_and_se,
    metrics,
    pass_at_k,
    summarise,
    write_report,
)
from megatron_dapo.rewards.pool import RewardPool
from megatron_dapo.rollout.engine import request_seed
from megatron_dapo.tracking import unknown_metrics
from megatron_dapo.types import Group, Prompt, Request, Sample, SamplingParams


def result(
    uid: str, acc: list[float], predictions: list[str] | None = None, source: str = "aime", **given
) -> ProblemResult:
    fields = {"lengths": (10,) * len(acc), "truncated": 0, "unscored": 0, **given}
    return ProblemResult(uid, source, tuple(acc), tuple(predictions or ["?"] * len(acc)), **fields)


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_counts_subsets(n):
    for c in range(n + 1):
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(combinations(right, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_is_exact_for_large_n():
    assert pass_at_k(32, 1, 8) == 0.25
    assert pass_at_k(100_000, 1, 10) == 1e-4  # 1 - C(n-1,k)/C(n,k) in floats is off by 1e-13
    assert pass_at_k(4096, 0, 2048) == 0.0 and pass_at_k(4096, 2049, 2048) == 1.0


@given(st.integers(1, 64).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_pass_at_k_rises_with_k_from_the_mean(n_c):
    n, c = n_c
    curve = [pass_at_k(n, c, k) for k in range(1, n + 1)]
    assert curve[0] == c / n and curve == sorted(curve) and curve[-1] == float(c > 0)


def test_standard_error_is_over_problems():
    assert mean_and_se([0.0, 0.5, 1.0]) == (0.5, pytest.approx(0.5 / sqrt(3)))
    assert mean_and_se([0.25]) == (0.25, None)
    means = np.random.default_rng(0).random(30)
    centred = means - means.mean()
    assert mean_and_se(list(means))[1] == pytest.approx(sqrt((centred**2).sum() / 29 / 30))


@pytest.mark.parametrize(
    ("predictions", "acc", "right"),
    [
        (["3", "5", "5"], [0, 1, 1], 1),
        (["3", "5", "3", "5"], [0, 1, 0, 1], 0),  # a tie goes to what was said first
        (["5", "3", "3", "5"], [1, 0, 0, 1], 1),
        (["", "", "", "5"], [0, 0, 0, 1], 1),  # no answer is no vote
        (["", ""], [0, 0], 0),
        (["5"], [1], 1),
    ],
)
def test_majority(predictions, acc, right):
    assert majority_acc(acc, predictions) == right


def test_summary_by_hand():
    report = summarise(
        [
            result("a", [1, 0, 0, 0], ["7", "3", "3", "4"], lengths=(10, 20, 30, 40), truncated=1),
            result("b", [1, 1, 0, 1], ["2", "2", "9", "2"], lengths=(5, 5, 5, 5)),
            result("c", [0, 0, 0, 0], ["1", "1", "1", "1"], source="gsm8k", lengths=(2, 2, 2, 2)),
        ],
        k=4,
    )
    assert list(report.rows) == ["aime", "gsm8k", "all"]
    aime = report.by_source["aime"]
    assert (aime.problems, aime.mean, aime.se) == (2, 0.5, pytest.approx(0.25))  # std of .25, .75 / sqrt 2
    assert aime.pass_at == {1: 0.5, 2: (1 / 2 + 1) / 2, 4: 1.0}
    assert (aime.maj, aime.truncated, aime.mean_length) == (0.5, 1 / 8, 15.0)
    assert report.by_source["gsm8k"].se is None
    assert report.overall.mean == pytest.approx(1 / 3) and report.overall.maj == pytest.approx(1 / 3)


def test_partial_credit_counts_in_the_mean_and_not_in_pass():
    scores = summarise([result("a", [0.5, 0.5])], k=2).overall
    assert scores.mean == 0.5 and scores.pass_at == {1: 0.0, 2: 0.0}


def test_pass_sizes_are_the_powers_of_two_up_to_k():
    assert list(summarise([result("a", [1.0] * 12)], k=12).overall.pass_at) == [1, 2, 4, 8]


def sample(text: str, **fields) -> Sample:
    known = {"finish_reason": "stop", "status": "ok", **fields}
    return Sample(np.arange(len(text)), np.zeros(len(text)), weight_version=0, text=text, **known)


def test_samples_without_a_verdict_are_not_wrong():
    prompt = Prompt("p", "", (1,), "7", "aime")
    group = Group(
        prompt,
        [
            sample("aa", acc=1.0, prediction="7"),
            sample("bb", acc=0.0, status="timeout"),
            sample("cccc", acc=0.0, finish_reason="length", status="no_answer"),
            sample("", acc=0.0, finish_reason="abort"),
        ],
        0,
    )
    lost = Group(Prompt("q", "", (1,), "7", "aime"), [sample("d", acc=0.0, status="error")] * 4, 1)
    found = [ProblemResult.of(g) for g in (group, lost)]
    assert (found[0].acc, found[0].unscored, found[0].truncated) == ((1.0, 0.0), 2, 1)
    scores = summarise(found, k=4).overall
    assert (scores.problems, scores.mean, scores.unscored) == (1, 0.5, 6 / 8)
    assert scores.pass_at == {1: 0.5, 2: 1.0}  # two verdicts say nothing on pass@4
    nothing = summarise(found[1:], k=4)
    assert nothing.overall.mean is None and "without a verdict" in nothing.headline()
    assert metrics(nothing)["val-core/aime/unscored"] == 1.0 and "val-core/aime/acc/mean@4" not in metrics(nothing)


class Guesser:
    """An engine whose whole policy is a coin by the request's seed: the right answer or one above it."""

    weight_version = 3

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def generate(self, requests: list[Request], params: SamplingParams, on_finish=None) -> list[Sample]:
        self.seeds += [r.seed for r in requests]
        assert params.top_p == 0.7
        return [sample(f"So Answer: {int(r.prompt.answer) + r.seed % 2}") for r in requests]

    def publish(self, version: int) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def evaluated() -> tuple[EvalReport, Guesser]:
    prompts = [Prompt(f"row-{i}", "", (1,), str(10 * i), ["aime", "gsm8k"][i % 2]) for i in range(5)]
    options = Options.from_args(n_samples_per_eval_prompt=8, reward_num_workers=0, reward="math")
    engine = Guesser()
    with RewardPool(RewardOptions(reward="math", reward_num_workers=0)) as pool:
        report = evaluate(engine, prompts, options, options.eval_sampling(()), pool.score, seed=5)
    return report, engine


def test_evaluate_samples_every_problem_k_times_by_seed(evaluated):
    report, engine = evaluated
    assert engine.seeds == [request_seed(5, i, j) for i in range(5) for j in range(8)]
    assert len(set(engine.seeds)) == 40
    coins = 1 - np.array(engine.seeds).reshape(5, 8) % 2
    assert [r.acc for r in report.results] == [tuple(map(float, row)) for row in coins]
    assert report.overall.mean == coins.mean() and 0 < coins.mean() < 1
    assert report.results[1].predictions[0] in ("10", "11")


def test_metrics_are_known_and_named_as_documented(evaluated):
    report, _ = evaluated
    values = metrics(report)
    assert unknown_metrics(values) == []
    assert {
        f"val-core/{s}/acc/{m}" for s in ("aime", "gsm8k", "all") for m in ("mean@8", "se", "pass@8", "maj@8")
    } <= values.keys()
    assert values["val-core/aime/acc/mean@8"] == report.by_source["aime"].mean
    assert values["val-core/aime/response_length/clip_ratio"] == 0.0


def test_one_source_has_no_overall_row_and_one_problem_no_error():
    values = metrics(summarise([result("a", [1.0, 0.0], source="x")], k=2))
    assert {name.split("/")[1] for name in values} == {"x"} and "val-core/x/acc/se" not in values


def test_headline():
    two = [result("a", [1, 0], ["1", "2"]), result("b", [0, 0], ["1", "1"], lengths=(30, 10), truncated=1)]
    line = "aime acc 25.0% ± 25.0 (mean@2, 2 problems), pass@2 50.0%, maj@2 50.0%, len 15 (clip 25.0%)"
    assert summarise(two, k=2).headline() == line
    assert summarise([result("a", [1])], k=1).headline() == "aime acc 100.0% (mean@1, 1 problems), len 10 (clip 0.0%)"


def test_reports_on_disk(evaluated, tmp_path):
    report, _ = evaluated
    for _ in range(2):  # a resumed run writes the same step again
        folder = write_report(report, tmp_path, 12)
    assert folder == tmp_path / "eval/step_000012"
    assert sorted(p.name for p in folder.iterdir()) == ["report.json", "report.md"]
    content = json.loads((folder / "report.json").read_text())
    assert content["step"] == 12 and content["k"] == 8 and len(content["results"]) == 5
    assert content["overall"]["mean"] == report.overall.mean
    assert content["by_source"]["aime"]["pass_at"]["8"] == report.by_source["aime"].pass_at[8]
    text = (folder / "report.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1 and len(table) == 5
    assert f"| aime | 3 | {100 * report.by_source['aime'].mean:.1f} |" in text
    assert "after 12 rollout steps" in text and "avg@8" in table[0] and "pass@4" in table[0]
