"""Tokens a second of the embedded engine over transformers' ``generate``: same shape, batch, lengths; aim: 1.5 and more.

python benchmarks/sampling.py [--batch 64] [--new-tokens 64] [--pairs 7]
"""

from __future__ import annotations

import argparse

from pairs import compare, spread
from policy import megatron_trainer, transformers_model


def main() -> None:
    """Time both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=7)
    given = parser.parse_args()
    trainer = megatron_trainer()

    import torch

    from megatron_dapo.rollout.embedded import EmbeddedEngine
    from megatron_dapo.types import Prompt, Request, SamplingParams

    torch.manual_seed(1)
    prompts = torch.randint(2, 256, (given.batch, given.prompt_tokens))
    requests = [Request(Prompt(str(i), "", tuple(p), "", ""), i) for i, p in enumerate(prompts.tolist())]
    engine = EmbeddedEngine(trainer.model, trainer.inference, lambda ids: "", 256, given.batch)
    params = SamplingParams(given.new_tokens)
    other = transformers_model().eval()

    def ours() -> None:
        samples = engine.generate(requests, params)
        assert all(s.length == given.new_tokens for s in samples)

    @torch.inference_mode()
    def theirs() -> None:
        out = other.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=given.new_tokens,
            min_new_tokens=given.new_tokens,
            pad_token_id=0,
        )
        assert out.shape[1] == given.prompt_tokens + given.new_tokens

    ratios = compare("embedded engine over transformers generate, tokens/s", ours, theirs, given.pairs)
    print(
        f"ratio {spread(ratios)} at batch {given.batch}; the embedded engine returns log-probs as well, generate does not"
    )


if __name__ == "__main__":
    main()
