"""What is mended in megatron-core: the names still exist, Adam is AdamW, and a saved optimizer goes on as if never saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed_helper import run_ranks
from tiny_trainer import flat_weights, rows_of, step, trainer_of

from megatron_dapo.compat import megatron_fixes
from megatron_dapo.training import checkpoint

OPTIMIZERS = [target for target in megatron_fixes.TARGETS if "optimizer" in target[0].__name__]


def test_every_mended_name_is_one_of_megatrons():
    assert [f"{module.__name__}.{name}" for module, name in megatron_fixes.TARGETS if not hasattr(module, name)] == []


def test_a_name_that_disappears_upstream_is_noticed(monkeypatch):
    module, name = megatron_fixes.TARGETS[0]
    monkeypatch.delattr(module, name)
    with pytest.raises(AssertionError, match=f"{name} is gone"):
        megatron_fixes.apply()


def test_with_transformer_engine_or_apex_their_adam_stays(monkeypatch):
    theirs = object()
    for module, name in OPTIMIZERS:
        monkeypatch.setattr(module, name, theirs if name == "Adam" else True)
    megatron_fixes.apply()
    assert megatron_fixes.megatron_optimizer.Adam is theirs and megatron_fixes.distrib_optimizer.Adam is theirs


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_torchs_adamw(weight_decay):
    settings = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": weight_decay}
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64)), torch.nn.Parameter(torch.randn(4).double())]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizers = megatron_fixes.Adam(ours, **settings), torch.optim.AdamW(theirs, **settings)
    for _ in range(20):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("steps_before", [2, 0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_saved_loaded_and_stepped_is_stepped(tmp_path, ranks, steps_before):
    """Some steps (or none, all were skipped), save, two more; or: load what was saved, two more. The same parameters to
    the bit, moments included."""

    def save_on_the_way() -> tuple[list[float], list[float]]:
        trainer = trainer_of(tmp_path, *schedule)
        for advantages in (1.0, -1.0)[:steps_before]:
            step(trainer, rows_of(advantages=advantages * rows_of().advantages))
        checkpoint.save(trainer, 1, {"step": 1})
        return go_on(trainer)

    def resume() -> tuple[list[float], list[float]]:
        trainer = trainer_of(tmp_path, *schedule)
        assert trainer.args.resumed and checkpoint.load_rollout_state(trainer.args) == {"step": 1}
        return go_on(trainer)

    def go_on(trainer: Any) -> tuple[list[float], list[float]]:
        norms = [step(trainer, rows_of(advantages=a * rows_of().advantages)) for a in (0.5, 2.0)]
        lr = [n["actor/lr"][0] for n in norms]
        return flat_weights(trainer).tolist(), [trainer.lr, *lr, *(n["actor/grad_norm"][0] for n in norms)]

    schedule = ("--lr-warmup-rollouts", "4", "--use-distributed-optimizer")
    whole = run_ranks(save_on_the_way, ranks)
    resumed = run_ranks(resume, ranks)
    assert resumed == whole
    weights, (_, first_lr, second_lr, *_) = whole[0]
    assert len(weights) > 1000 and 0 <= first_lr < second_lr  # the schedule went on as well
