"""A run goes on with other settings from its own checkpoint: as a run with them from the beginning would at that step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed_helper import run_ranks
from tiny_trainer import rows_of, step, trainer_of

from megatron_dapo.training import checkpoint
from megatron_dapo.types import InputError

BEFORE = (
    "--num-rollout", "4", "--lr-warmup-rollouts", "2", "--num-steps-per-rollout", "2", "--global-batch-size", "8",
    "--weight-decay", "0.1",
)  # fmt: skip
"""Eight optimizer steps, of which four warm up, at a rate of 1e-3."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The checkpoint of a run after one of its rollouts: two optimizer steps."""
    folder = tmp_path_factory.mktemp("before")

    def work() -> None:
        trainer = trainer_of(folder, *BEFORE)
        for _ in range(2):
            step(trainer, rows_of())
        checkpoint.save(trainer, 1, {})

    run_ranks(work, 1)
    return folder / "run/checkpoints"


def resumed(saved: Path, folder: Path, flags: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Rates of the next steps, and the settings of the optimizer behind them."""

    def work() -> dict[str, Any]:
        trainer = trainer_of(folder, *BEFORE, *flags, "--save", str(saved))
        assert trainer.args.resumed and trainer.args.iteration == 1
        states = trainer.optimizer.chained_optimizers[0].optimizer.state.values()
        moments = sum(float(state["exp_avg"].abs().sum()) for state in states)
        rates = [step(trainer, rows_of())["actor/lr"][0] for _ in range(steps)]
        groups = trainer.optimizer.param_groups
        return {
            "rates": rates,
            "moments": moments,
            "betas": {tuple(group["betas"]) for group in groups},
            "decay": {group["weight_decay"] for group in groups if group["wd_mult"]},
            "changed": trainer.args.changed,
        }

    return run_ranks(work, 1)[0]


SCHEDULES = {
    # optimizer steps 3, 4, 5 .. of a run with these settings from the beginning, whose warm-up of 4 ends at the rate
    "nothing": ((), [0.75e-3, 1e-3, 1e-3]),
    "lr": (("--lr", "4e-4"), [3e-4, 4e-4, 4e-4]),
    "longer": (("--num-rollout", "400"), [0.75e-3, 1e-3, 1e-3]),
    "shorter warm-up": (("--lr-warmup-rollouts", "0"), [1e-3]),
    "longer warm-up": (("--lr-warmup-rollouts", "4"), [3e-3 / 8, 4e-3 / 8, 5e-3 / 8]),
    # two steps per rollout as before, of 16 samples each
    "larger batch": (("--global-batch-size", "16", "--rollout-batch-size", "8"), [0.75e-3, 1e-3, 1e-3]),
    # a rollout is one step of 16 samples: one of two steps of warm-up is done
    "fewer, larger steps": (("--global-batch-size", "16", "--num-steps-per-rollout", "1"), [1e-3, 1e-3]),
    # a rollout is four steps of 4 samples: four of eight are done
    "more, smaller steps": (("--global-batch-size", "4", "--num-steps-per-rollout", "4"), [5e-3 / 8, 6e-3 / 8]),
    # six steps after a warm-up of none, two are done: 1 - 3/8, 1 - 4/8 of the way
    "linear decay": (("--lr-decay-style", "linear", "--lr-warmup-rollouts", "0"), [5e-3 / 8, 4e-3 / 8]),
    "linear decay to another rate, longer": (
        ("--lr-decay-style", "linear", "--lr-warmup-rollouts", "0", "--min-lr", "2e-4", "--num-rollout", "8"),
        [2e-4 + 13 / 16 * 8e-4, 2e-4 + 12 / 16 * 8e-4],
    ),
    "weight decay": (("--weight-decay", "0.25", "--adam-beta2", "0.95", "--clip-grad", "0.5"), [0.75e-3]),
}  # fmt: skip


@pytest.mark.parametrize("change", SCHEDULES)
def test_the_schedule_goes_on_as_if_the_settings_had_always_been_these(saved, tmp_path, change):
    flags, rates = SCHEDULES[change]
    found = resumed(saved, tmp_path, flags, len(rates))
    assert found["rates"] == pytest.approx(rates, rel=1e-9)
    assert found["moments"] > 0, "the optimizer began anew"
    assert found["betas"] == {(0.9, 0.95 if "--adam-beta2" in flags else 0.999)}
    assert found["decay"] == {0.25 if "--weight-decay" in flags else 0.1}
    names = {flag.lstrip("-").replace("-", "_") for flag in flags if flag.startswith("--")}
    assert {line.split()[0] for line in found["changed"]} == names


def test_what_changed_is_said_with_both_values(saved, tmp_path):
    changed = resumed(saved, tmp_path, ("--lr", "4e-4", "--num-rollout", "9", "--eps-clip-c", "10"), 0)["changed"]
    assert sorted(changed) == ["eps_clip_c not set -> 10.0", "lr 0.001 -> 0.0004", "num_rollout 4 -> 9"]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--optimizer", "sgd"), ("--optimizer", "adam", "sgd")),
        (("--no-use-distributed-optimizer",), ("--use-distributed-optimizer", "True", "False")),
        (("--bf16",), ("--bf16", "False", "True")),
        (("--decoupled-lr", "1e-4"), ("--decoupled-lr", "None", "0.0001")),
        (("--num-layers", "4"), ("--num-layers 2", "4")),
    ],
    ids=lambda value: value[0],
)
def test_what_cannot_change_is_refused_with_the_difference(saved, tmp_path, flags, names):
    with pytest.raises(InputError) as caught:
        trainer_of(tmp_path, *BEFORE, *flags, "--save", str(saved))
    message = str(caught.value)
    assert all(name in message for name in names) and "--save" in message or "run-dir" in message
    assert "\n" not in message
