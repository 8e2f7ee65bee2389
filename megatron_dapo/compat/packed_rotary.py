"""Rotary positions of a packed row, all its sequences at once.

Megatron's unfused version rotates one sequence at a time in Python and recomputes their cosines in every layer; its backward
is a chain of slice copies, quadratic in the number of sequences. Here the row is one product. The arithmetic per element is
Megatron's, so results and gradients are the same bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils

_one_sequence_at_a_time = rope_utils._apply_rotary_pos_emb_thd


@dataclass(frozen=True)
class _Rotation:
    """Cosines and sines [t, 1, d] of the rows between ``bounds``, for heads of one dtype."""

    bounds: torch.Tensor
    freqs: torch.Tensor
    settings: tuple[Any, ...]
    cos: torch.Tensor
    sin: torch.Tensor


_latest: list[_Rotation] = []
"""At most one: all layers of a micro-batch ask in a row with the same two tensors, queries and keys alike. Holding every
micro-batch's would cost 2·t·d numbers each for the whole step."""


def positions_here(bounds: torch.Tensor, tokens: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Position within its sequence of every row that this context-parallel rank holds: int64 [tokens].

    ``bounds`` [sequences + 1] counts tokens of all ranks; under context parallelism a rank has chunk ``cp_rank`` of each
    sequence's 2·cp_size and its mirror image (``portable_layers.zigzag_positions``). Nothing waits for the device.
    """
    lengths, starts = (bounds[1:] - bounds[:-1]) // cp_size, bounds[:-1] // cp_size
    length, start = (torch.repeat_interleave(x, lengths, output_size=tokens).long() for x in (lengths, starts))
    row = torch.arange(tokens, device=bounds.device) - start
    if cp_size == 1:
        return row
    half = length // 2
    return row + torch.where(row < half, cp_rank * half, (2 * cp_size - 2 - cp_rank) * half)


def _rotation(
    bounds: torch.Tensor, freqs: torch.Tensor, tokens: int, dtype: torch.dtype, mscale: float, cp_group: Any
) -> _Rotation:
    settings = (tokens, dtype, mscale, cp_group.size(), cp_group.rank())
    if _latest and _latest[0].bounds is bounds and _latest[0].freqs is freqs and _latest[0].settings == settings:
        return _latest[0]
    with torch.inference_mode(False), torch.no_grad():  # made while sampling, it may be used while training
        place = positions_here(bounds, tokens, cp_group.size(), cp_group.rank())
        cos, sin = ((f(freqs) * mscale).to(dtype)[:, 0].index_select(0, place) for f in (torch.cos, torch.sin))
    _latest[:] = [_Rotation(bounds, freqs, settings, cos, sin)]
    return _latest[0]


def rotate_packed(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
    multi_latent_attention: bool | None = None,
) -> torch.Tensor:
    """Megatron's ``_apply_rotary_pos_emb_thd``: ``t`` [tokens here, heads, head size], ``freqs`` [longest, 1, 1, d <= head size].

    Angles that are given per packed token, not per position, and latent attention's layout go to Megatron's own.
    """
    per_token = freqs.size(0) == t.size(0) * cp_group.size()
    if per_token or mla_rotary_interleaved or multi_latent_attention:
        rotated: torch.Tensor = _one_sequence_at_a_time(
            t, cu_seqlens, freqs, rotary_interleaved, mla_rotary_interleaved, mscale, cp_group, multi_latent_attention
        )
        return rotated
    r = _rotation(cu_seqlens, freqs, len(t), t.dtype, mscale, cp_group)
    d = freqs.size(-1)
    turned, passed = t[..., :d], t[..., d:]
    half_turn = rope_utils._rotate_half(turned[:, None], rotary_interleaved)[:, 0]
    turned = turned * r.cos + half_turn * r.sin
    return torch.cat((turned, passed), dim=-1) if passed.size(-1) else turned
