from __future__ import annotations

import sys
from pathlib import Path

import pytest
from reward_plugins import same_length, scripted

from megatron_dapo.config import RewardOptions
from megatron_dapo.rewards import REWARDS, reward_for
from megatron_dapo.rewards.registry import RewardResult, judge, module_of
from megatron_dapo.types import InputError, Prompt


def prompt(source: str) -> Prompt:
    return Prompt("p0", "q", (1,), "x", source)


def test_auto_follows_the_data_source() -> None:
    auto = RewardOptions()
    assert reward_for(prompt("test_same_length"), auto) == "test_same_length"
    assert reward_for(prompt("reasoning_gym/countdown"), auto) == "reasoning_gym"
    assert reward_for(prompt("math_dapo"), auto) == "math"
    assert reward_for(prompt("reasoning_gym/countdown"), RewardOptions(reward="math")) == "math"


def test_a_misspelt_reward_names_the_nearest() -> None:
    with pytest.raises(InputError, match="'reasoning_gym'") as raised:
        REWARDS["reasoning-gim"]
    assert "reasoning-gim" in str(raised.value) and "\n" not in str(raised.value)


def test_registered_and_imported_rewards() -> None:
    assert REWARDS["test_same_length"] is same_length
    assert module_of("test_same_length") == "reward_plugins"
    assert REWARDS["reward_plugins:scripted"] is scripted
    assert module_of("reward_plugins:scripted") == "reward_plugins"
    assert module_of("math") == "megatron_dapo.rewards.math"


def test_a_plug_in_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_reward.py").write_text("raise RuntimeError('two\\nlines')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, why in (
        ("no_such_package.rewards:f", "no_such_package"),
        ("broken_reward:f", "RuntimeError: two lines"),
        ("reward_plugins:no_such", "has no function 'no_such'"),
        ("reward_plugins:os", "has no function 'os'"),
    ):
        with pytest.raises(InputError, match=why) as raised:
            REWARDS[name]
        assert name in str(raised.value) and "\n" not in str(raised.value)
    assert "broken_reward" not in sys.modules


def test_the_same_name_twice_is_refused() -> None:
    from megatron_dapo.rewards import register_reward

    with pytest.raises(AssertionError, match="twice"):
        register_reward("math")(scripted)


def test_what_a_reward_raises_is_an_error_not_a_wrong_answer() -> None:
    result = judge("reward_plugins:scripted", "raise", "x", {}, RewardOptions())
    assert result == RewardResult(-1.0, 0.0, "ZeroDivisionError: verifier bug", "error")


@pytest.mark.parametrize(
    ("name", "why"), [("not_a_verdict", "float"), ("not_finite", "finite"), ("scripted", "mend it")]
)
def test_input_errors_pass(name: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        judge(f"reward_plugins:{name}", "input_error", "x", {}, RewardOptions())


def test_predictions_can_be_written_whatever_the_reward() -> None:
    result = judge("reward_plugins:scripted", "half a pair: \ud83d", "x", {}, RewardOptions())
    assert result.prediction == "half a pair: ?"
