"""The tool's refusals; what it finds, against real servers, is in tests/real_servers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from megatron_dapo.rollout.replay import dump_rollouts
from megatron_dapo.types import Group, Prompt, Sample


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location(
        "compare_logprobs", Path(__file__).parents[2] / "tools/compare_logprobs.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path):
    def sample(version: int, spans: tuple[tuple[int, int, int], ...] = ()) -> Sample:
        return Sample(np.arange(4), np.arange(4, dtype=np.float32), "stop", version, "", spans)

    samples = [sample(3), sample(2), sample(3, ((3, 0, 2), (4, 2, 4))), sample(3)]
    dump_rollouts(tmp_path / "rollouts", 3, [Group(Prompt("p", "", (7, 8), "", ""), samples, 0)])
    dump_rollouts(tmp_path / "rollouts", 2, [Group(Prompt("p", "", (7, 8), "", ""), samples[:1], 0)])
    return tmp_path


def test_only_samples_of_the_steps_own_weights_are_compared(tool, run):
    step, samples = tool.samples_of(run, None, 32)
    assert step == 3 and [ids for ids, _ in samples] == [[7, 8, 0, 1, 2, 3]] * 2
    said = tool.compare(samples, lambda ids: [0.0, 0.0, 1.0, 2.0, 3.5])
    assert said == "mean 1.25e-01, largest 5.00e-01 (sample 1, token 4 of its response)"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "nothing to compare with: give --hf DIR or --url URL"),
        (["--hf", "nowhere"], "nowhere: no config.json there"),
        (["--hf", "x", "--step", "9"], "no such file"),
        (["--hf", "x", "--step", "2"], "no sample of step 2 was written by the weights of version 2 alone"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9/model_info: ConnectionError"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_in_a_line(tool, run, capsys, words, says):
    assert tool.main([str(run), *words]) == 2
    assert says in capsys.readouterr().err


def test_another_temperature_is_refused(tool, run):
    (run / "recipe.toml").write_text("[rollout]\nrollout_temperature = 0.7\n")
    with pytest.raises(tool.InputError, match="at --rollout-temperature 0.7; dump a step with 1.0"):
        tool.samples_of(run, 3, 1)
