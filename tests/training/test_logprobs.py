"""Fused log-prob and entropy against float64 log_softmax, on one process and over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_helper import run_ranks
from tolerances import LINKS_AT_THE_ENDS, ulp

from megatron_dapo.training.logprobs import logprobs_and_entropy

VOCAB, PADDED = 21, 32


def make_logits(tokens: int = 7, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, padded] whose padded columns would swamp everything if they counted, and targets."""
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(tokens, PADDED, generator=g) * 3
    logits[:, VOCAB:] = 1e4
    return logits.to(dtype), torch.randint(0, VOCAB, (tokens,), generator=g)


def assert_near(
    got: torch.Tensor, want: torch.Tensor, logits: torch.Tensor, temperature: float, rtol: float = 0.0
) -> None:
    """As near as fp32 comes to a log-softmax of such logits; derivatives of it are of the size of 1 / temperature, and
    consist of two such numbers each."""
    bound = 2 * LINKS_AT_THE_ENDS * ulp(float(logits.detach()[:, :VOCAB].abs().max()) / temperature) / temperature
    torch.testing.assert_close(got.double(), want, atol=bound, rtol=rtol)


def reference(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log-prob, entropy and the gradient of ``objective`` by plain float64 autograd."""
    z = logits.detach().double().requires_grad_()
    logp = torch.log_softmax(z[:, :VOCAB] / temperature, dim=-1)
    chosen, entropy = logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)
    (grad,) = torch.autograd.grad(objective(chosen, entropy), z)
    return chosen.detach(), entropy.detach(), grad


def objective(logprob: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Something in which every token weighs differently, and both outputs count."""
    weight = torch.linspace(-1, 2, len(logprob), dtype=logprob.dtype)
    return (weight * logprob.exp()).sum() + (weight.flip(0) * entropy).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 3, 1024])
def test_equals_log_softmax_and_its_gradient(temperature: float, chunk: int) -> None:
    logits, targets = make_logits()
    logits.requires_grad_()
    before = logits.detach().clone()
    logprob, entropy = logprobs_and_entropy(logits, targets, temperature, VOCAB, None, chunk)
    want = reference(logits, targets, temperature)
    objective(logprob, entropy).backward()
    assert logprob.dtype == entropy.dtype == torch.float32
    assert_near(logprob, want[0], logits, temperature)
    assert_near(entropy, want[1], logits, temperature)
    assert logits.grad is not None
    assert_near(logits.grad, want[2], logits, temperature)
    assert torch.equal(logits.grad[:, VOCAB:], torch.zeros(7, PADDED - VOCAB))
    assert torch.equal(logits.detach(), before), "the logits were changed in place (verl#1672)"


def test_only_the_rows_named_are_read_and_get_a_gradient() -> None:
    """Prompt positions predict nothing that is trained on: whatever stands there, no copy of the others is made."""
    logits, targets = make_logits()
    rows, others = torch.tensor([5, 0, 3]), torch.tensor([1, 2, 4, 6])
    logits[others] = torch.nan
    logits.requires_grad_()
    logprob, entropy = logprobs_and_entropy(logits, targets[:3], 0.6, VOCAB, None, chunk=2, rows_T=rows)
    want = reference(logits[rows], targets[:3], 0.6)
    objective(logprob, entropy).backward()
    assert_near(logprob.detach(), want[0], logits[rows], 0.6)
    assert_near(entropy.detach(), want[1], logits[rows], 0.6)
    assert logits.grad is not None and not logits.grad[others].any()
    assert_near(logits.grad[rows], want[2], logits[rows], 0.6)


def test_gradcheck_of_both_outputs() -> None:
    logits, targets = make_logits(4)
    z = logits.double()[:, : VOCAB + 2].clone()
    z[:, VOCAB:] = 0.0
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: logprobs_and_entropy(x, targets, 0.6, VOCAB, None, 3), (z,))


def test_bf16_logits_accumulate_in_fp32() -> None:
    logits, targets = make_logits(dtype=torch.bfloat16)
    logits.requires_grad_()
    logprob, entropy = logprobs_and_entropy(logits, targets, 0.6, VOCAB, None, 2)
    want = reference(logits, targets, 0.6)
    assert_near(logprob, want[0], logits, 0.6)
    assert_near(entropy, want[1], logits, 0.6)
    objective(logprob, entropy).backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16
    assert_near(logits.grad, want[2], logits, 0.6, rtol=2**-8)


def test_the_entropy_is_the_same_before_and_after_the_log_prob_is_used() -> None:
    logits, targets = make_logits()
    logits.requires_grad_()
    first, entropy_first = logprobs_and_entropy(logits, targets, 1.0, VOCAB, None)
    first.sum().backward()
    second, entropy_second = logprobs_and_entropy(logits, targets, 1.0, VOCAB, None)
    assert torch.equal(first, second) and torch.equal(entropy_first, entropy_second)


def test_log_prob_alone_has_the_same_gradient_and_no_entropy() -> None:
    logits, targets = make_logits()
    logits.requires_grad_()
    grads = []
    for with_entropy in (True, False):
        logprob, entropy = logprobs_and_entropy(logits, targets, 0.6, VOCAB, None, 3, with_entropy)
        (grad,) = torch.autograd.grad(logprob.square().sum(), logits)
        grads.append((logprob, grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])
    assert bool(entropy.isnan().all()) and not entropy.requires_grad


def test_extreme_logits_stay_finite() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 3], logits[1, 3] = 3e4, -3e4
    logits[2, 5] = -torch.inf
    logits.requires_grad_()
    logprob, entropy = logprobs_and_entropy(logits, torch.tensor([3, 3, 4]), 1.0, VOCAB, None)
    (logprob.sum() + entropy.sum()).backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all())
    torch.testing.assert_close(logprob[0].item(), 0.0)
    torch.testing.assert_close(logprob[1].item(), -3e4 - torch.tensor(float(VOCAB - 1)).log().item())
    others = torch.tensor(float(VOCAB - 1)).log()
    torch.testing.assert_close(entropy, torch.stack([torch.tensor(0.0), others, others]))


def test_no_tokens() -> None:
    logits = torch.zeros(0, PADDED, requires_grad=True)
    logprob, entropy = logprobs_and_entropy(logits, torch.zeros(0, dtype=torch.int64), 1.0, VOCAB, None)
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.shape == entropy.shape == (0,) and logits.grad is not None


def test_a_padded_column_is_no_target() -> None:
    logits, _ = make_logits(1)
    with pytest.raises(AssertionError, match="no token"):
        logprobs_and_entropy(logits, torch.tensor([VOCAB]), 1.0, VOCAB, None)


def test_keeps_no_probabilities_for_the_backward_pass() -> None:
    logits, targets = make_logits()
    logits.requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        logprobs_and_entropy(logits, targets, 0.6, VOCAB, None)
    wide = [t for t in kept if t.dim() > 1]
    assert len(wide) == 1 and wide[0].data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_shards_over_tensor_parallel_ranks_equal_one_process(ranks: int, temperature: float) -> None:
    logits, targets = make_logits()

    def shard() -> Any:
        group, width = dist.group.WORLD, PADDED // ranks
        mine = logits[:, dist.get_rank() * width :][:, :width].clone().requires_grad_()
        logprob, entropy = logprobs_and_entropy(mine, targets, temperature, VOCAB, group, 3)
        objective(logprob, entropy).backward()
        assert mine.grad is not None
        return logprob.detach().numpy(), entropy.detach().numpy(), mine.grad.numpy()

    results = run_ranks(shard, ranks)  # four ranks: the last one has nothing but padding
    want_logprob, want_entropy, want_grad = reference(logits, targets, temperature)
    for logprob, entropy, _ in results:
        assert_near(torch.from_numpy(logprob), want_logprob, logits, temperature)
        assert_near(torch.from_numpy(entropy), want_entropy, logits, temperature)
    grad = torch.cat([torch.from_numpy(g) for _, _, g in results], dim=1)
    assert_near(grad, want_grad, logits, temperature)
