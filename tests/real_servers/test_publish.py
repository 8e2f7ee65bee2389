"""Publication to real servers: they hold what the trainer holds after every update, under every layout and family."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_helper import run_ranks
from served import LAYERS, VOCAB, save_served_model, served, write_served_task
from tiny_trainer import rows_of, step
from tolerances import CONTROL, assert_same_logprobs, largest, logprob_bound

from megatron_dapo.servers.control import call, logprobs_of
from megatron_dapo.servers.engine import SglangEngine
from megatron_dapo.servers.verify import other_tensors
from megatron_dapo.training.arguments import parse
from megatron_dapo.training.probe import TrainerProbe, policy_of
from megatron_dapo.training.setup import build_trainer
from megatron_dapo.types import Prompt, Request, SamplingParams

TP2_PP2 = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--sequence-parallel")


def engine_of(folder: Path, checkpoint: Path, urls: list[str], *flags: str) -> tuple[Any, SglangEngine]:
    recipe = write_served_task(folder, checkpoint, urls, rollout_max_response_len=24, num_steps_per_rollout=2, lr=3e-2)
    args, options = parse([str(recipe), "--weight-bucket-mb", "1", *flags])
    trainer = build_trainer(args, options)
    decode = (lambda ids: "") if dist.get_rank() == 0 else None
    return trainer, SglangEngine(args, options, policy_of(trainer), decode, lambda text: None)


def update(trainer: Any) -> None:
    """One optimizer step on samples of ids that the tokenizer has."""
    rows = rows_of()
    step(trainer, dataclasses.replace(rows, tokens=[tokens % VOCAB for tokens in rows.tokens]))


def test_servers_agree_with_the_trainer_after_every_one_of_five_updates(tmp_path, checkpoint, servers):
    """TP 2, PP 2: two stages publish one after the other. The unsynchronised control are the servers before the first."""
    save_served_model(tmp_path / "other", num_hidden_layers=4, tie_word_embeddings=False, attention_dropout=0.0)
    other = tmp_path / "other"

    def work() -> tuple[list[float], list[float]]:
        flags = (*TP2_PP2, "--weight-checksum")
        trainer, engine = engine_of(tmp_path / f"rank{dist.get_rank()}", other, servers, *flags)
        tokens = TrainerProbe(trainer).tokens
        gaps, moves = [], []  # as shares of what rounding explains
        for version in range(6):
            if version:
                update(trainer)
            expected = TrainerProbe(trainer).logprobs()
            if dist.get_rank() == 0:
                bound = logprob_bound(LAYERS, expected)
                moves += [largest(expected, logprobs_of(url, tokens)) / bound for url in servers]
            engine.publish(version)
            if dist.get_rank() == 0:
                gaps += [largest(expected, logprobs_of(url, tokens)) / bound for url in servers]
                request = Request(Prompt("p", "", tuple(tokens[:5]), "", ""), seed=version)
                (sample,) = engine.generate([request], SamplingParams(20))
                again = logprobs_of(servers[0], [*tokens[:5], *sample.token_ids.tolist()])[4:]
                assert_same_logprobs(LAYERS, sample.logprobs, again)
                assert sample.weight_version == version
        engine.close()
        return gaps, moves

    gaps, moves = run_ranks(work, 4, deadline_s=500)[0]
    assert len(gaps) == 12 and max(gaps) <= 1, gaps
    assert min(moves[2:]) >= CONTROL, moves  # every update changed what a server would have said


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_caches_of_the_old_weights_are_gone(tmp_path, checkpoint, servers, mode):
    """The same prompt before and after: nothing of its prefix is found in a cache, unless the mode is to keep caches."""

    def work() -> list[int]:
        trainer, engine = engine_of(tmp_path, checkpoint, servers[:1], "--weight-update-mode", mode)
        body = {"input_ids": [*range(3, 23)], "sampling_params": {"max_new_tokens": 2, "temperature": 0.0}}
        cached = []
        for version in range(2):
            engine.publish(version)
            call(servers[0], "/generate", body)
            again = call(servers[0], "/generate", body)
            assert again["meta_info"]["cached_tokens"] > 0
        engine.publish(2)
        cached.append(call(servers[0], "/generate", body)["meta_info"]["cached_tokens"])
        engine.close()
        return cached

    (cached,) = run_ranks(work, 1)[0]
    assert (cached > 0) is (mode == "in_place")


@pytest.mark.parametrize(
    ("family", "gpus", "flags"),
    [
        ("qwen3 tied", 2, ("--pipeline-model-parallel-size", "2")),
        ("qwen3 moe", 1, ("--expert-model-parallel-size", "2")),
    ],
)
def test_tied_models_and_experts_publish_right(tmp_path, family, gpus, flags):
    """To a server of two ranks, too. Against transformers as well: the server's log-probs are those of the model the trainer
    started from. Padded rows of the vocabulary (25 to 32) never arrive: the server would refuse their bucket."""
    save_served_model(tmp_path / "served", family)
    model = save_served_model(tmp_path / "trained", family, attention_dropout=0.0)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "trained")
    several = ("--rollout-num-gpus-per-engine", str(gpus))
    with served(tmp_path / "serve", tmp_path / "served", 1, *several) as urls:

        def work() -> tuple[list[int], list[float], list[float]]:
            words = (*flags, *several, "--weight-checksum")
            trainer, engine = engine_of(tmp_path / f"rank{dist.get_rank()}", tmp_path / "trained", urls, *words)
            assert trainer.args.padded_vocab_size > VOCAB
            tokens = TrainerProbe(trainer).tokens
            before = logprobs_of(urls[0], tokens) if dist.get_rank() == 0 else []
            engine.publish(0)
            after = logprobs_of(urls[0], tokens) if dist.get_rank() == 0 else []
            engine.close()
            return tokens, before, after

        tokens, before, after = run_ranks(work, 2, deadline_s=500)[0]
    with torch.no_grad():
        logp = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    expected = logp.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    assert_same_logprobs(LAYERS, after, expected)
    assert largest(before, expected) >= CONTROL * logprob_bound(LAYERS, expected)


def test_a_tensor_that_is_off_is_named_by_its_checksum(tmp_path, checkpoint, servers):
    def work() -> tuple[str, str]:
        _, engine = engine_of(tmp_path, checkpoint, servers[:1])
        engine.publish(0)
        expected = engine.publisher.weights.checksums(1)
        name = "model.layers.1.self_attn.qkv_proj.weight"
        good = other_tensors(servers[0], expected)
        bad = other_tensors(servers[0], {**expected, name: ["0" * 16]})
        engine.close()
        return good, bad

    good, bad = run_ranks(work, 1)[0]  # 4 layers of 7 tensors; embedding, norm and head
    assert good == ""
    assert "1 of 31 tensors are not the trainer's: model.layers.1.self_attn.qkv_proj.weight" in bad, bad
