"""The helper that every distributed test stands on: results, errors, deaths and hangs."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from distributed_helper import RankError, run_ranks


def _children() -> set[str]:
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as listing:
        return set(listing.read().split())


def test_results_come_back_in_rank_order() -> None:
    scale = 10

    def total(start: int) -> tuple[int, float, str]:
        x = torch.tensor(float(start + scale * dist.get_rank()))
        dist.all_reduce(x)
        return dist.get_rank(), x.item(), os.environ["RANK"]

    assert run_ranks(total, 3, 1) == [(0, 33.0, "0"), (1, 33.0, "1"), (2, 33.0, "2")]


def test_an_exception_of_one_rank_is_raised_here_while_others_wait_for_it() -> None:
    def fails_on_one() -> None:
        if dist.get_rank() == 1:
            raise ValueError("too many cooks")
        dist.barrier()

    before, start = _children(), time.monotonic()
    with pytest.raises(RankError, match="rank 1:(.|\n)*too many cooks"):
        run_ranks(fails_on_one, 2)
    assert time.monotonic() - start < 20
    assert _children() == before


def test_a_rank_that_dies_is_noticed_while_another_is_busy() -> None:
    def dies() -> None:
        if dist.get_rank() == 0:
            os._exit(7)
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0: died"):
        run_ranks(dies, 2)
    assert time.monotonic() - start < 20


def test_a_hang_ends_at_the_deadline() -> None:
    before, start = _children(), time.monotonic()
    with pytest.raises(RankError, match="rank 1: had not ended by the deadline"):
        run_ranks(lambda: time.sleep(600 * dist.get_rank()), 2, deadline_s=2.0)
    assert time.monotonic() - start < 20
    assert _children() == before
