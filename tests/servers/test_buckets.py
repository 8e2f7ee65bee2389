"""Buckets: byte bounds, order, and bytes that come apart again as SGLang takes them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.servers.buckets import Bucket, buckets

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def unpack(bucket: Bucket) -> dict[str, torch.Tensor]:
    """As the receiver does: offsets follow from dtypes and shapes, and must be multiples of the item size."""
    offset, found = 0, {}
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        assert offset % kind.itemsize == 0
        found[name] = bucket.flat[offset : offset + size].view(kind).reshape(shape)
        offset += size
    assert offset == bucket.flat.numel()
    return found


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 7), st.sampled_from(range(3)), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 200),
)
def test_every_tensor_arrives_once_and_buckets_keep_their_bound(shapes, most):
    tensors = {}
    for number, (a, b, dtype, transposed) in enumerate(shapes):
        tensor = torch.randn(a, b).to(DTYPES[dtype])
        tensors[str(number)] = tensor.T if transposed else tensor
    found: dict[str, torch.Tensor] = {}
    ends, before = [], None
    for bucket in buckets(tensors.items(), most):
        assert bucket.flat.numel() <= most or len(bucket.names) == 1
        ends.append(bucket.last)
        if before is not None:  # the one before may still travel: this one must not have touched it
            assert torch.equal(before[0].flat, before[1])
        before = (bucket, bucket.flat.clone())
        parts = {name: tensor.clone() for name, tensor in unpack(bucket).items()}
        assert not parts.keys() & found.keys()
        found |= parts
    assert found.keys() == tensors.keys() and ends == [False] * (len(ends) - 1) + [True]
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name].float(), tensor.float())


def test_no_tensors_no_buckets():
    assert list(buckets([], 10)) == []
