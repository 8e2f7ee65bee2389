"""Proof after a publication: every server says its version, gives the trainer's log-probs, and has the trainer's bytes."""

from __future__ import annotations

import torch

from megatron_dapo.config import PublishOptions
from megatron_dapo.distributed.collectives import from_rank0
from megatron_dapo.servers.control import ServerError, call, logprobs_of
from megatron_dapo.servers.policy_weights import PolicyWeights
from megatron_dapo.types import Sums, merge_sums

PROBE_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25, "fp8": 1.0}
"""Largest difference of a log-prob between trainer and server after a publication, in nats, by the servers' numbers."""

Failed = dict[str, str]
"""Servers that failed, and why."""


class Verifier:
    """Compares servers of ``tp_size`` ranks in ``dtype`` with the trainer. Lives on every rank; ``difference`` is the probe's,
    for the step's metrics (rank 0)."""

    def __init__(self, weights: PolicyWeights, options: PublishOptions, tp_size: int, dtype: str) -> None:
        self.weights, self.options, self.tp_size = weights, options, tp_size
        given = options.weight_probe_tolerance
        self.tolerance = PROBE_TOLERANCE["fp8" if options.rollout_fp8 else dtype] if given is None else given
        self.difference: Sums = {}

    def verify(self, urls: list[str], version: int) -> Failed:
        """Servers that do not hold what the trainer holds; collective, the same on every rank."""
        probe = self.weights.policy.probe
        tokens = probe.tokens if self.options.weight_probe else []
        expected = probe.logprobs() if tokens else []
        sums = self._expected_checksums(urls) if self.options.weight_checksum else {}

        def failures() -> Failed:
            found = {
                url: self._differs(url, version, tokens, expected) or (other_tensors(url, sums) if sums else "")
                for url in urls
            }
            return {url: why for url, why in found.items() if why}

        return from_rank0(failures)

    def _expected_checksums(self, urls: list[str]) -> dict[str, list[str]]:
        """The trainer's; on GPUs, where SGLang hashes otherwise, those of the first server, which all others must have."""
        if not torch.cuda.is_available():
            return self.weights.checksums(self.tp_size)
        return from_rank0(lambda: checksums_of(urls[0]))

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
        self.difference = merge_sums(self.difference, {"mismatch/probe/max": (largest, 1.0)})
        if largest <= self.tolerance:
            return ""
        return (
            f"{url}: log-probs of the probe differ by {largest:.3g} from the trainer's after the publication of version "
            f"{version}, allowed is {self.tolerance:g} (--weight-probe-tolerance); see docs/weight_sync.md"
        )


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
