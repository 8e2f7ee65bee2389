"""What makes verdicts useless is said at once: faults with their traceback, a first wave without a verdict or all alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_dapo.config import RewardOptions
from megatron_dapo.rewards.watch import FAULTS_FILE, WatchedRewards, form_warning, no_answer_hint
from megatron_dapo.types import Group, InputError, Prompt, Sample

pytestmark = pytest.mark.timeout(60)


def group(texts: Sequence[str], answer: str = "x") -> Group:
    samples = [Sample(np.array([1]), np.array([0.0]), "stop", 0, text) for text in texts]
    return Group(Prompt("p0", "q", (1,), answer, "any"), samples, 0)


def watched(folder: Path, reward: str = "reward_plugins:scripted", **given: object) -> WatchedRewards:
    return WatchedRewards(RewardOptions(reward=reward, reward_num_workers=0, **given), folder)  # type: ignore[arg-type]


def test_the_first_exception_is_printed_once_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = watched(tmp_path / "run")
    for _ in range(3):
        rewards.score([group(["x", "raise", "y", "raise"])])
    out = capsys.readouterr().out
    kept = (tmp_path / "run" / FAULTS_FILE).read_text()
    for text in (out, kept):
        assert text.count("ZeroDivisionError: verifier bug") == 1 and text.count("Traceback") == 1
        assert "reward_plugins.py" in text and "--reward reward_plugins:scripted" in text
    assert str(tmp_path / "run" / FAULTS_FILE) in out
    assert "answer: x" in kept and "raise" in kept.splitlines()[-2]
    watched(tmp_path / "run").score([group(["x", "raise"])])  # a resumed run adds to the file
    assert (tmp_path / "run" / FAULTS_FILE).read_text().count("ZeroDivisionError: verifier bug") == 2


def test_each_kind_of_fault_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = RewardOptions(reward="reward_plugins:scripted", reward_timeout_s=0.5)
    rewards = WatchedRewards(options, tmp_path)
    rewards.score([group(["x", "raise", "spin", "die", "raise", "y"])])
    rewards.close()
    out = capsys.readouterr().out
    assert [out.count(f"({kind};") for kind in ("raised", "timeout", "died", "malformed")] == [1, 1, 1, 0]


def test_a_response_that_cannot_be_written_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    watched(tmp_path).score([group(["x", "raise \ud800"])])
    assert "\\ud800" in (tmp_path / FAULTS_FILE).read_text()
    watched(tmp_path / "file/no folder").score([group(["x", "raise"])])


@pytest.mark.parametrize("texts", [["raise"] * 4, ["raise", "quit"]])
def test_a_first_wave_of_errors_stops_the_run(tmp_path: Path, texts: list[str]) -> None:
    with pytest.raises(InputError, match="ZeroDivisionError: verifier bug") as stopped:
        watched(tmp_path).score([group(texts), group(texts)])
    message = str(stopped.value)
    assert f"first {2 * len(texts)} samples ({2 * len(texts)} errors, 0 timeouts" in message and "\n" not in message
    assert (
        "--reward reward_plugins:scripted" in message and FAULTS_FILE in message and "--reward-timeout" not in message
    )


def test_a_first_wave_of_timeouts_stops_the_run(tmp_path: Path) -> None:
    options = RewardOptions(reward="reward_plugins:scripted", reward_timeout_s=0.25)
    rewards = WatchedRewards(options, tmp_path)
    with pytest.raises(InputError, match="0 errors, 2 timeouts.*raise --reward-timeout-s 0.25"):
        rewards.score([group(["spin", "sleep 60"])])
    rewards.close()


@pytest.mark.parametrize("first", [["x", "raise"], ["y", "x"]])
def test_one_verdict_is_enough_and_later_waves_never_stop(tmp_path: Path, first: list[str]) -> None:
    rewards = watched(tmp_path)
    rewards.score([group(first)])
    assert rewards.score([group(["raise"] * 4)])["reward/error"] == (4.0, 4.0)


@pytest.mark.parametrize(
    ("reward", "texts", "words"),
    [
        ("math", ["so it goes"] * 3, "not one of the first 3 responses has an answer to judge"),
        ("math", ["Answer: 7"] * 3, "the first 3 responses all got score -1, acc 0"),
        ("math", ["Answer: 8"] * 3, "the first 3 responses all got score 1, acc 1"),
        ("math", ["Answer: 8", "so it goes", "well"], None),
        ("math", ["Answer: 7", "so it goes", "well"], "the first 3 responses all got score -1, acc 0"),
        ("math", ["Answer: 7", "Answer: 8"], None),
        ("math", ["Answer: 7"], None),
    ],
)
def test_what_the_first_wave_says_of_the_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reward: str, texts: list[str], words: str | None
) -> None:
    rewards = watched(tmp_path, reward)
    rewards.score([group(texts, answer="8")])
    out = capsys.readouterr().out
    assert (words in out) if words else out == ""
    rewards.score([group(texts, answer="8")])  # once is enough here: the step's own alarms go on
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


BOXED = "Put your final answer within \\boxed{}."
LINE = "End with Answer: $Answer."


@pytest.mark.parametrize(
    ("texts", "mode", "reward", "count"),
    [
        ([BOXED, BOXED], "verl_compat", "auto", "2 of 2"),
        ([BOXED, LINE, "What?"], "verl_compat", "math", "1 of 3"),
        ([BOXED, BOXED], "strict", "auto", None),
        ([LINE, BOXED + LINE], "verl_compat", "auto", None),
        ([BOXED], "verl_compat", "reward_plugins:scripted", None),
    ],
)
def test_boxes_that_the_released_rules_never_read_are_told(
    texts: list[str], mode: str, reward: str, count: str | None
) -> None:
    prompts = [Prompt(str(i), text, (1,), "7", "any") for i, text in enumerate(texts)]
    warning = form_warning(prompts, RewardOptions(reward=reward, verifier_mode=mode))  # type: ignore[arg-type]
    assert (warning is None) == (count is None)
    assert warning is None or (f"warning: {count} prompts ask for \\boxed{{}}" in warning and "strict" in warning)


def test_the_hint_of_the_no_answer_alarm_names_the_mode() -> None:
    assert "verl_compat" in no_answer_hint(RewardOptions(verifier_mode="verl_compat"))
    assert "verl_compat" not in no_answer_hint(RewardOptions())
    assert "verl_compat" not in no_answer_hint(RewardOptions(reward="mine:f", verifier_mode="verl_compat"))
