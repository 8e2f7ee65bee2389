"""What joins the parts of the trainer to one another and to Megatron, where each part alone is right either way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distributed_helper import run_ranks
from hf_models import save_model  # noqa: E402
from safetensors.torch import load_file
from tiny import MODEL
from tiny_trainer import flat_weights, rows_of, step, trainer_from_hf, trainer_of
from tolerances import assert_same_logprobs, logprob_bound, relative_bound

from megatron_dapo.config import PublishOptions
from megatron_dapo.distributed.collectives import merge_over_ranks
from megatron_dapo.loop import Run
from megatron_dapo.rollout.embedded import EmbeddedEngine
from megatron_dapo.servers import publish
from megatron_dapo.servers.policy_weights import PolicyWeights
from megatron_dapo.servers.verify import Verifier
from megatron_dapo.tracking import Clock
from megatron_dapo.training import checkpoint
from megatron_dapo.training.batch import build_minibatch
from megatron_dapo.training.probe import TrainerProbe, policy_of
from megatron_dapo.training.step import Trainer
from megatron_dapo.types import Prompt, Request, SamplingParams, Trajectories

LAYERS = MODEL["num_layers"]

DP2 = ("--use-distributed-optimizer",)
LR = 1e-2
BF16 = ("--bf16", "--lr", str(LR), "--weight-decay", "0")


# --- the optimizer's fp32 copies ---------------------------------------------------------------------------------


def moved(trainer: Trainer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights before and after one step, and one more after that (fp32)."""
    found = [flat_weights(trainer).float()]
    for _ in range(2):
        assert step(trainer, rows_of())["actor/skipped_nonfinite"] == (0.0, 1.0)
        found.append(flat_weights(trainer).float())
    return found[0], found[1], found[2]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("source", ["hugging face", "megatron"])
def test_bf16_training_goes_on_from_the_weights_that_were_loaded(tmp_path, source, ranks):
    """The optimizer updates fp32 copies of its own and writes them over the model: made before the weights were loaded, the
    first update would replace them by the random initialisation. A step of Adam is at most the rate, and bf16's rounding."""

    def save() -> None:
        trainer = trainer_of(tmp_path / "first", "--seed", "7", "--save", str(tmp_path / "start"))
        checkpoint.save(trainer, 1, {})

    def work() -> tuple[torch.Tensor, ...]:
        if source == "hugging face":
            return moved(trainer_from_hf(tmp_path, tmp_path / "hf", *BF16))
        return moved(trainer_of(tmp_path, *BF16, "--load", str(tmp_path / "start")))

    if source == "hugging face":
        save_model(tmp_path / "hf", "qwen2")
    else:
        run_ranks(save, 1)
    for before, *after in run_ranks(work, ranks):
        for number, weights in enumerate(after, start=1):
            difference = (weights - before).abs()
            assert (difference <= number * 1.01 * LR + 2**-7 * before.abs()).all()
            assert (difference > 0.5 * LR).float().mean() > 0.2


# --- weights that are complete --------------------------------------------------------------------------------------


def sampled(trainer: Trainer, folder: Path) -> list[float]:
    """Log-probs that the embedded engine reports of what it samples; the second rank has nothing to sample."""
    engine = EmbeddedEngine(trainer.model, trainer.inference, lambda ids: "", trainer.args.vocab_size)
    if torch.distributed.get_rank() != 0:
        engine.follow()
        return []
    prompt = Prompt("p", "", (5, 6, 7), "", "")
    samples = engine.generate([Request(prompt, seed=0)], SamplingParams(6, temperature=1.0))
    engine.release()
    return [float(x) for sample in samples for x in sample.logprobs]


def saved(trainer: Trainer, folder: Path) -> list[float]:
    """The weights of a checkpoint, read back into another model."""
    trainer.args.save = str(folder / "checkpoints")
    checkpoint.save(trainer, 1, {})
    here = [p.detach().clone() for p in trainer.model[0].parameters()]
    checkpoint.load_weights(trainer.model, trainer.args.save)
    read = flat_weights(trainer).tolist()
    for p, value in zip(trainer.model[0].parameters(), here, strict=True):
        p.data.copy_(value)
    return read


def exported(trainer: Trainer, folder: Path) -> list[float]:
    """The weights of an export of the loop's."""
    trainer.args.run_dir = str(folder / "exported")
    run = object.__new__(Run)
    run.trainer, run.args, run.clock = trainer, trainer.args, Clock()
    run.export(1)
    torch.distributed.barrier()
    (file,) = (folder / "exported").rglob("*.safetensors")
    return torch.cat([t.flatten() for _, t in sorted(load_file(file).items())]).tolist()


def weights_of(trainer: Trainer, folder: Path) -> PolicyWeights:
    return PolicyWeights(policy_of(trainer), str(folder / "hf"), fp8=False)


def publisher(trainer: Trainer, folder: Path) -> Any:
    """Publishes to no server."""
    weights, options = weights_of(trainer, folder), PublishOptions()
    return publish.Publisher(weights, str(folder / "exchange"), options, None, Verifier(weights, options, 1, "float32"))


def published_by_broadcast(trainer: Trainer, folder: Path) -> list[float]:
    found, sender = [], publisher(trainer, folder)

    def send(urls: list[str], version: int) -> dict[str, str]:
        found.extend(t.flatten().clone() for _, t in sender.weights.tensors())
        return {}

    sender._send_all_stages = send
    assert sender._by_broadcast([], 1) == {}
    return torch.cat(found).tolist() if found else []


def published_by_disk(trainer: Trainer, folder: Path) -> list[float]:
    found: list[torch.Tensor] = []

    def read(path: str) -> None:
        (file,) = Path(path).glob("*.safetensors")
        found.extend(t.flatten() for _, t in sorted(load_file(file).items()))

    publish.shutil = SimpleNamespace(rmtree=read)  # in a forked rank
    assert publisher(trainer, folder)._by_disk([], 1) == {}
    return torch.cat(found).tolist() if found else []


def checksums(trainer: Trainer, folder: Path) -> list[float]:
    return [float(int(x, 16) % 2**40) for sums in weights_of(trainer, folder).checksums(1).values() for x in sums]


PLACES: list[Callable[[Trainer, Path], list[float]]] = [
    sampled, saved, exported, published_by_broadcast, published_by_disk, checksums,
]  # fmt: skip


def test_everything_that_leaves_the_trainer_has_the_last_update_under_overlap_param_gather(tmp_path):
    """Each rank updates its shard of the parameters; with the flag the shards come together only in the next step's forward
    pass. What samples, saves, exports or publishes before it must bring them together first."""
    save_model(tmp_path / "hf", "qwen2")

    def work(*flags: str) -> list[list[float]]:
        trainer, found = trainer_from_hf(tmp_path, tmp_path / "hf", *DP2, *flags, "--lr", "1e-2"), []
        for place in PLACES:
            step(trainer, rows_of())
            found.append(place(trainer, tmp_path / "".join(flags)))
        step(trainer, rows_of())
        with trainer.inference():
            return [*found, flat_weights(trainer).tolist()]

    for name in ("", "--overlap-grad-reduce--overlap-param-gather"):
        (tmp_path / name / "hf").parent.mkdir(exist_ok=True)
        if name:
            (tmp_path / name / "hf").symlink_to(tmp_path / "hf")
    apart = run_ranks(work, 2)
    overlapped = run_ranks(work, 2, "--overlap-grad-reduce", "--overlap-param-gather")
    for rank in range(2):
        for place, expected, found in zip(PLACES, apart[rank], overlapped[rank], strict=False):
            assert found == expected, place.__name__
            assert found or rank > 0
        assert overlapped[rank][-1] == apart[rank][-1], "training went on as if nothing had been in between"


# --- the loss and its log-probs ---------------------------------------------------------------------------------------


def test_gspo_takes_the_mean_of_a_response_over_the_context_parallel_ranks_that_hold_it(tmp_path):
    """Each of them knows part of a response; the ratio, the clip and the gradient are those of one rank."""

    def work(*flags: str) -> dict[str, float]:
        clip = ("--policy-loss", "gspo", "--old-logprobs", "rollout", "--eps-clip", "0.02", "--eps-clip-high", "0.02")
        trainer, rows = trainer_of(tmp_path, *clip, "--init-method-std", "0.2", *flags), rows_of()
        drift = np.random.default_rng(1)
        rows.rollout_logprobs = [
            (np.full(n, -3.3) + drift.normal(0, 0.6, n)).astype(np.float32) for n in rows.response_lengths
        ]
        batch = build_minibatch(rows, trainer.options, trainer.layout)
        trainer.fill_old_logprobs([batch])
        sums = merge_over_ranks(trainer.update(batch))
        return {name: total / count for name, (total, count) in sums.items() if name.startswith("actor/")}

    one, two = run_ranks(work, 1)[0], run_ranks(work, 2, "--context-parallel-size", "2")[0]
    bound = relative_bound(LAYERS, passes=4)  # old log-probs, then there and back
    assert two == pytest.approx(one, rel=bound, abs=bound)
    assert 0.2 < one["actor/pg_clipfrac"] < 0.95 and one["actor/grad_norm"] > 0.01


def test_log_probs_have_the_rollouts_temperature_and_the_probes_has_none(tmp_path):
    """What the updates compare is what was sampled at --rollout-temperature; the probe asks the servers at temperature 1."""

    def work() -> tuple[list[float], list[float], list[float], list[float]]:
        trainer = trainer_of(tmp_path, "--rollout-temperature", "0.5", "--init-method-std", "0.2")
        probe = TrainerProbe(trainer)
        tokens = probe.tokens
        response = len(tokens) - 1
        row = Trajectories(
            tokens=[np.array(tokens)],
            prompt_lengths=np.ones(1, np.int64),
            rollout_logprobs=[np.zeros(response, np.float32)],
            loss_mask=[np.ones(response, bool)],
            **{name: np.zeros(1) for name in ("advantages", "rewards", "acc")},
            **{name: np.zeros(1, np.int64) for name in ("group", "weight_version")},
        )
        batch = build_minibatch(row, trainer.options, trainer.layout)
        trainer.fill_old_logprobs([batch, batch])
        probed = probe.logprobs()
        trainer.fill_old_logprobs([batch, batch])  # the temperature is the rollouts' again
        micro = batch.microbatches[0]
        with trainer.inference(), torch.no_grad():
            logits = trainer.model[0](micro.tokens, micro.positions, None, packed_seq_params=micro.packed)[0]
        logits, targets = logits[:response, : trainer.args.vocab_size].double(), torch.tensor(tokens[1:])
        expected = [(logits / t).log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist() for t in (0.5, 1.0)]
        return micro.old_logprobs.tolist(), probed, *expected

    cold, probed, expected_cold, expected_warm = run_ranks(work, 1)[0]
    assert_same_logprobs(LAYERS, cold, expected_cold)
    assert_same_logprobs(LAYERS, probed, expected_warm)
    assert max(abs(a - b) for a, b in zip(expected_cold, expected_warm, strict=True)) > 0.1


def test_the_largest_over_micro_batches_and_ranks_is_that_of_the_batch(tmp_path):
    """A sum would grow with the number of micro-batches; the last one's would forget the others."""

    def work(budget: int) -> tuple[float, float]:
        trainer = trainer_of(tmp_path, "--max-tokens-per-gpu", str(budget), "--init-method-std", "0.2")
        sums = step(trainer, rows_of())
        total, count = sums["mismatch/logprob_abs_diff"]
        return sums["mismatch/logprob_abs_diff/max"][0], total / count

    whole, mean = run_ranks(work, 1, 10_000)[0]
    assert whole > 2 * mean
    for ranks, budget in ((1, 33), (2, 40)):
        for found in run_ranks(work, ranks, budget):
            assert found == pytest.approx((whole, mean), abs=logprob_bound(LAYERS, [8.0]))
