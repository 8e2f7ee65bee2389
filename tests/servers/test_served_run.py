"""A whole run whose server misbehaves on purpose: no reply of it ends the run or reaches the trainer. Needs no SGLang."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from aiohttp import web
from fake_sglang import FakeServer, answer, events_of, stream
from hf_models import save_model
from tiny import ALPHABET, MODEL, write_task

from megatron_dapo.rollout.replay import load_rollouts

ROOT = Path(__file__).parents[2]
VOCAB, EOS, BUDGET = len(dict.fromkeys(ALPHABET)) + 3, 1, 6
KINDS = [
    "an id of 2**40", "an id of the padding", "an id that is a float", "spans with a hole", "a stream that breaks off",
    "tokens after the stop id", "aborted behind a stop id", "aborted with the whole budget", "aborted in the middle",
    "aborted before the first token", "good",
]  # fmt: skip
FINISHED = {"aborted behind a stop id": [4, 5, EOS], "aborted with the whole budget": [6, 7, 8, 9, 10, 11]}


class Misbehaves:
    """Does one of KINDS to each request in turn, the first time it sees it, and notes what should become of it."""

    def __init__(self) -> None:
        self.server = FakeServer(self)
        self.turn, self.kinds = itertools.cycle(KINDS), {}  # type: ignore[var-annotated]
        self.expected: list[tuple[int, tuple[int, ...], str]] = []

    async def __call__(self, body: dict[str, Any], count: int) -> web.StreamResponse:
        seed, version = body["sampling_params"]["sampling_seed"], self.server.version
        assert 0 < body["sampling_params"]["max_new_tokens"] <= BUDGET
        first = seed not in self.kinds
        kind = self.kinds.setdefault(seed, next(self.turn) if first else "")
        whole = FINISHED.get(kind, [12, 13, 14, 15, EOS])
        if first:
            self.expected.append((int(version), tuple(whole), "stop" if EOS in whole else "length"))
            if kind in FINISHED:
                return web.json_response(answer(whole, "abort", version))
            if kind != "good":
                return self.misbehave(kind, whole, version)
        return web.json_response(answer(whole[BUDGET - body["sampling_params"]["max_new_tokens"] :], "stop", version))

    @staticmethod
    def misbehave(kind: str, whole: list[int], version: str) -> web.StreamResponse:
        wrong = {
            "an id of 2**40": answer([12, 2**40, EOS], "stop", version),
            "an id of the padding": answer([12, VOCAB, EOS], "stop", version),
            "an id that is a float": answer([12, 13.0, EOS], "stop", version),  # type: ignore[list-item]
            "spans with a hole": answer(
                [12, 13, EOS], "stop", version, weight_versions=[{"version": version, "start": 1, "end": 3}]
            ),
            "tokens after the stop id": answer([12, EOS, 13, 14], "abort", version),
            "aborted in the middle": answer(whole[:2], "abort", version),
            "aborted before the first token": answer([], "abort", version),
        }
        if kind in wrong:
            return web.json_response(wrong[kind])

        async def events() -> Any:
            yield events_of(answer(whole, "stop", version), [2], incremental=True)[0]

        return stream(events())


def test_a_run_with_a_server_that_misbehaves(tmp_path):
    save_model(
        tmp_path / "hf", "qwen2", vocab_size=VOCAB, hidden_size=64, intermediate_size=128, max_position_embeddings=256
    )
    ours = Misbehaves()
    with ours.server as server:
        recipe = write_task(
            tmp_path, **{**dict.fromkeys(MODEL), "vocab_size": None, "make_vocab_size_divisible_by": 16},
            hf_checkpoint=str(tmp_path / "hf"), rollout_engine="sglang", rollout_server_urls=[server.url],
            weight_transport="disk", weight_probe=False, rollout_concurrency=1, rollout_max_response_len=BUDGET,
            rollout_stop_token_ids=[EOS], dynamic_sampling=False, dump_rollouts=True, save_interval=0,
        )  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "megatron_dapo", "train", str(recipe)],
            capture_output=True, text=True, env=environment, timeout=500,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found: Counter[Any] = Counter()
    for step in range(2):
        for group in load_rollouts(tmp_path / "run/rollouts", step):
            found.update((s.weight_version, tuple(s.token_ids.tolist()), s.finish_reason) for s in group.samples)
            assert all(s.weight_version == step and s.spans == () for s in group.samples)
    assert found == Counter(ours.expected) and found.total() == 64
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    seen = Counter(ours.kinds.values())
    bad = sum(seen[kind] for kind in KINDS[:6])
    assert sum(row["rollout/retries"] for row in rows) == bad
    assert sum(row["rollout/resumed"] for row in rows) == sum(seen[kind] for kind in KINDS[8:10])
    assert all(row["rollout/lost"] == row["rollout/staleness/max"] == row["rollout/rerouted"] == 0 for row in rows)
