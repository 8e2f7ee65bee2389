"""Publication: the trainer's weights onto every SGLang server, all of them or none, and proof that they arrived.

    pause -> join groups -> begin -> buckets of every pipeline stage -> end -> version, checksum -> continue -> log-prob probe

Every rank takes part in gathering; the first rank of a stage sends what the stage has, over a process group of its own with
all servers' ranks; rank 0 talks to the servers about everything else. Replies are watched while tensors travel: a server
that refuses a bucket never joins its broadcast, which would otherwise wait for it for ever. Servers that fail are marked failed
(``Fleet.discard``) and the publication is repeated with those that are left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from megatron.core import mpu

from megatron_dapo.config import PublishOptions
from megatron_dapo.distributed.collectives import (
    abandon_foreign_group,
    backend_of_this_machine,
    begin_broadcast,
    from_rank0,
    join_foreign_group,
    leave_foreign_group,
    share_dicts,
)
from megatron_dapo.distributed.launcher import free_port
from megatron_dapo.servers.buckets import Bucket, buckets
from megatron_dapo.servers.control import begin_each, call_each, failures, outcome, pause, resume
from megatron_dapo.servers.fleet import Fleet
from megatron_dapo.servers.policy_weights import PolicyWeights
from megatron_dapo.servers.verify import Failed, Verifier
from megatron_dapo.types import InputError
from megatron_dapo.weights.gather import stage_head

ATTEMPTS = 3
"""Publications repeated after servers failed, before the run stops."""

CLEAN_UP_S = 10.0
"""Seconds that a server gets to leave a broken publication."""


@dataclass(frozen=True)
class Target:
    """A server as every rank knows it; ``offset`` is the first of its ``gpus`` ranks in the group. A server that was lost and
    came back has another ``life``, and knows of no group."""

    url: str
    gpus: int
    offset: int
    life: int


class Publisher:
    """Lives on every rank; ``publish`` is collective. ``exchange`` is a folder for weights that travel by disk. ``fleet`` is
    rank 0's, None elsewhere. ``version`` is what the servers hold, -1 before the first publication."""

    def __init__(
        self, weights: PolicyWeights, exchange: str, options: PublishOptions, fleet: Fleet | None, verifier: Verifier
    ) -> None:
        self.weights, self.exchange, self.options, self.fleet = weights, exchange, options, fleet
        self.verifier = verifier
        self.version = -1
        self.targets: list[Target] = []
        self.group: dist.ProcessGroup | None = None
        self.group_name = ""
        self.sent_bytes = 0

    def publish(self, version: int) -> None:
        """Put the weights onto all healthy servers as ``version``, which is ``self.version`` before any server goes on.

        Raises:
            InputError: no server holds them after all attempts; the message has the servers' reasons.
        """
        failed: Failed = {}
        for _ in range(ATTEMPTS):
            targets = self._healthy(failed)
            with self.fleet.unwatched() if self.fleet else contextlib.nullcontext():
                failed = self._attempt(targets, version)
            if self.fleet and failed:
                given_up = [server for server in self.fleet.servers if server.url in failed]
                for server in given_up:
                    self.fleet.discard(server, failed[server.url])
                self.fleet.let_go(given_up)
            if not failed:
                if self.fleet:
                    urls = {target.url for target in targets}
                    self.fleet.published([server for server in self.fleet.servers if server.url in urls])
                return
        raise InputError(f"the weights could not be published: {'; '.join(failed.values())}")

    def _healthy(self, failed: Failed) -> list[Target]:
        """The servers to publish to, known to every rank; waits for one where there is none."""

        def healthy() -> list[Target]:
            assert self.fleet is not None
            try:
                self.fleet.wait_for_one()
            except InputError as raised:
                why = "; ".join(failed.values())
                raise InputError(f"{raised}{'; the last publication failed: ' + why if why else ''}") from raised
            targets, offset = [], 1
            for server in self.fleet.healthy():
                targets.append(Target(server.url, server.gpus, offset, server.life))
                offset += server.gpus
            return targets

        return from_rank0(healthy)

    def _attempt(self, targets: list[Target], version: int) -> Failed:
        """One publication; the servers that failed, on every rank."""
        urls = [target.url for target in targets]
        failed = from_rank0(lambda: self._pause(urls))
        if not failed:
            by_disk = self.options.weight_transport == "disk"
            failed = self._by_disk(urls, version) if by_disk else self._by_broadcast(targets, version)
        if failed:
            self.leave()  # nobody goes on: half of the weights may be new
            return failed
        self.version = version
        failed = from_rank0(lambda: _why(resume(urls)))
        return failed or self.verifier.verify(urls, version)

    def _by_broadcast(self, targets: list[Target], version: int) -> Failed:
        urls = [target.url for target in targets]
        failed: Failed = {}
        if targets != self.targets:
            self.leave()
            failed = self._join(targets)
        failed = failed or from_rank0(lambda: _why(call_each(urls, "/begin_weight_update", {})))
        if failed:
            return failed
        with self.weights.complete():
            failed = self._send_all_stages(urls, version)
        ended = from_rank0(lambda: _why(call_each(urls, "/end_weight_update", {}, CLEAN_UP_S)))
        return failed or ended

    def _by_disk(self, urls: list[str], version: int) -> Failed:
        """Through a checkpoint that trainer and servers both see; it is gone afterwards."""
        folder = f"{self.exchange}/version_{version:06d}"
        self.weights.save(folder)
        body = {
            "model_path": os.path.abspath(folder),
            "weight_version": str(version),
            "flush_cache": self.options.weight_update_mode != "in_place",
        }
        timeout = self.options.weight_update_timeout_s
        failed = from_rank0(lambda: _why(call_each(urls, "/update_weights_from_disk", body, timeout)))
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        return failed

    def _pause(self, urls: list[str]) -> Failed:
        """Stop decoding; caches of the old weights are gone afterwards, unless the mode is to keep them."""
        failed = _why(pause(urls, self.options.weight_update_mode))
        if failed or self.options.weight_update_mode == "in_place":
            return failed
        return _why(flush(urls))

    # --- groups ----------------------------------------------------------------------------------------------------

    def _join(self, targets: list[Target]) -> Failed:
        """One group for every pipeline stage, made one after the other: its head and all servers' ranks."""
        self.targets = targets
        for stage in range(mpu.get_pipeline_model_parallel_world_size()):
            mine: Failed = {}
            if stage == mpu.get_pipeline_model_parallel_rank() and stage_head():
                mine = self._join_as_head(targets)
            if failed := share_dicts(mine):
                return failed
        return {}

    def _join_as_head(self, targets: list[Target]) -> Failed:
        size, port = targets[-1].offset + targets[-1].gpus, free_port()
        self.group_name = f"weights_{secrets.token_hex(8)}"  # a trainer before us may have left one of a plainer name
        urls = [target.url for target in targets]
        address = address_towards(urls[0])
        timeout = self.options.weight_update_timeout_s

        def invitation(index: int) -> dict[str, Any]:
            return {
                "master_address": address,
                "master_port": port,
                "rank_offset": targets[index].offset,
                "world_size": size,
                "group_name": self.group_name,
                "backend": backend_of_this_machine(),
            }

        pool = ThreadPoolExecutor(len(urls) + 1)
        replies = begin_each(pool, urls, "/init_weights_update_group", invitation, timeout)
        joined = pool.submit(join_foreign_group, address, port, size, self.group_name, timeout)
        failed = _watch(replies, joined.done, timeout)
        pool.shutdown(wait=False)
        if failed:
            return failed
        self.group = joined.result()
        return {}

    def leave(self) -> None:
        """Close the groups, on both sides."""
        if self.targets and stage_head():
            urls = [target.url for target in self.targets]
            with ThreadPoolExecutor(len(urls)) as pool:
                body = {"group_name": self.group_name}
                replies = begin_each(pool, urls, "/destroy_weights_update_group", body, CLEAN_UP_S)
                if self.group is not None:
                    leave_foreign_group(self.group)
                for reply in replies.values():
                    outcome(reply)  # whatever a server says, it is asked to join a new group
        self.group, self.targets = None, []

    # --- sending ---------------------------------------------------------------------------------------------------

    def _send_all_stages(self, urls: list[str], version: int) -> Failed:
        """The stages take turns: all servers have to see all broadcasts in one order."""
        stages = mpu.get_pipeline_model_parallel_world_size()
        for stage in range(stages):
            mine: Failed = {}
            if stage == mpu.get_pipeline_model_parallel_rank():
                mine = self._send_stage(urls, version if stage == stages - 1 else None)
            if failed := share_dicts(mine):
                return failed
        return {}

    def _send_stage(self, urls: list[str], version: int | None) -> Failed:
        """Gather this stage's tensors and send them, gathering a bucket while the one before it travels. The last bucket
        carries the ``version``. After a failure the rest is gathered, for the other ranks are in it, and dropped."""
        failed: Failed = {}
        flight: _Flight | None = None
        pool = ThreadPoolExecutor(len(urls))
        for bucket in buckets(self.weights.tensors(), self.options.weight_bucket_mb * 2**20):
            if flight and not failed:
                failed = flight.land()
            if not failed:
                body = self._announce(bucket, str(version) if bucket.last and version is not None else None)
                flight = _Flight(pool, urls, body, bucket, self.group, self.options.weight_update_timeout_s)
                self.sent_bytes += bucket.flat.numel()
        if flight and not failed:
            failed = flight.land()
        pool.shutdown(wait=False)  # after a failure nobody waits for the replies of the others
        if flight and failed and self.group is not None:
            abandon_foreign_group(self.group, flight.work)
            self.group = None
        return failed

    def _announce(self, bucket: Bucket, version: str | None) -> dict[str, Any]:
        keeps_caches = self.options.weight_update_mode == "in_place"
        return {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": self.group_name,
            "load_format": "flattened_bucket",
            "flush_cache": version is not None and not keeps_caches,
            "weight_version": version,
        }


class _Flight:
    """A bucket on its way."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        urls: list[str],
        body: dict[str, Any],
        bucket: Bucket,
        group: Any,
        timeout_s: float,
    ) -> None:
        self.bucket, self.timeout_s = bucket, timeout_s
        self.replies = begin_each(pool, urls, "/update_weights_from_distributed", body, timeout_s)
        self.work = begin_broadcast(bucket.flat, group)

    def land(self) -> Failed:
        """Wait until everybody has it; those that refused, died or said nothing."""
        return _watch(self.replies, self.work.is_completed, self.timeout_s)


def _watch(replies: dict[str, Future[Any]], ours_done: Callable[[], bool], timeout_s: float) -> Failed:
    """Wait for all replies and for our half of the exchange; return at the first refusal, with all that are in by then."""
    deadline = time.monotonic() + timeout_s
    while True:
        answered = {url: outcome(reply) for url, reply in replies.items() if reply.done()}
        if failed := _why(answered):
            return failed
        if len(answered) == len(replies) and ours_done():
            return {}
        if time.monotonic() > deadline:
            silent = sorted(replies.keys() - answered.keys()) or list(replies)
            return {url: f"{url}: no answer in {timeout_s:g} s during a publication" for url in silent}
        pending = [reply for reply in replies.values() if not reply.done()]
        wait_for(pending, timeout=0.002) if pending else time.sleep(0.0005)


def flush(urls: list[str], tries: int = 8, first_wait_s: float = 0.05) -> dict[str, Any]:
    """Empty the caches of prefixes; a server that still has requests to settle answers 400 and is asked again, later each
    time."""
    answers = call_each(urls, "/flush_cache", {})
    for attempt in range(tries - 1):
        refused = list(failures(answers))
        if not refused:
            break
        time.sleep(first_wait_s * 2**attempt)
        answers |= call_each(refused, "/flush_cache", {})
    return answers


def address_towards(url: str) -> str:
    """The address of this machine that the server at ``url`` can reach."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        address: str = probe.getsockname()[0]
        return address


def _why(answers: dict[str, Any]) -> Failed:
    return {url: str(error) for url, error in failures(answers).items()}
