"""The paper's equation, read literally, in float64 on one process: nothing here is shared with the package.

The model is written out from its definition (RMSNorm, rotary halves, grouped queries, SwiGLU, experts), the loss sequence by
sequence and token by token; gradients are autograd's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]
"""Megatron's parameter names -> whole tensors."""


@dataclass(frozen=True)
class Shape:
    """What the weights do not say."""

    layers: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    rotary_base: float = 10_000.0
    eps: float = 1e-6
    topk: int = 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary position embedding by halves; x [L, heads, d]."""
    length, _, dim = x.shape
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().repeat(1, 2)[:, None], angle.sin().repeat(1, 2)[:, None]
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def attention(w: Weights, prefix: str, x: Tensor, shape: Shape) -> Tensor:
    length, per_group = len(x), shape.heads // shape.groups
    mixed = x @ w[prefix + "linear_qkv.weight"].t() + w.get(prefix + "linear_qkv.bias", torch.zeros(1))
    mixed = mixed.view(length, shape.groups, per_group + 2, shape.head_dim)
    query, key, value = mixed[:, :, :-2].reshape(length, shape.heads, -1), mixed[:, :, -2], mixed[:, :, -1]
    if prefix + "q_layernorm.weight" in w:
        query = rms_norm(query, w[prefix + "q_layernorm.weight"], shape.eps)
        key = rms_norm(key, w[prefix + "k_layernorm.weight"], shape.eps)
    query, key = rotate(query, shape.rotary_base), rotate(key, shape.rotary_base)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    out = []
    for head in range(shape.heads):
        scores = query[:, head] @ key[:, head // per_group].t() / shape.head_dim**0.5
        out.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value[:, head // per_group])
    return torch.cat(out, -1) @ w[prefix + "linear_proj.weight"].t()


def swiglu(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, value = (x @ up.t()).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * value) @ down.t()


def experts(w: Weights, prefix: str, x: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Each token through its top-k experts, weighted by the renormalised router; router probabilities [L, E] for the
    auxiliary loss."""
    logits = x @ w[prefix + "router.weight"].t()
    chosen = logits.topk(shape.topk, -1)
    share = chosen.values.softmax(-1)
    out = torch.zeros_like(x)
    for expert in range(logits.size(1)):
        name = f"{prefix}experts.local_experts.{expert}."
        y = swiglu(x, w[name + "linear_fc1.weight"], w[name + "linear_fc2.weight"])
        out = out + y * torch.where(chosen.indices == expert, share, 0.0).sum(-1, keepdim=True)
    return out, logits.softmax(-1)


def forward(w: Weights, tokens: Tensor, shape: Shape) -> tuple[Tensor, list[Tensor]]:
    """Logits [L, vocab] of one sequence, and every MoE layer's router probabilities."""
    x, routers = w["embedding.word_embeddings.weight"][tokens], []
    for layer in range(shape.layers):
        prefix = f"decoder.layers.{layer}."
        x = x + attention(
            w, prefix + "self_attention.", rms_norm(x, w[prefix + "input_layernorm.weight"], shape.eps), shape
        )
        h = rms_norm(x, w[prefix + "pre_mlp_layernorm.weight"], shape.eps)
        if shape.topk:
            y, probabilities = experts(w, prefix + "mlp.", h, shape)
            routers.append(probabilities)
        else:
            y = swiglu(h, w[prefix + "mlp.linear_fc1.weight"], w[prefix + "mlp.linear_fc2.weight"])
        x = x + y
    x = rms_norm(x, w["decoder.final_layernorm.weight"], shape.eps)
    output = w.get("output_layer.weight", w["embedding.word_embeddings.weight"])
    return x @ output[: shape.vocab].t(), routers


def auxiliary_loss(w: Weights, rows: Any, plan: list[list[Any]], multiple: int, shape: Shape) -> tuple[Tensor, float]:
    """Load balancing (Switch Transformer, eq. 4 over top-k): E sum_e f_e P_e of every micro-batch and layer.

    ``plan``: by data-parallel rank, the samples of each micro-batch, whose sequences are padded to ``multiple`` with id 0.
    Returns its sum over layers and token-weighted mean over micro-batches, which is trained on, and its plain mean over both.
    """
    losses, sizes = [], []
    for samples in (samples for rank in plan for samples in rank):
        layers: list[list[Tensor]] = [[] for _ in range(shape.layers)]
        for i in samples:
            tokens = torch.from_numpy(rows.tokens[i])
            padded = torch.nn.functional.pad(tokens, (0, -len(tokens) % multiple))
            for layer, probabilities in zip(layers, forward(w, padded, shape)[1], strict=True):
                layer.append(probabilities)
        by_layer = []
        for probabilities in map(torch.cat, layers):
            total, num_experts = probabilities.shape
            counts = torch.bincount(probabilities.topk(shape.topk, -1).indices.flatten(), minlength=num_experts)
            by_layer.append(num_experts * (counts / (total * shape.topk) * probabilities.mean(0)).sum())
        losses.append(torch.stack(by_layer))
        sizes.append(total)
    weight = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    return (torch.stack(losses).sum(1) * weight).sum(), float(torch.stack(losses).mean())


@dataclass(frozen=True)
class Objective:
    """The terms of the loss."""

    mode: str = "token-mean"
    eps_low: float = 0.2
    eps_high: float = 0.28
    dual_clip: float = 3.0
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    norm_length: int = 24


@dataclass
class Terms:
    """What every unmasked token contributes, by sample: [N] of [tokens]."""

    loss: list[Tensor]
    entropy: list[Tensor]
    kl: list[Tensor]
    ratio: list[Tensor]
    log_ratio: list[Tensor]
    clipped: list[Tensor]
    dual: list[Tensor]


def response(w: Weights, rows: Any, i: int, shape: Shape) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Log-probs and entropies of a sample's response tokens, and the router probabilities of all its tokens."""
    tokens, prompt = torch.from_numpy(rows.tokens[i]), int(rows.prompt_lengths[i])
    logits, routers = forward(w, tokens, shape)
    logp = logits[prompt - 1 : -1].log_softmax(-1)
    return logp.gather(1, tokens[prompt:, None])[:, 0], -(logp.exp() * logp).sum(-1), routers


def terms(w: Weights, reference: Weights, rows: Any, shape: Shape, objective: Objective) -> Terms:
    found = Terms([], [], [], [], [], [], [])
    for i in range(len(rows.tokens)):
        logp, entropy, _ = response(w, rows, i, shape)
        with torch.no_grad():
            log_reference = response(reference, rows, i, shape)[0]
        old, advantage = torch.from_numpy(rows.rollout_logprobs[i]).double(), float(rows.advantages[i])
        ratio = (logp - old).exp()
        low, high = 1 - objective.eps_low, 1 + objective.eps_high
        loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if advantage < 0:
            loss = torch.minimum(loss, torch.tensor(-advantage * objective.dual_clip, dtype=loss.dtype))
        gap = log_reference - logp
        kept = torch.from_numpy(rows.loss_mask[i])
        found.loss.append(loss[kept])
        found.entropy.append(entropy[kept])
        found.kl.append((gap.exp() - 1 - gap)[kept])
        found.ratio.append(ratio.detach()[kept])
        found.log_ratio.append((logp - old).detach()[kept])
        beyond = ratio > high if advantage > 0 else ratio < low
        found.clipped.append(beyond[kept])
        found.dual.append(((ratio > objective.dual_clip) & (advantage < 0))[kept])
    return found


def aggregate(values: list[Tensor], group: Any, objective: Objective) -> Tensor:
    """Four readings of 'the mean'."""
    counted = [v for v in values if len(v)]
    if objective.mode == "token-mean":
        return torch.cat(counted).mean()
    if objective.mode == "seq-mean-token-mean":
        return torch.stack([v.mean() for v in counted]).mean()
    if objective.mode == "seq-mean-token-sum-norm":
        return torch.stack([v.sum() / objective.norm_length for v in counted]).mean()
    assert objective.mode == "prompt-mean"
    prompts = [torch.cat([v for v, g in zip(values, group, strict=True) if g == label]) for label in sorted(set(group))]
    return torch.stack([tokens.mean() for tokens in prompts if len(tokens)]).mean()


def loss_and_metrics(
    w: Weights, reference: Weights, rows: Any, shape: Shape, objective: Objective
) -> tuple[Tensor, dict[str, float]]:
    """The step's loss, and what the trainer reports of it."""
    t = terms(w, reference, rows, shape, objective)
    policy = aggregate(t.loss, rows.group, objective)
    loss = policy
    if objective.entropy_coef:
        loss = loss - objective.entropy_coef * aggregate(t.entropy, rows.group, objective)
    if objective.kl_coef:
        loss = loss + objective.kl_coef * aggregate(t.kl, rows.group, objective)
    metrics = {
        "actor/pg_loss": policy,
        "actor/entropy": torch.cat(t.entropy).mean(),
        "actor/ratio_mean": torch.cat(t.ratio).mean(),
        "actor/ppo_kl": -torch.cat(t.log_ratio).mean(),
        "actor/pg_clipfrac": torch.cat(t.clipped).double().mean(),
        "actor/pg_clipfrac_lower": torch.cat(t.dual).double().mean(),
    }
    if objective.kl_coef:
        metrics["actor/kl_loss"] = torch.cat(t.kl).mean()
    return loss, {name: float(value) for name, value in metrics.items()}


def adamw(
    w: Weights, moments: dict[str, tuple[Tensor, Tensor]], number: int, lr: float, options: dict[str, float]
) -> None:
    """One clipped AdamW step in place, from the gradients on ``w``; biases and norms have no weight decay."""
    norm = torch.sqrt(sum((p.grad**2).sum() for p in w.values()))
    scale = min(1.0, options["clip"] / (float(norm) + 1e-6))
    with torch.no_grad():
        for name, p in w.items():
            grad, (mean, square) = p.grad * scale, moments[name]
            mean.mul_(options["beta1"]).add_(grad, alpha=1 - options["beta1"])
            square.mul_(options["beta2"]).add_(grad**2, alpha=1 - options["beta2"])
            if p.dim() > 1:
                p.mul_(1 - lr * options["decay"])
            corrected = (square / (1 - options["beta2"] ** number)).sqrt() + options["eps"]
            p.sub_(lr * mean / (1 - options["beta1"] ** number) / corrected)
            p.grad = None
