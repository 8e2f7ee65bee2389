"""Publication without SGLang: a stand-in notes what it is told and reads each bucket as SGLang would. What arrives is the
trainer's, every time; the version is known before a server goes on; samples say which weights wrote them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aiohttp import web
from distributed_helper import run_ranks
from fake_sglang import FakeServer, answer
from hf_models import save_model
from safetensors.torch import load_file
from served import save_served_model, write_served_task
from tiny_trainer import STEP

from megatron_dapo import loop
from megatron_dapo.distributed.collectives import broadcast_object, gather_to_rank0
from megatron_dapo.rollout.replay import load_rollouts
from megatron_dapo.servers import publish as publishing
from megatron_dapo.servers.control import failures
from megatron_dapo.servers.engine import SglangEngine
from megatron_dapo.servers.fp8 import LARGEST, QUANTISED, dequantize
from megatron_dapo.training.arguments import parse
from megatron_dapo.training.probe import policy_of
from megatron_dapo.training.setup import build_trainer
from megatron_dapo.types import InputError


class WeightServer(FakeServer):
    """Generates when it is not paused, with the version it was last given. ``says`` overrides what it says of its version;
    ``refuses`` is how often it answers 400 to a path."""

    def __init__(self, says: str | None = None, **refuses: int) -> None:
        super().__init__(self._answer)
        self.version, self.says, self.refuses = "default", says, refuses
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.on_continue: Any = lambda: None
        self.paused = False

    async def _answer(self, body: dict[str, Any], count: int) -> web.StreamResponse:
        while self.paused:
            await asyncio.sleep(0.005)
        seed, start = body["sampling_params"]["sampling_seed"], len(body["input_ids"])
        tokens = [(seed * 7 + start + i) % 20 + 3 for i in range(body["sampling_params"]["max_new_tokens"])]
        return web.json_response(answer(tokens, version=self.version))

    async def _other(self, request: web.Request) -> web.StreamResponse:
        path, body = request.path, await request.json() if request.method == "POST" else {}
        if path == "/model_info":
            return web.json_response({"weight_version": self.says or self.version})
        if request.method == "POST":
            self.told.append((path.removeprefix("/"), body))
        if self.refuses.get(path.removeprefix("/"), 0) > 0:
            self.refuses[path.removeprefix("/")] -= 1
            return web.json_response({"success": False, "message": "busy"}, status=400)
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
            self.on_continue() if not self.paused else None
        self.version = body.get("weight_version") or self.version
        return await super()._other(request)

    def paths(self) -> list[str]:
        return [path for path, _ in self.told]


def engine_of(folder: Path, checkpoint: Path, url: str, *flags: str) -> tuple[Any, SglangEngine]:
    """A trainer of ``checkpoint`` that publishes to ``url``; version and reach are all that is proved."""
    step = [w for k, v in STEP.items() if k != "vocab_size" for w in ("--" + k.replace("_", "-"), str(v))]
    servers = ["--rollout-engine", "sglang", "--rollout-server-urls", url, "--no-weight-probe"]
    run = ["--run-dir", str(folder / "run"), "--save-interval", "0", "--make-vocab-size-divisible-by", "16"]
    args, options = parse([*step, *run, *servers, "--hf-checkpoint", str(checkpoint), *flags])
    trainer = build_trainer(args, options)
    return trainer, SglangEngine(args, options, policy_of(trainer), lambda ids: "", lambda text: None)


class Wire:
    """Stands where the broadcasts go: keeps the bytes of every bucket."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        publishing.join_foreign_group = lambda *_: "group"  # type: ignore[assignment]
        publishing.leave_foreign_group = lambda _: None
        publishing.begin_broadcast = self.send  # type: ignore[assignment]

    def send(self, flat: torch.Tensor, group: Any) -> Wire:
        self.sent.append(flat.clone())
        return self

    def is_completed(self) -> bool:
        return True

    def take(self) -> list[torch.Tensor]:
        """What was sent since the last call."""
        sent, self.sent = self.sent, []
        return sent


def unpack(bodies: list[dict[str, Any]], sent: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that the bodies announce."""
    found: dict[str, torch.Tensor] = {}
    for body, flat in zip(bodies, sent, strict=True):
        offset = 0
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            kind = getattr(torch, dtype)
            size = math.prod(shape) * kind.itemsize
            assert name not in found
            found[name] = flat[offset : offset + size].view(kind).view(shape)
            offset += size
        assert offset == flat.numel()
    return found


def arrived(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], fp8: bool) -> None:
    """Every tensor, exactly, or within half a step of e4m3 with the scale of its present block."""
    small = {name for name in expected if fp8 and name.endswith(QUANTISED)}
    assert found.keys() == expected.keys() | {f"{name}_scale_inv" for name in small}
    assert bool(small) is fp8
    for name, want in expected.items():
        if name not in small:
            assert torch.equal(found[name], want), name
            continue
        scale = found[f"{name}_scale_inv"]
        assert scale.max().item() == pytest.approx(want.abs().max().item() / LARGEST, rel=1e-6), name
        step = torch.maximum(want.abs() / 16, scale.max() * 2.0**-10)
        assert bool(((dequantize(found[name], scale) - want).abs() <= 1.001 * step).all()), name


PP2 = ("--pipeline-model-parallel-size", "2")


@pytest.mark.parametrize(
    ("ranks", "flags"), [(1, ()), (1, ("--rollout-fp8",)), (2, PP2)], ids=["fp32", "fp8", "two stages"]
)
def test_every_publication_carries_the_weights_of_that_moment(tmp_path, ranks, flags):
    """Weights that double from one to the next, in several buckets: nothing of the first is in the second, its scales
    neither. The last bucket of the last stage alone carries the version; who generates next has it."""
    save_model(tmp_path / "hf", "qwen2", hidden_size=128, intermediate_size=1024)
    loaded = load_file(tmp_path / "hf/model.safetensors")

    def check(server: WeightServer, found: list[dict[str, Any]], sent: list[torch.Tensor], version: int) -> None:
        versions, flushes = ([body[key] for body in found] for key in ("weight_version", "flush_cache"))
        expected = {name: tensor * 2.0**version for name, tensor in loaded.items()}
        arrived(unpack(found, sent), expected, "--rollout-fp8" in flags)
        assert len(found) > 1
        assert versions == [None] * (len(found) - 1) + [str(version)] and server.version == str(version)
        assert flushes == [False] * (len(found) - 1) + [True]
        joins, updates = ["init_weights_update_group"] * ranks, ["update_weights_from_distributed"] * len(found)
        order = ["pause_generation", "flush_cache", *(joins if version == 0 else []), "begin_weight_update", *updates]
        assert server.paths() == [*order, "end_weight_update", "continue_generation"]

    def work() -> None:
        server, wire = WeightServer(), Wire()
        with server if dist.get_rank() == 0 else contextlib.nullcontext():
            url = broadcast_object(server.url)
            words = ("--weight-bucket-mb", "1", *flags)
            trainer, engine = engine_of(tmp_path / str(dist.get_rank()), tmp_path / "hf", url, *words)
            known: list[int] = []
            server.on_continue = lambda: known.append(engine.weight_version)
            for version in range(3):
                server.told = []
                engine.publish(version)
                sent = [bucket for part in gather_to_rank0(wire.take()) for bucket in part]
                if engine.fleet:
                    bodies = [body for path, body in server.told if path == "update_weights_from_distributed"]
                    check(server, bodies, sent, version)
                    assert known == list(range(version + 1)) and engine.fleet.serving()
                with torch.no_grad():
                    for p in trainer.model[0].parameters():
                        p.mul_(2)
            dist.barrier()
            engine.publisher.targets = []  # nothing real was joined
            engine.close()

    run_ranks(work, ranks)


def test_a_server_that_says_another_version_gets_no_request(tmp_path):
    """What was published is 3. It is marked failed three times, then the run stops with the reason."""
    save_model(tmp_path / "hf", "qwen2")

    def work() -> str:
        with WeightServer(says="2") as server:
            Wire()
            _, engine = engine_of(tmp_path, tmp_path / "hf", server.url, "--server-health-interval-s", "0.05")
            with pytest.raises(InputError) as caught:
                engine.publish(3)
            assert engine.fleet.serving() == []
            engine.close()
            return str(caught.value)

    assert "says its weights are version 2, published was 3" in run_ranks(work, 1)[0]


@pytest.mark.parametrize("refusals", [0, 1, 3, 4, 100])
def test_a_refused_flush_is_tried_again_where_it_was_refused(refusals):
    """A server that has requests to settle says no; four tries here."""
    with WeightServer(flush_cache=refusals) as busy, WeightServer() as idle:
        answers = publishing.flush([busy.url, idle.url], tries=4, first_wait_s=0.001)
        assert busy.paths() == ["flush_cache"] * min(refusals + 1, 4) and idle.paths() == ["flush_cache"]
        assert failures(answers).keys() == ({busy.url} if refusals >= 4 else set())


@pytest.mark.parametrize(("mode", "stale"), [("sync", 0), ("one_step_off", 1), ("async", 2)])
def test_samples_say_which_weights_wrote_them(tmp_path, monkeypatch, mode, stale):
    """The whole loop: servers have version s when step s is generated at the latest, samples are as old as the mode allows
    and as the metric says, and the last update is published too."""
    save_served_model(tmp_path / "hf")
    server = WeightServer()
    recipe = tmp_path / "task"

    def work() -> list[str]:
        monkeypatch.setattr(loop, "shut_down", lambda: None)  # the rank goes on behind it
        with server:
            few = {"num_rollout": 4, "dynamic_sampling": False, "dump_rollouts": True, "save_interval": 0}
            weights = {"rollout_mode": mode, "weight_transport": "disk", "weight_probe": False}
            written = write_served_task(recipe, tmp_path / "hf", [server.url], **few, **weights)
            with contextlib.redirect_stdout(None):
                loop.train(*parse([str(written)]))
            return [body["weight_version"] for path, body in server.told if path == "update_weights_from_disk"]

    assert run_ranks(work, 1)[0] == ["0", "1", "2", "3", "4"]
    rows = [json.loads(line) for line in (recipe / "run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for step, row in enumerate(rows):
        samples = [s for group in load_rollouts(recipe / "run/rollouts", step) for s in group.samples]
        behind = [step - sample.weight_version for sample in samples]
        assert min(behind) >= 0 and max(behind) <= min(stale, step)
        assert row["rollout/staleness/max"] == max(behind)
        assert row["rollout/staleness/mean"] == pytest.approx(sum(behind) / len(behind))
