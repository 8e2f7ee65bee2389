"""Engines by name: one of the user's own trains a policy without an edit of the package."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
import torch.distributed as dist
from distributed_helper import run_ranks
from tiny import write_task

from megatron_dapo import loop
from megatron_dapo.rollout.engine import ENGINES
from megatron_dapo.training.arguments import parse
from megatron_dapo.types import InputError

MINE = """
import numpy as np
import torch.distributed as dist
from megatron_dapo.distributed.collectives import broadcast_object
from megatron_dapo.types import Sample

class Mine:
    weight_version = -1
    def generate(self, requests, params, on_finish=None):
        broadcast_object("generating")
        return [self._one(number, request, params) for number, request in enumerate(requests)]
    def _one(self, number, request, params):
        ids = np.array([3 + number % 5, params.stop_token_ids[0]])
        return Sample(ids, np.full(2, -1.0, np.float32), finish_reason="stop", weight_version=self.weight_version,
                      text=self.decode(ids.tolist()))
    def follow(self):
        while broadcast_object(None):
            pass
    def release(self):
        broadcast_object(None)
    def publish(self, version):
        self.weight_version = version
    def report(self):
        return {"rollout/mine": (1.0, 1.0)}
    def close(self):
        open(f"closed_{dist.get_rank()}", "w").close()

def make(args, options, policy, decode, note):
    assert len(policy.model) == 1 and (decode is None) == (dist.get_rank() != 0)
    engine = Mine()
    engine.decode = decode
    return engine
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_of_the_users_own(tmp_path, monkeypatch, ranks):
    (tmp_path / "my_engine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    recipe = write_task(
        tmp_path / "task", rollout_engine="my_engine:make", num_rollout=2, dynamic_sampling=False, save_interval=0
    )

    def work() -> None:
        monkeypatch.setattr(loop, "shut_down", lambda: None)  # the rank goes on behind it
        with contextlib.redirect_stdout(None):
            loop.train(*parse([str(recipe)]))
        dist.barrier()

    run_ranks(work, ranks)
    rows = [json.loads(line) for line in (tmp_path / "task/run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["rollout/mine"] == 1.0 and row["rollout/staleness/max"] == 0.0 for row in rows)
    assert all(row["response_length/mean"] == 2.0 and np.isfinite(row["actor/pg_loss"]) for row in rows)
    assert all((tmp_path / f"closed_{rank}").exists() for rank in range(ranks))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "sgland",
            "no such engine; did you mean 'sglang'? (known: embedded, sglang; your own: package.module:function)",
        ),
        ("no_such_module:make", "cannot import 'no_such_module'"),
        ("json:no_such", "'json' has no function 'no_such'"),
    ],
)
def test_an_engine_that_cannot_be_had(name, why):
    with pytest.raises(InputError) as refused:
        ENGINES[name]
    assert str(refused.value).startswith(f"--rollout-engine {name}: {why}")


def test_an_unknown_engine_is_refused_before_anything_is_built(tmp_path):
    recipe = write_task(tmp_path, rollout_engine="vllm")
    with pytest.raises(InputError, match="--rollout-engine vllm: no such engine"):
        parse([str(recipe)])
