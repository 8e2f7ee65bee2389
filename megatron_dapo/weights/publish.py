"""Publication: the trainer's weights onto every SGLang server, all of them or none, and proof that they arrived.

    pause -> join groups -> begin -> buckets of every pipeline stage -> end -> version, checksum -> continue -> log-prob probe

Every rank takes part in gathering; the first rank of a stage sends what the stage has, over a process group of its own with
all servers' ranks; rank 0 talks to the servers about everything else. Replies are watched while tensors travel: a server
that refuses a bucket never joins its broadcast, which would otherwise wait for it for ever. Servers that fail are given up
(``Fleet.discard``) and the publication begins anew with those that are left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from megatron.core import mpu

from megatron_dapo.config import PublishOptions
from megatron_dapo.platform.collectives import (
    abandon_foreign_group,
    backend_of_this_machine,
    begin_broadcast,
    broadcast_object,
    join_foreign_group,
    leave_foreign_group,
    share_dicts,
)
from megatron_dapo.rollout.control import begin_each, call_each, failures, outcome, pause, resume
from megatron_dapo.rollout.servers import Fleet, free_port
from megatron_dapo.types import InputError
from megatron_dapo.weights.buckets import Bucket, buckets
from megatron_dapo.weights.checksum import checksums
from megatron_dapo.weights.fp8 import quantized
from megatron_dapo.weights.gather import gather_hf, save_hf, stage_head
from megatron_dapo.weights.hf_folder import load_config

ATTEMPTS = 3
"""Publications begun anew after servers failed, before the run stops."""

CLEAN_UP_S = 10.0
"""Seconds that a server gets to leave a broken publication."""

Failed = dict[str, str]
"""Servers that failed, and why."""


@dataclass(frozen=True)
class Target:
    """A server as every rank knows it; ``offset`` is the first of its ``gpus`` ranks in the group. A server that was lost and
    came back has another ``life``, and knows of no group."""

    url: str
    gpus: int
    offset: int
    life: int


class Publisher:
    """Lives on every rank; ``publish`` is collective. ``source`` is the Hugging Face folder the run began with, ``exchange`` a
    folder for weights that travel by disk. ``fleet`` is rank 0's, None elsewhere. ``settled`` is a context in which the
    weights are complete, ``verify`` (collective) finds servers that hold other weights than the trainer."""

    def __init__(
        self,
        model: list[Any],
        source: str,
        exchange: str,
        options: PublishOptions,
        fleet: Fleet | None,
        settled: Callable[[], contextlib.AbstractContextManager[Any]],
        verify: Callable[[list[str], int], Failed],
    ) -> None:
        self.model, self.source, self.exchange, self.options, self.fleet = model, source, exchange, options, fleet
        self.config = load_config(source)
        self.settled, self.verify = settled, verify
        self.targets: list[Target] = []
        self.group: dist.ProcessGroup | None = None
        self.group_name = ""
        self.sent_bytes = 0

    def publish(self, version: int, on_version: Callable[[int], None]) -> None:
        """Put the weights onto all healthy servers as ``version``. ``on_version`` is told before any server goes on.

        Raises:
            InputError: no server holds them after all attempts; the message has the servers' reasons.
        """
        failed: Failed = {}
        for _ in range(ATTEMPTS):
            targets = self._healthy(failed)
            with self.fleet.unwatched() if self.fleet else contextlib.nullcontext():
                failed = self._attempt(targets, version, on_version)
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
        targets, error = [], None
        if self.fleet:
            try:
                self.fleet.wait_for_one()
            except InputError as raised:
                why = "; ".join(failed.values())
                error = InputError(f"{raised}{'; the last publication failed: ' + why if why else ''}")
            offset = 1
            for server in self.fleet.healthy():
                targets.append(Target(server.url, server.gpus, offset, server.life))
                offset += server.gpus
        targets, error = broadcast_object((targets, error))
        if error is not None:
            raise error
        return targets

    def _attempt(self, targets: list[Target], version: int, on_version: Callable[[int], None]) -> Failed:
        """One publication; the servers that failed, on every rank."""
        urls = [target.url for target in targets]
        failed = self._on_rank0(lambda: self._pause(urls))
        if not failed:
            by_disk = self.options.weight_transport == "disk"
            failed = self._by_disk(urls, version) if by_disk else self._by_broadcast(targets, version)
        if failed:
            self.leave()  # nobody goes on: half of the weights may be new
            return failed
        on_version(version)
        failed = self._on_rank0(lambda: _why(resume(urls)))
        return failed or self.verify(urls, version)

    def _by_broadcast(self, targets: list[Target], version: int) -> Failed:
        urls = [target.url for target in targets]
        failed: Failed = {}
        if targets != self.targets:
            self.leave()
            failed = self._join(targets)
        failed = failed or self._on_rank0(lambda: _why(call_each(urls, "/begin_weight_update", {})))
        if failed:
            return failed
        with self.settled():
            failed = self._send_all_stages(urls, version)
        ended = self._on_rank0(lambda: _why(call_each(urls, "/end_weight_update", {}, CLEAN_UP_S)))
        return failed or ended

    def _by_disk(self, urls: list[str], version: int) -> Failed:
        """Through a checkpoint that trainer and servers both see; it is gone afterwards."""
        folder = f"{self.exchange}/version_{version:06d}"
        with self.settled():
            save_hf(self.model, self.source, folder)
        body = {
            "model_path": os.path.abspath(folder),
            "weight_version": str(version),
            "flush_cache": self.options.weight_update_mode != "in_place",
        }
        timeout = self.options.weight_update_timeout_s
        failed = self._on_rank0(lambda: _why(call_each(urls, "/update_weights_from_disk", body, timeout)))
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        return failed

    def _on_rank0(self, ask: Callable[[], Failed]) -> Failed:
        return broadcast_object(ask() if dist.get_rank() == 0 else None)

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
        for bucket in buckets(self._tensors(), self.options.weight_bucket_mb * 2**20):
            if flight and not failed:
                failed = flight.land()
            if not failed:
                body = self._announce(bucket, str(version) if bucket.last and version is not None else None)
                flight = _Flight(pool, urls, body, bucket, self.group, self.options.weight_update_timeout_s)
                self.sent_bytes += bucket.flat.numel()
        if flight and not failed:
            failed = flight.land()
        pool.shutdown(wait=False)  # after a failure nobody waits for the replies of the others
        if flight and failed:
            abandon_foreign_group(self.group, flight.work)
            self.group = None
        return failed

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        tensors = gather_hf(self.model, self.config, to_stage_head=True)
        return quantized(tensors) if self.options.rollout_fp8 else tensors

    def checksums(self, tp_size: int) -> dict[str, list[str]]:
        """What the checksums of servers with ``tp_size`` ranks must be, on every rank; collective."""
        with self.settled():
            return share_dicts(checksums(self._tensors(), tp_size))

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
