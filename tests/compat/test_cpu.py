"""torch.cuda answered by the CPU: on a machine without CUDA only, and only with names that torch still has."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_dapo.compat import cpu

RESOLVE = """
import functools, torch
from megatron_dapo.compat import cpu

def resolve(name):
    return functools.reduce(lambda owner, part: getattr(owner, part, None), name.split(".")[1:], torch)
"""


def in_fresh_python(code: str) -> str:
    """What ``code`` prints in a process where nothing has been replaced yet."""
    done = subprocess.run([sys.executable, "-c", RESOLVE + code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_replaced_name_is_one_of_torchs():
    """A name that torch dropped or renamed would be replaced without effect."""
    assert in_fresh_python("print([n for n in cpu.patched_names() if resolve(n) is None])") == "[]"


def test_where_cuda_works_nothing_is_replaced():
    code = """
torch.cuda.is_available = lambda: True
before = {name: resolve(name) for name in cpu.patched_names()}
print(cpu.install(), [name for name, thing in before.items() if resolve(name) is not thing])
"""
    assert in_fresh_python(code) == "False []"


def test_where_cuda_is_missing_every_name_is_replaced():
    code = """
before = {name: resolve(name) for name in cpu.patched_names()}
print(cpu.install(), [name for name, thing in before.items() if resolve(name) is thing], torch.cuda.is_available())
"""
    assert in_fresh_python(code) == "True [] False"


def test_installing_twice_replaces_once():
    before = torch.zeros
    assert cpu.install() and torch.zeros is before


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), 0])
def test_cuda_means_the_cpu(device):
    made = [
        torch.zeros(2, device=device), torch.empty_like(torch.ones(2), device=device), torch.ones(2).to(device),
        torch.ones(2).to(device=device), torch.ones(2).cuda(), torch.ones(2).new_zeros(3, device=device),
        torch.tensor([1.0], device=device, pin_memory=True),
    ]  # fmt: skip
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_what_is_not_cuda_stays_what_it_is():
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.ones(2).to(torch.float64).dtype == torch.float64
    assert torch.ones(2).type("torch.cuda.DoubleTensor").dtype == torch.float64
    assert torch.ones(2).type() == "torch.cuda.FloatTensor"  # what Megatron's optimizers look for


def test_the_random_state_of_cuda_is_the_cpus():
    state = torch.cuda.get_rng_state()
    first = torch.rand(4)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(4))


def test_streams_and_events_wait_for_nothing():
    with torch.cuda.stream(torch.cuda.Stream()):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        end.record()
    end.synchronize()
    assert 0 <= begin.elapsed_time(end) < 1000 and end.query()
