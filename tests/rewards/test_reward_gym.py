from __future__ import annotations

import sys
from typing import Any

import pytest

from megatron_dapo.config import RewardOptions
from megatron_dapo.rewards import gym
from megatron_dapo.rewards.gym import gym_reward
from megatron_dapo.types import InputError

reasoning_gym = pytest.importorskip("reasoning_gym")
OPTIONS = RewardOptions()


def row(task: str, **config: Any) -> dict[str, Any]:
    return {"task": task, "entry": reasoning_gym.create_dataset(task, size=1, seed=7, **config)[0]}


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "spell_backward", "mini_sudoku", "number_sorting"])
def test_the_tasks_own_answer_is_right(task: str) -> None:
    extra = row(task)
    answer = extra["entry"]["answer"]
    for response in (answer, f"Thinking.\nAnswer: {answer}<|im_end|>", f"**Answer:** {answer}\n"):
        result = gym_reward(response, answer, extra, OPTIONS)
        assert (result.score, result.acc, result.prediction, result.status) == (
            1.0,
            1.0,
            answer.strip(),
            "ok",
        )


def test_partial_credit_is_wrong() -> None:
    extra = row("countdown")
    scorer = reasoning_gym.get_score_answer_fn("countdown")
    assert 0.0 < scorer("1 + 1", extra["entry"]) < 1.0
    result = gym_reward("Answer: 1 + 1", "", extra, OPTIONS)
    assert (result.score, result.acc, result.status) == (-1.0, 0.0, "ok")
    assert gym_reward("Answer: ", "", extra, OPTIONS).status == "no_answer"


def test_only_the_last_answer_is_scored() -> None:
    extra = row("chain_sum")
    answer = extra["entry"]["answer"]
    assert gym_reward(f"Answer: {answer}\nAnswer: x", answer, extra, OPTIONS).acc == 0.0
    assert gym_reward(f"Answer: x\nAnswer: {answer}", answer, extra, OPTIONS).acc == 1.0


def test_a_scorer_that_raises_is_an_error() -> None:
    extra = row("game_of_life")
    with pytest.raises(KeyError):
        reasoning_gym.get_score_answer_fn("game_of_life")('{"a": 1}', extra["entry"])
    result = gym_reward('Answer: {"a": 1}', "", extra, OPTIONS)
    assert (result.status, result.acc, result.score) == ("error", 0.0, -1.0)
    assert gym_reward("[[1]]", "", extra, OPTIONS).status == "ok"


def test_the_scorer_is_built_once() -> None:
    assert gym._scorer("chain_sum") is gym._scorer("chain_sum")


def test_rows_that_cannot_be_scored() -> None:
    incomplete: list[dict[str, Any]] = [{}, {"task": "chain_sum"}, {"entry": {}}, {"task": 3, "entry": {}}]
    for extra in incomplete:
        with pytest.raises(InputError, match="extra.task"):
            gym_reward("1", "1", extra, OPTIONS)
    with pytest.raises(InputError, match="did you mean 'chain_sum'"):
        gym_reward("1", "1", {"task": "chain_sums", "entry": {}}, OPTIONS)


def test_a_missing_package_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    gym._datasets.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(InputError, match="pip install reasoning-gym"):
        gym._datasets()
