"""What megatron-core 0.19 lacks without Transformer Engine and Apex. Replacements from outside; its files stay as they are.

1. ``megatron.training.initialize._compile_dependencies`` runs ``make`` for a data-set index that we do not use, in a folder
   that has no Makefile in the wheel, and ends the process (on GPUs too).
2. The distributed optimizer saves torch's AdamW but cannot load it: it expects a step count a group, torch keeps one a
   parameter. ``Adam`` here keeps its state where Megatron looks for it.
3. The dispatcher of experts makes numpy arrays of its split sizes on their way from a GPU only; on a CPU they stay tensors,
   which all-to-all refuses.
4. Expert tensor parallelism gathers and reduce-scatters parts of unequal size, which NCCL can and gloo cannot.
5. Saving passes its results through a process of its own, also where the same thread writes and reads them: it takes seconds to
   start, for it imports what the run has, and half a GiB, and it outlives a rank that is killed.
6. Rotary positions of packed rows are applied one sequence at a time, slowly (``packed_rotary``).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_utils import maybe_move_tensor_to_cpu
from megatron.training import global_vars, initialize

from megatron_dapo.compat.packed_rotary import rotate_packed

TARGETS = (
    (initialize, "_compile_dependencies"),
    (filesystem_async, "get_write_results_queue"),
    (token_dispatcher, "maybe_move_tensor_to_cpu"),
    (rope_utils, "_apply_rotary_pos_emb_thd"),
    (mappings, "_gather_along_first_dim"),
    (mappings, "_reduce_scatter_along_first_dim"),
    (megatron_optimizer, "Adam"),
    (megatron_optimizer, "USING_PYTORCH_OPTIMIZER"),
    (distrib_optimizer, "Adam"),
    (distrib_optimizer, "HAVE_APEX_OR_TE"),
    (distrib_optimizer, "USING_TE_OPTIMIZER"),
)
"""Every (module, name) that ``apply`` may set."""


class Adam(torch.optim.Optimizer):
    """AdamW with bias correction (decoupled weight decay; ``adam_w_mode=False``: Adam with L2).

    State: ``step`` in each parameter group, ``exp_avg`` and ``exp_avg_sq`` for each parameter, as in Transformer Engine's
    FusedAdam. ``capturable`` is about CUDA graphs and has no meaning here.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "Megatron's optimizers call step without a closure"
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                group["step"] = int(group.get("step", 0)) + 1
            for p in params:
                self._update(p, group)

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
        state, grad = self.state[p], p.grad
        assert grad is not None
        if not state:
            state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        if self.adam_w_mode:
            p.mul_(1 - lr * decay)
        elif decay:
            grad = grad.add(p, alpha=decay)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        spread = (square.sqrt() / (1 - beta2 ** group["step"]) ** 0.5).add_(group["eps"])
        p.addcdiv_(mean, spread, value=-lr / (1 - beta1 ** group["step"]))


def apply() -> None:
    """Set the names of ``TARGETS``; the optimizer only where neither Transformer Engine nor Apex brings one. Idempotent."""
    for module, name in TARGETS:
        assert hasattr(module, name), (
            f"{module.__name__}.{name} is gone: this megatron-core is not the one the fix is for"
        )
    _set(initialize, _compile_dependencies=lambda: None)
    _set(filesystem_async, get_write_results_queue=_write_results)
    _set(mappings, _gather_along_first_dim=_gather, _reduce_scatter_along_first_dim=_reduce_scatter)
    _set(token_dispatcher, maybe_move_tensor_to_cpu=_to_cpu)
    _set(rope_utils, _apply_rotary_pos_emb_thd=rotate_packed)
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        _set(megatron_optimizer, Adam=Adam, USING_PYTORCH_OPTIMIZER=False)
        _set(distrib_optimizer, Adam=Adam, HAVE_APEX_OR_TE=True, USING_TE_OPTIMIZER=True)


_results_of_processes = filesystem_async.get_write_results_queue
_results_of_threads: queue.Queue[Any] = queue.Queue()


def _write_results(mp_mode: str = "spawn") -> Any:
    asynchronous = getattr(global_vars._GLOBAL_ARGS, "async_save", False)
    return _results_of_processes(mp_mode) if asynchronous else _results_of_threads


def _to_cpu(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
    moved = maybe_move_tensor_to_cpu(tensor, as_numpy, record_stream)
    return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved


_gather_equal, _reduce_scatter_equal = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim


def _gather(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
    if output_split_sizes is None or input_.is_cuda or group.size() == 1:
        return _gather_equal(input_, group, output_split_sizes, use_global_buffer)
    parts = [input_.new_empty(int(size), *input_.shape[1:]) for size in output_split_sizes]
    parts[group.rank()] = input_.contiguous()
    for owner, part in enumerate(parts):
        dist.broadcast(part, group_src=owner, group=group)
    return torch.cat(parts)


def _reduce_scatter(
    input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
) -> Any:
    if input_split_sizes is None or input_.is_cuda or group.size() == 1:
        return _reduce_scatter_equal(input_, group, input_split_sizes, use_global_buffer)
    total = input_.clone()
    dist.all_reduce(total, group=group)
    return torch.split(total, [int(size) for size in input_split_sizes])[group.rank()]


def _set(module: Any, **names: Any) -> None:
    for name, value in names.items():
        setattr(module, name, value)
