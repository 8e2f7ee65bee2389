"""The packed rotation is Megatron's own, bit for bit: results and gradients, for every layout of a row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from megatron_dapo.compat import packed_rotary
from megatron_dapo.compat.packed_rotary import positions_here, rotate_packed
from megatron_dapo.compat.portable_layers import zigzag_positions

LENGTHS = (8, 4, 20, 4, 12)


def place(cp_size: int = 1, rank: int = 0) -> SimpleNamespace:
    """A context-parallel group as the rotation sees it."""
    return SimpleNamespace(size=lambda: cp_size, rank=lambda: rank)


def bounds_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def angles(longest: int, d: int) -> torch.Tensor:
    inverse = 1.0 / 10_000 ** (torch.arange(0, d, 2) / d)
    half = torch.outer(torch.arange(longest).float(), inverse)
    return torch.cat([half, half], -1)[:, None, None]


def rotate(function, rows, group, d=16, **kwargs):
    """Result and gradient of one rotation of random rows."""
    generator = torch.Generator().manual_seed(1)
    t = torch.randn(rows, 3, 16, generator=generator).to(kwargs.pop("dtype", torch.float32)).requires_grad_()
    weight = torch.randn(t.shape, generator=generator).to(t.dtype)
    bounds = bounds_of(kwargs.pop("lengths", LENGTHS))
    out = function(t, bounds, angles(32, d), cp_group=group, **kwargs)
    (out * weight).sum().backward()
    return out.detach(), t.grad


@pytest.mark.parametrize("cp", [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": torch.bfloat16}, {"d": 8}, {"rotary_interleaved": True}, {"mscale": 1.25}],
    ids=["fp32", "bf16", "half a head", "interleaved", "mscale"],
)
def test_results_and_gradients_are_megatrons_bit_for_bit(cp, settings):
    rows, group = sum(LENGTHS) // cp[0], place(*cp)
    ours = rotate(rotate_packed, rows, group, **settings)
    theirs = rotate(packed_rotary._one_sequence_at_a_time, rows, group, **settings)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], rotate(rotate_packed, rows, group, **settings | {"lengths": LENGTHS[::-1]})[0])


@pytest.mark.parametrize("cp", [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_positions_restart_with_every_sequence(cp):
    lengths = (16, 8, 24)
    wanted = torch.cat([zigzag_positions(n, *cp) if cp[0] > 1 else torch.arange(n) for n in lengths])
    assert torch.equal(positions_here(bounds_of(lengths), len(wanted), *cp), wanted)


def test_layers_share_a_rotation_and_the_next_micro_batch_has_its_own(monkeypatch):
    packed_rotary._latest.clear()
    made = []
    monkeypatch.setattr(packed_rotary, "positions_here", lambda *a: made.append(a) or positions_here(*a))
    freqs, t = angles(40, 16), torch.randn(48, 3, 16)
    for lengths in ((8, 40), (40, 8)):
        bounds = bounds_of(lengths)
        for _ in range(3):
            out = rotate_packed(t, bounds, freqs, cp_group=place())
            assert torch.equal(out, packed_rotary._one_sequence_at_a_time(t, bounds, freqs, cp_group=place()))
    assert len(made) == 2
    rotate_packed(t.bfloat16(), bounds, freqs, cp_group=place())
    assert len(made) == 3 and len(packed_rotary._latest) == 1


def test_what_was_made_while_sampling_can_be_trained_through():
    bounds, freqs = bounds_of(LENGTHS), angles(32, 16)
    with torch.inference_mode():
        rotate_packed(torch.randn(48, 3, 16), bounds, freqs, cp_group=place())
    t = torch.randn(48, 3, 16, requires_grad=True)
    rotate_packed(t, bounds, freqs, cp_group=place()).sum().backward()
    assert t.grad is not None


def test_angles_per_token_stay_with_megatron():
    """As many angles as tokens: they are places in the whole row, not in a sequence."""
    t, bounds, freqs = torch.randn(48, 3, 16), bounds_of(LENGTHS), angles(48, 16)
    whole = rope_utils._apply_rotary_pos_emb_bshd(t[:, None], freqs)[:, 0]
    assert torch.equal(rotate_packed(t, bounds, freqs, cp_group=place()), whole)
