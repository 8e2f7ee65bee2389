"""Time of a plain PyTorch step over our Megatron step: same shape, same 64 ragged sequences, same loss; aim: 1 and more.

The plain step is what one would write without Megatron: transformers' model, log-softmax and gather, the clipped
token-mean loss, clip_grad_norm_, torch.optim.AdamW (fused). Once on the batch packed into one row (transformers makes the
block-diagonal mask from the positions), once right-padded, which is its faster way here.

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
    starts, ends = torch.from_numpy(prompt)[:, None], torch.from_numpy(prompt + response)[:, None]
    mask = (place >= starts - 1) & (place < ends - 1)
    weight = torch.from_numpy(advantage).float()[:, None]

    def ours() -> None:
        trainer.update(batch)

    def plain_step(ids: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor, **inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        logits = model(ids, use_cache=False, **inputs).logits
        logp = torch.log_softmax(logits[:, :-1].float(), -1).gather(2, ids[:, 1:, None]).squeeze(2)
        ratio = (logp + 5.5).exp()
        loss = -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.28) * weight)
        (torch.where(mask[:, :-1], loss, 0.0).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def padded() -> None:
        plain_step(ids, mask, weight, attention_mask=(place < ends).long())

    inside = place < ends
    row = {"ids": ids[inside][None], "mask": mask[inside][None], "position_ids": place.expand_as(ids)[inside][None]}
    row["weight"] = weight.expand_as(ids)[inside][None, :-1]

    def packed() -> None:
        plain_step(**row)

    for name, theirs, pairs in (("padded", padded, given.pairs), ("packed", packed, max(2, given.pairs // 3))):
        ratios = compare(f"plain PyTorch step ({name}) over Megatron step, seconds", ours, theirs, pairs)
        print(f"ratio {spread(ratios)}: {int(inside.sum())} tokens, {ids.numel()} with padding")
    profile = cProfile.Profile()
    profile.runcall(ours)
    print("where the Megatron step's time goes:")
    pstats.Stats(profile).sort_stats("tottime").print_stats(12)


if __name__ == "__main__":
    main()
