"""SGLang servers as the engine of a run: fleet, client and publisher in one; and servers alone, for ``serve``.

Every rank has an engine. Rank 0 asks (``generate``); the others wait in ``follow`` and take part when weights have to be
published again in the middle of a step, because no server that held them is left.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dapo.config import Options
from megatron_dapo.platform.collectives import broadcast_object
from megatron_dapo.platform.launcher import STOP_SIGNALS
from megatron_dapo.rollout.control import ServerError, call, logprobs_of
from megatron_dapo.rollout.servers import Fleet
from megatron_dapo.rollout.sglang import SglangClient
from megatron_dapo.training.probe import probe_logprobs, probe_tokens
from megatron_dapo.training.step import Trainer
from megatron_dapo.types import InputError, Request, Sample, SamplingParams, Sums, merge_sums
from megatron_dapo.weights import fp8
from megatron_dapo.weights.publish import Failed, Publisher

PROBE_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25, "fp8": 1.0}
"""Largest difference of a log-prob between trainer and server after a publication, in nats, by the servers' numbers."""

RARE = ("rollout/retries", "rollout/rerouted", "rollout/resumed")
"""Counts that are 0 in a step where it did not happen."""


class SglangEngine:
    """``rollout.engine.Engine`` on SGLang servers. ``decode`` turns ids into text (rank 0)."""

    def __init__(
        self,
        args: Namespace,
        options: Options,
        trainer: Trainer,
        decode: Callable[[list[int]], str] | None,
        note: Callable[[str], None] = print,
    ) -> None:
        self.options, self.trainer = options, trainer
        self.dtype = _dtype(args)
        self.weight_version = -1
        self.fleet = self._start_fleet(args, note)
        self.client: SglangClient | None = None
        if self.fleet:
            assert decode is not None
            self.client = SglangClient(self.fleet, options.server, decode, lambda: self.weight_version, args.vocab_size)
        self.asleep = False
        exchange = f"{args.run_dir}/weights"
        self.publisher = Publisher(
            trainer.model, args.hf_checkpoint, exchange, options.publish, self.fleet, trainer.inference, self.verify
        )
        self.probe_difference: Sums = {}

    def _start_fleet(self, args: Namespace, note: Callable[[str], None]) -> Fleet | None:
        """Rank 0's servers; a server that does not come up stops every rank."""
        fleet, error = None, None
        if dist.get_rank() == 0:
            fleet = _fleet(args, self.options)
            fleet.note = note
            try:
                fleet.start()
            except BaseException as raised:
                fleet.close()
                if not isinstance(raised, InputError):
                    raise
                error = raised
        if (refused := broadcast_object(error)) is not None:
            raise refused
        return fleet

    # --- generation: rank 0 asks -----------------------------------------------------------------------------------

    def generate(
        self, requests: list[Request], params: SamplingParams, on_finish: Callable[[int], None] | None = None
    ) -> list[Sample]:
        """One sample a request, in order. Rank 0 only."""
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
        self.publisher.publish(version, self._set_version)

    def _set_version(self, version: int) -> None:
        self.weight_version = version

    def verify(self, urls: list[str], version: int) -> Failed:
        """Servers that do not hold what the trainer holds; collective, the same on every rank."""
        tokens = probe_tokens(self.trainer) if self.options.publish.weight_probe else []
        expected = probe_logprobs(self.trainer, tokens) if tokens else []
        sums = self._expected_checksums(urls) if self.options.publish.weight_checksum else {}
        failed: Failed = {}
        if dist.get_rank() == 0:
            for url in urls:
                if why := self._differs(url, version, tokens, expected) or (other_tensors(url, sums) if sums else ""):
                    failed[url] = why
        return broadcast_object(failed)

    def _expected_checksums(self, urls: list[str]) -> dict[str, list[str]]:
        """The trainer's; on GPUs, where SGLang hashes otherwise, those of the first server, which all others must have."""
        if not torch.cuda.is_available():
            return self.publisher.checksums(self.options.server.rollout_num_gpus_per_engine)
        return checksums_of(urls[0]) if dist.get_rank() == 0 else {}

    def _differs(self, url: str, version: int, tokens: list[int], expected: list[float]) -> str:
        """What is wrong with a server's weights; empty where nothing is."""
        try:
            found = call(url, "/model_info")["weight_version"]
            if found != str(version):
                return f"{url} says its weights are version {found}, published was {version}"
            if not tokens:
                return ""
            largest = max(abs(a - b) for a, b in zip(logprobs_of(url, tokens), expected, strict=True))
        except (ServerError, KeyError, TypeError) as error:
            return f"{url}: the weights could not be verified ({error})"
        self.probe_difference = merge_sums(self.probe_difference, {"mismatch/probe/max": (largest, 1.0)})
        allowed = self.tolerance
        if largest <= allowed:
            return ""
        return (
            f"{url}: log-probs of the probe differ by {largest:.3g} from the trainer's after the publication of version "
            f"{version}, allowed is {allowed:g} (--weight-probe-tolerance); see docs/weight_sync.md"
        )

    @property
    def tolerance(self) -> float:
        """Largest difference the probe allows, in nats."""
        given = self.options.publish.weight_probe_tolerance
        if given is not None:
            return given
        return PROBE_TOLERANCE["fp8" if self.options.publish.rollout_fp8 else self.dtype]

    # --- the rest --------------------------------------------------------------------------------------------------

    def report(self) -> Sums:
        """Retries, losses, cached tokens and the probe's difference since the last call."""
        if self.client is None:
            return {}
        counts, self.client.counts = self.client.counts, {}
        probe, self.probe_difference = self.probe_difference, {}
        found = {name: (total, of or 1.0) for name, (total, of) in counts.items()}
        return dict.fromkeys(RARE, (0.0, 1.0)) | found | probe

    def close(self) -> None:
        """Leave the groups and stop the servers that are ours."""
        with contextlib.suppress(Exception):  # the end of a run, perhaps after an error that matters more
            self.publisher.leave()
        if self.fleet:
            self.fleet.close()


def checksums_of(url: str) -> dict[str, list[str]]:
    """A server's tensors: name -> checksum on each of its tensor-parallel ranks."""
    ranks = call(url, "/weights_checker", {"action": "checksum"}, timeout_s=600.0)["ranks"]
    ranks = sorted(ranks, key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
    return {name: [rank["checksums"][name] for rank in ranks] for name in ranks[0]["checksums"]}


def other_tensors(url: str, expected: dict[str, list[str]]) -> str:
    """The tensors whose checksum at a server is not the expected one; empty where there are none."""
    try:
        found = checksums_of(url)
    except (ServerError, KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        return f"{url}: the checksums could not be compared ({type(error).__name__} {error})"
    wrong = [name for name, sums in expected.items() if found.get(name) != sums]
    return (
        f"{url}: {len(wrong)} of {len(expected)} tensors are not the trainer's: {', '.join(wrong[:5])}" if wrong else ""
    )


def serve(args: Namespace) -> None:
    """``python -m megatron_dapo serve``: servers without a trainer, until a signal ends them.

    Raises:
        InputError: a server does not come up, or nothing says what to serve.
    """
    options = Options.from_args(args)
    if options.server.rollout_server_urls:
        raise InputError("serve starts servers: leave out --rollout-server-urls")
    if not args.hf_checkpoint:
        raise InputError("--hf-checkpoint is missing: give the folder of the Hugging Face checkpoint to serve")
    fleet = _fleet(args, options)
    ended = threading.Event()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: ended.set())
    try:
        fleet.start()
        print("serving at " + " ".join(server.url for server in fleet.servers), flush=True)
        ended.wait()
    finally:
        fleet.close()


def _fleet(args: Namespace, options: Options) -> Fleet:
    """The servers that the options name, not started yet."""
    logs, flags = Path(args.run_dir, "logs"), args.sglang_flags
    if options.publish.rollout_fp8:
        flags = fp8.server_flags() | flags
    if options.publish.colocate and torch.cuda.is_available():
        flags = {"enable-memory-saver": None} | flags
    return Fleet.of(options.server, args.hf_checkpoint, _dtype(args), flags, logs, args.seed)


def _dtype(args: Namespace) -> str:
    return "bfloat16" if args.bf16 else "float32"
