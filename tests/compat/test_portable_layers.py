"""Attention in plain torch against the textbook: dense, packed, with a KV cache, under context parallelism; and the norm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_helper import run_ranks

from megatron_dapo.compat.portable_layers import CausalAttention, RMSNorm, _refuse_unsupported, zigzag_positions
from megatron_dapo.types import InputError

HEADS, GROUPS, DIM = 4, 2, 8
LENGTHS = (8, 1, 13, 4, 16, 3)


def one_rank() -> Any:
    return SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def attention(cp_group: Any, scale: float | None = None) -> CausalAttention:
    return CausalAttention(None, 1, None, "self", scale, pg_collection=SimpleNamespace(cp=cp_group))


def draw(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [L, HEADS, DIM], key and value [L, GROUPS, DIM], float64, different for every length."""
    generator = torch.Generator().manual_seed(length)
    shapes = (HEADS, GROUPS, GROUPS)
    return tuple(torch.randn(length, heads, DIM, dtype=torch.float64, generator=generator) for heads in shapes)  # type: ignore[return-value]


def textbook(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One sequence, one head after the other, one query after the other: [Lq, HEADS · DIM]."""
    out, hidden = [], len(key) - len(query)
    for row in range(len(query)):
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            seen = slice(0, hidden + row + 1)
            scores = key[seen, group] @ query[row, head] / DIM**0.5
            heads.append(scores.softmax(0) @ value[seen, group])
        out.append(torch.cat(heads))
    return torch.stack(out)


def packed_params(lengths: tuple[int, ...]) -> Any:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return SimpleNamespace(cu_seqlens_q=bounds, cu_seqlens_q_padded=None)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_dense_rows(length):
    query, key, value = (torch.stack([x, x.flip(0)], dim=1) for x in draw(length))  # [s, b, heads, d]
    ours = attention(one_rank())(query, key, value)
    for row in range(2):
        assert close(ours[:, row], textbook(query[:, row], key[:, row], value[:, row]))


@pytest.mark.parametrize("new", [1, 3])
def test_new_tokens_against_a_cache_see_all_that_came_before(new):
    query, key, value = draw(9)
    ours = attention(one_rank())(query[-new:, None], key[:, None], value[:, None])
    assert close(ours[:, 0], textbook(query[-new:], key, value))


def test_a_scale_of_the_models_own():
    query, key, value = draw(5)
    ours = attention(one_rank(), scale=0.1)(query[:, None], key[:, None], value[:, None])
    assert close(ours[:, 0], textbook(query * 0.1 * DIM**0.5, key, value))


def test_packed_rows_and_their_gradients():
    parts = [draw(n) for n in LENGTHS]
    packed = [torch.cat(column).requires_grad_() for column in zip(*parts, strict=True)]
    ours = attention(one_rank())(*packed, packed_seq_params=packed_params(LENGTHS))
    apart = [[x.clone().requires_grad_() for x in part] for part in parts]
    theirs = torch.cat([textbook(*part) for part in apart])
    assert close(ours, theirs)
    weight = torch.randn(theirs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    for column in range(3):
        assert close(packed[column].grad, torch.cat([part[column].grad for part in apart]))


def test_sequences_of_a_packed_row_do_not_see_each_other():
    """Anything may happen to one, NaN included: the others stay as they are to the bit."""
    packed = [torch.cat(column) for column in zip(*(draw(n) for n in LENGTHS), strict=True)]
    run = attention(one_rank())
    before = run(*packed, packed_seq_params=packed_params(LENGTHS))
    start, end = sum(LENGTHS[:2]), sum(LENGTHS[:3])
    for column in packed:
        column[start:end] = torch.nan
    after = run(*packed, packed_seq_params=packed_params(LENGTHS))
    others = torch.ones(len(before), dtype=torch.bool)
    others[start:end] = False
    assert torch.equal(before[others], after[others]) and after[start:end].isnan().all()


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_zigzag_gives_every_position_to_one_rank_and_the_same_work_to_all(cp_size):
    length = 8 * 2 * cp_size
    shares = [zigzag_positions(length, cp_size, rank) for rank in range(cp_size)]
    assert sorted(torch.cat(shares).tolist()) == list(range(length))
    assert len({int((share + 1).sum()) for share in shares}) == 1


@pytest.mark.parametrize("lengths", [(8, 16, 4, 12), (8, 8)], ids=["packed", "dense"])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_context_parallel_ranks_see_whole_sequences(cp_size, lengths):
    lengths = tuple(n * cp_size // 2 for n in lengths)
    parts = [draw(n) for n in lengths]
    theirs = [textbook(*part) for part in parts]

    def work() -> list[torch.Tensor]:
        mine = [zigzag_positions(n, cp_size, dist.get_rank()) for n in lengths]
        local = [[x[here] for x in part] for part, here in zip(parts, mine, strict=True)]
        run = attention(dist.group.WORLD)
        if len(set(lengths)) == 1:
            out = run(*(torch.stack(column, dim=1) for column in zip(*local, strict=True)))
            return list(out.unbind(1))
        out = run(*(torch.cat(c) for c in zip(*local, strict=True)), packed_seq_params=packed_params(lengths))
        return list(out.split([len(here) for here in mine]))

    for rank, ours in enumerate(run_ranks(work, cp_size)):
        for length, got, whole in zip(lengths, ours, theirs, strict=True):
            assert close(got, whole[zigzag_positions(length, cp_size, rank)])


def test_context_parallel_gradients_are_those_of_the_whole():
    """A key on one rank has gradients from queries on every rank."""
    lengths = (8, 12)
    whole = [[x.clone().requires_grad_() for x in draw(n)] for n in lengths]
    sum((textbook(*part) ** 2).sum() for part in whole).backward()

    def work() -> list[torch.Tensor]:
        mine = [zigzag_positions(n, 2, dist.get_rank()) for n in lengths]
        columns = zip(*([x[h] for x in draw(n)] for n, h in zip(lengths, mine, strict=True)), strict=True)
        packed = [torch.cat(column).requires_grad_() for column in columns]
        out = attention(dist.group.WORLD)(*packed, packed_seq_params=packed_params(lengths))
        (out**2).sum().backward()
        return [x.grad for x in packed]

    for rank, gradients in enumerate(run_ranks(work, 2)):
        for column, ours in enumerate(gradients):
            theirs = torch.cat([
                part[column].grad[zigzag_positions(n, 2, rank)] for part, n in zip(whole, lengths, strict=True)
            ])  # fmt: skip
            assert close(ours, theirs)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_rms_norm(sequence_parallel):
    config = SimpleNamespace(params_dtype=torch.float64, sequence_parallel=sequence_parallel)
    norm = RMSNorm(config, 16, eps=1e-6)
    torch.nn.init.uniform_(norm.weight)
    x = torch.randn(3, 16, dtype=torch.float64)
    assert close(norm(x), x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight)
    assert norm.weight.sequence_parallel is sequence_parallel


def test_features_that_only_other_layers_have_are_refused():
    plain = {
        "multi_latent_attention": False, "window_size": None, "softmax_type": "vanilla", "attention_dropout": 0.0,
        "layernorm_zero_centered_gamma": False, "apply_query_key_layer_scaling": False,
    }  # fmt: skip
    _refuse_unsupported(SimpleNamespace(**plain))
    with pytest.raises(InputError, match="--window-size: .*use transformer_engine"):
        _refuse_unsupported(SimpleNamespace(**plain | {"window_size": (128, 0)}))
