"""Extra memory and time of log-probability and entropy from vocabulary-split logits: ours, and the naive way.

Peak of what is allocated beside the logits themselves, forward and backward, in units of one logit shard [T, V / tp]; aim:
at most 1.2. Naive is ``log_softmax`` in fp32, a gather, and the entropy of its exponentials.

    python benchmarks/logprobs.py [--tokens 2048] [--vocab 32000]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from pairs import compare, spread

from megatron_dapo.training.logprobs import logprobs_and_entropy


def peak_bytes(work: Callable[[], object]) -> int:
    """Most memory allocated at a time during ``work``, beyond what was there before, by torch's own accounts."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    total = peak = 0
    for event in sorted(memory_events(recorded), key=lambda e: e[0]):
        total += event[1]
        peak = max(peak, total)
    return peak


def memory_events(recorded: object) -> list[tuple[int, int]]:
    """(time, bytes) of every allocation and release."""
    events = recorded.profiler.kineto_results.events()  # type: ignore[attr-defined]
    return [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]


def main() -> None:
    """Print peaks and the ratio of times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    torch.manual_seed(0)
    targets = torch.randint(0, given.vocab, (given.tokens,))
    for dtype in (torch.float32, torch.bfloat16):
        leaf = torch.randn(given.tokens, given.vocab).to(dtype).requires_grad_()
        shard = leaf.numel() * leaf.element_size()

        def ours(leaf: torch.Tensor = leaf) -> None:
            logp, entropy = logprobs_and_entropy(leaf, targets, 1.0, given.vocab, None)
            torch.autograd.grad((logp + 0.01 * entropy).sum(), leaf)

        def naive(leaf: torch.Tensor = leaf) -> None:
            every = torch.log_softmax(leaf.float(), -1)
            logp, entropy = every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every).sum(-1)
            torch.autograd.grad((logp + 0.01 * entropy).sum(), leaf)

        for name, work in (("ours", ours), ("naive", naive)):
            print(f"{dtype} {name}: peak {peak_bytes(work) / shard:.2f} logit shards beside the logits")
        ratios = compare(f"{dtype} naive over ours, seconds", ours, naive, given.pairs)
        print(f"ratio {spread(ratios)} at {given.tokens} tokens x {given.vocab} ids")


if __name__ == "__main__":
    main()
