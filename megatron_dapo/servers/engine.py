"""SGLang servers as the engine of a run: fleet, client and publisher in one.

Every rank has an engine. Rank 0 asks (``generate``); the others wait in ``follow`` and take part when weights have to be
published again in the middle of a step, because no server that held them is left.
"""

from __future__ import annotations

import contextlib
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_dapo.config import Options
from megatron_dapo.distributed.collectives import broadcast_object, on_rank0
from megatron_dapo.rollout.engine import Decode, Note, Policy
from megatron_dapo.servers import fp8
from megatron_dapo.servers.client import SglangClient
from megatron_dapo.servers.control import ServerError, call
from megatron_dapo.servers.fleet import Fleet
from megatron_dapo.servers.policy_weights import PolicyWeights
from megatron_dapo.servers.publish import Publisher
from megatron_dapo.servers.verify import Verifier
from megatron_dapo.types import InputError, Request, Sample, SamplingParams, Sums

RARE = ("rollout/retries", "rollout/rerouted", "rollout/resumed")
"""Counts that are 0 in a step where it did not happen."""


class SglangEngine:
    """``rollout.engine.Engine`` on SGLang servers. ``decode`` turns ids into text (rank 0)."""

    def __init__(
        self, args: Namespace, options: Options, policy: Policy, decode: Decode | None, note: Note = print
    ) -> None:
        self.options = options
        self.fleet = on_rank0(lambda: self._start_fleet(args, note))
        self.client: SglangClient | None = None
        if self.fleet:
            assert decode is not None
            self.client = SglangClient(self.fleet, options.server, decode, lambda: self.weight_version, args.vocab_size)
        self.asleep = False
        weights = PolicyWeights(policy, args.hf_checkpoint, options.publish.rollout_fp8)
        self.verifier = Verifier(weights, options.publish, options.server.rollout_num_gpus_per_engine, _dtype(args))
        exchange = f"{args.run_dir}/weights"
        self.publisher = Publisher(weights, exchange, options.publish, self.fleet, self.verifier)

    def _start_fleet(self, args: Namespace, note: Note) -> Fleet:
        """The servers, up."""
        fleet = make_fleet(args, self.options)
        fleet.note = note
        try:
            fleet.start()
        except BaseException:
            fleet.close()
            raise
        return fleet

    @property
    def weight_version(self) -> int:
        """The version that the servers hold; -1 before the first publication."""
        return self.publisher.version

    # --- generation: rank 0 asks -----------------------------------------------------------------------------------

    def generate(
        self, requests: list[Request], params: SamplingParams, on_finish: Callable[[int], None] | None = None
    ) -> list[Sample]:
        """One sample per request, in order. Rank 0 only."""
        assert self.client is not None
        return self.client.generate(requests, params, self._find_server, on_finish)

    def _find_server(self) -> None:
        """No server serves. While the other ranks follow, the weights are published again; beside training, the next
        publication is waited for."""
        assert self.fleet is not None
        if self.options.overlap.rollout_mode == "sync":
            broadcast_object("publish")
            self.publish(self.weight_version)
            return
        deadline = time.monotonic() + self.options.server.server_start_timeout_s
        while not self.fleet.serving():
            if time.monotonic() > deadline:
                raise InputError(f"no SGLang server got weights in {self.options.server.server_start_timeout_s:g} s")
            time.sleep(0.05)

    def follow(self) -> None:
        """Every rank but 0: take part in what rank 0 needs until it releases us."""
        while broadcast_object(None) == "publish":
            self.publish(self.weight_version)

    def release(self) -> None:
        """Rank 0: let the others go on with training; servers on the trainer's GPUs make room first."""
        if self.options.publish.colocate:
            self._sleep()
        broadcast_object(None)

    def _sleep(self) -> None:
        """The servers free their memory, weights included: they hold none until the next publication."""
        assert self.fleet is not None
        self.fleet.watch(False)  # without a cache they would fail their health checks
        for server in self.fleet.serving():
            try:
                call(server.url, "/release_memory_occupation", {})
            except ServerError as error:
                self.fleet.discard(server, str(error))
        self.fleet.published([])
        self.asleep = True

    def _wake(self) -> None:
        """The servers take their memory back."""
        assert self.fleet is not None
        for server in self.fleet.healthy():
            try:
                call(server.url, "/resume_memory_occupation", {})
            except ServerError as error:
                self.fleet.discard(server, str(error))
        self.fleet.watch(True)
        self.asleep = False

    # --- publication: every rank takes part ------------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Put the trainer's weights onto every server as ``version``; collective.

        Raises:
            InputError: no server took them.
        """
        if self.asleep:
            self._wake()
        self.publisher.publish(version)

    # --- the rest --------------------------------------------------------------------------------------------------

    def report(self) -> Sums:
        """Retries, losses, cached tokens and the probe's difference since the last call."""
        if self.client is None:
            return {}
        counts, self.client.counts = self.client.counts, {}
        probe, self.verifier.difference = self.verifier.difference, {}
        found = {name: (total, of or 1.0) for name, (total, of) in counts.items()}
        return dict.fromkeys(RARE, (0.0, 1.0)) | found | probe

    def close(self) -> None:
        """Leave the groups and stop the servers that are ours."""
        with contextlib.suppress(Exception):  # the end of a run, perhaps after an error that matters more
            self.publisher.leave()
        if self.fleet:
            self.fleet.close()


def make_fleet(args: Namespace, options: Options) -> Fleet:
    """The servers that the options name, not started yet."""
    logs, flags = Path(args.run_dir, "logs"), args.sglang_flags
    if options.publish.rollout_fp8:
        flags = fp8.server_flags() | flags
    if options.publish.colocate and torch.cuda.is_available():
        flags = {"enable-memory-saver": None} | flags
    return Fleet.of(options.server, args.hf_checkpoint, _dtype(args), flags, logs, args.seed)


def _dtype(args: Namespace) -> str:
    return "bfloat16" if args.bf16 else "float32"
