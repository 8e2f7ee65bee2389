"""The embedded engine against the training forward: same log-probs, same draws however the work is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_helper import run_ranks
from tiny import MODEL
from tiny_trainer import VOCAB, trainer_of
from tolerances import logprob_bound

from megatron_dapo.rollout.embedded import EmbeddedEngine, draw
from megatron_dapo.training.batch import build_minibatch
from megatron_dapo.types import InputError, Prompt, Request, Sample, SamplingParams, Trajectories

STOP = 1
LAYERS = MODEL["num_layers"]


def requests_of(count: int = 32) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(2, VOCAB, rng.integers(3, 9)).tolist()) for _ in range(count)]
    return [Request(Prompt(str(i), "", ids, "", ""), seed=1000 + i) for i, ids in enumerate(prompts)]


def sample(trainer: Any, params: SamplingParams, batch_size: int = 64) -> list[Sample]:
    """On rank 0 the samples, elsewhere nothing."""
    engine = EmbeddedEngine(trainer.model, trainer.inference, lambda ids: "", VOCAB, batch_size)
    if dist.get_rank() != 0:
        engine.follow()
        return []
    samples = engine.generate(requests_of(), params)
    engine.release()
    return samples


def training_difference(trainer: Any, samples: list[Sample]) -> float:
    """Largest difference between the engine's log-probs and those of the training forward on the packed rows, as a share of
    what rounding explains."""
    box = [samples]
    dist.broadcast_object_list(box, src=0)
    samples, requests = box[0], requests_of()
    n = len(samples)
    rows = Trajectories(
        tokens=[np.array([*r.prompt.token_ids, *s.token_ids]) for r, s in zip(requests, samples, strict=True)],
        prompt_lengths=np.array([len(r.prompt.token_ids) for r in requests]),
        rollout_logprobs=[s.logprobs for s in samples],
        loss_mask=[np.ones(s.length, bool) for s in samples],
        advantages=np.zeros(n),
        rewards=np.zeros(n),
        acc=np.zeros(n),
        group=np.arange(n) // 4,
        weight_version=np.zeros(n, np.int64),
    )
    batch = build_minibatch(rows, trainer.options, trainer.layout)
    trainer.fill_old_logprobs([batch, batch])
    off = max(float((m.old_logprobs - m.rollout_logprobs).abs().max()) for m in batch if len(m.predicts))
    return off / logprob_bound(LAYERS, [float(x) for s in samples for x in s.logprobs])


YARN = [
    "--position-embedding-type", "yarn", "--rotary-scaling-factor", "4", "--yarn-original-max-position-embeddings", "16",
    "--yarn-beta-fast", "2", "--yarn-beta-slow", "0.25", "--mscale", "2",
]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, []),
        (1, ["--rollout-temperature", "0.6"]),
        (1, ["--qk-layernorm"]),
        (1, YARN),
        (1, ["--kv-channels", "24", "--rotary-percent", "0.5"]),  # not the dense decoder: Megatron's own forward
        (2, []),
        (2, ["--tensor-model-parallel-size", "2"]),
        (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    ],
)
def test_logprobs_are_the_trainers(tmp_path, ranks, flags):
    def work() -> tuple[float, list[int]]:
        trainer = trainer_of(tmp_path, *flags)
        temperature = trainer.options.rollout.rollout_temperature
        samples = sample(trainer, SamplingParams(24, temperature, stop_token_ids=(STOP,)))
        return training_difference(trainer, samples), [s.length for s in samples]

    difference, lengths = run_ranks(work, ranks)[0]
    assert difference <= 1
    assert len(set(lengths)) > 3 and max(lengths) == 24, (
        "ragged responses, some cut at the limit, were meant to be compared"
    )


def test_neither_batching_nor_data_parallel_changes_a_draw(tmp_path):
    def work(batch_size: int) -> list[list[int]]:
        samples = sample(trainer_of(tmp_path), SamplingParams(24, stop_token_ids=(STOP,)), batch_size)
        return [s.token_ids.tolist() for s in samples]

    whole = run_ranks(work, 1, 64)[0]
    for ranks, batch_size in ((1, 5), (2, 7)):
        found = run_ranks(work, ranks, batch_size)[0]
        same = sum(a == b for a, b in zip(found, whole, strict=True))
        assert same >= len(whole) - 1  # a random number within rounding of two tokens' border draws either


def test_stopping_and_cutting(tmp_path):
    def work() -> list[tuple[str, int, int, int]]:
        samples = sample(trainer_of(tmp_path), SamplingParams(24, stop_token_ids=(STOP, 2)))
        return [
            (s.finish_reason, s.length, int(s.token_ids[-1]), int(np.isin(s.token_ids[:-1], (STOP, 2)).sum()))
            for s in samples
        ]

    for reason, length, last, stops_inside in run_ranks(work, 1)[0]:
        assert stops_inside == 0
        assert (reason == "stop") == (last in (STOP, 2))
        assert length == 24 or reason == "stop"


def test_greedy_is_repeatable_and_most_likely(tmp_path):
    def work() -> bool:
        trainer = trainer_of(tmp_path)
        first, second = (sample(trainer, SamplingParams(8, temperature=0.0)) for _ in range(2))
        same = all((a.token_ids == b.token_ids).all() for a, b in zip(first, second, strict=True))
        return same and training_difference(trainer, first) <= 1

    assert run_ranks(work, 1) == [True]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_weights_that_are_not_finite_are_said_and_not_drawn_from(tmp_path, temperature):
    def work() -> str:
        trainer = trainer_of(tmp_path)
        assert trainer.weights_are_finite()
        next(trainer.model[0].parameters()).data[3:5] = float("nan")
        assert not trainer.weights_are_finite()
        with pytest.raises(InputError) as stopped:
            sample(trainer, SamplingParams(8, temperature))
        return str(stopped.value)

    (message,) = run_ranks(work, 1)
    assert "logits are NaN" in message and "--lr" in message and "\n" not in message


def test_draws_follow_the_filtered_distribution():
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    logp = torch.log_softmax(logits, -1)
    grid = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000

    def shares(**filters: Any) -> torch.Tensor:
        drawn = draw(logp.expand(len(grid), -1), grid, SamplingParams(1, **filters))
        return torch.bincount(drawn, minlength=5) / len(grid)

    p = logp.exp()
    assert torch.allclose(shares(), p, atol=2e-5)
    top2 = torch.where(torch.arange(5) < 2, p, 0.0)
    assert torch.allclose(shares(top_k=2), top2 / top2.sum(), atol=2e-5)
    top3 = torch.where(torch.arange(5) < 3, p, 0.0)  # the smallest set whose mass reaches 0.85
    assert float(top2.sum()) < 0.85 <= float(top3.sum())
    assert torch.allclose(shares(top_p=0.85), top3 / top3.sum(), atol=2e-5)
    assert shares(temperature=0.0)[0] == 1.0


def test_the_largest_uniform_number_draws_a_possible_token():
    logp = torch.log_softmax(torch.tensor([[0.0, 0.0, -1e30]]), -1)
    assert draw(logp, torch.tensor([1.0 - 2**-53], dtype=torch.float64), SamplingParams(1)).item() == 1
