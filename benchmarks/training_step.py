"""Time of a plain PyTorch step over our Megatron step: same shape, same 64 ragged sequences, same loss; aim: 1 and more.

The plain step is what one would write without Megatron: transformers' model on the right-padded batch, log-softmax and
gather, the clipped token-mean loss, clip_grad_norm_, torch.optim.AdamW (fused).

    python benchmarks/training_step.py [--sequences 64] [--pairs 7]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats

from pairs import compare, spread
from policy import megatron_trainer, transformers_model


def main() -> None:
    """Time both, print the ratio and where our step's time goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=7)
    given = parser.parse_args()
    trainer = megatron_trainer()

    import numpy as np
    import torch

    from megatron_dapo.training.batch import build_minibatch
    from megatron_dapo.types import Trajectories

    rng = np.random.default_rng(0)
    n = given.sequences
    prompt, response = rng.integers(16, 64, n), rng.integers(32, 192, n)
    tokens = [rng.integers(2, 256, p + r) for p, r in zip(prompt, response, strict=True)]
    advantage = rng.normal(size=n)
    rows = Trajectories(
        tokens=tokens,
        prompt_lengths=prompt,
        rollout_logprobs=[np.full(r, -5.5, np.float32) for r in response],
        loss_mask=[np.ones(r, bool) for r in response],
        advantages=advantage,
        rewards=np.zeros(n),
        acc=np.zeros(n),
        group=np.arange(n) // 4,
        weight_version=np.zeros(n, np.int64),
    )
    batch = build_minibatch(rows, trainer.options, trainer.layout)
    model = transformers_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    longest = max(map(len, tokens))
    ids = torch.stack([torch.from_numpy(np.pad(t, (0, longest - len(t)))) for t in tokens])
    place = torch.arange(longest)[None]
    mask = (place >= torch.from_numpy(prompt)[:, None] - 1) & (place < torch.from_numpy(prompt + response)[:, None] - 1)
    old = torch.full(ids.shape, -5.5)
    weight = torch.from_numpy(advantage).float()[:, None]

    def ours() -> None:
        trainer.update(batch)

    def theirs() -> None:
        optimizer.zero_grad()
        logits = model(ids, attention_mask=(place < torch.from_numpy(prompt + response)[:, None]).long()).logits
        logp = torch.log_softmax(logits[:, :-1].float(), -1).gather(2, ids[:, 1:, None]).squeeze(2)
        ratio = (logp - old[:, 1:]).exp()
        loss = -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.28) * weight)
        (torch.where(mask[:, :-1], loss, 0.0).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    ratios = compare("plain PyTorch step over Megatron step, seconds", ours, theirs, given.pairs)
    print(f"ratio {spread(ratios)}: {sum(map(len, tokens))} tokens packed here, {ids.numel()} padded there")
    profile = cProfile.Profile()
    profile.runcall(ours)
    print("where the Megatron step's time goes:")
    pstats.Stats(profile).sort_stats("tottime").print_stats(12)


if __name__ == "__main__":
    main()
