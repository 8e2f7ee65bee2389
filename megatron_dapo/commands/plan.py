"""What a recipe will do, before anything is built: the resolved values, who sits where, and the arithmetic of a batch."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from typing import Any

from megatron.core.parallel_state import RankGenerator

from megatron_dapo.config import OPTION_PARTS, Options
from megatron_dapo.config.recipe import toml_value
from megatron_dapo.training.argument_checks import sequence_multiple

SHOWN_RANKS = 8
"""Groups printed of each kind; a layout is regular, so more would repeat."""


def describe(args: Namespace, options: Options) -> str:
    """The text of ``--dry-run``."""
    return "\n".join([*_recipe(args), "", *_ranks(args), "", *_batches(args, options)])


def _recipe(args: Namespace) -> list[str]:
    lines = [
        f"# resolved recipe ({args.recipe or 'command line'}); Megatron's flags where they differ from its defaults"
    ]
    ours = {f.name for part in OPTION_PARTS for f in fields(part)}
    for name, value in args.resolved.items():
        if value is not None:
            whose = "" if name in ours else "   # sglang" if name.startswith("sglang_") else "   # megatron"
            lines.append(f"{name} = {toml_value(value)}{whose}")
    unset = [name for name, value in args.resolved.items() if value is None]
    lines.append("# not set: " + ", ".join(unset))
    return lines


def _ranks(args: Namespace) -> list[str]:
    tp, pp, cp, dp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
        args.data_parallel_size,
    )
    lines = [f"# ranks: {args.world_size} = tensor {tp} x context {cp} x data {dp} x pipeline {pp}"]
    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    for name in ("tp", "cp", "pp", "dp"):
        groups = generator.get_ranks(name)
        if len(groups[0]) > 1:
            more = f" ... {len(groups)} groups" if len(groups) > SHOWN_RANKS else ""
            lines.append(f"#   {name}: " + " ".join(str(g) for g in groups[:SHOWN_RANKS]) + more)
    if args.num_experts:
        lines.append(f"#   experts: {args.num_experts} over expert-parallel {args.expert_model_parallel_size}")
    return lines


def _batches(args: Namespace, options: Options) -> list[str]:
    r, u, s = options.rollout, options.update, options.sampler
    samples = r.rollout_batch_size * r.n_samples_per_prompt
    waves = f"{options.wave_size} prompts per wave" + (
        f", at most {s.max_num_gen_batches}" if s.dynamic_sampling else ""
    )
    dp, multiple, prompt = args.data_parallel_size, sequence_multiple(args), options.data.rollout_max_prompt_len
    budget = options.token_budget(args.context_parallel_size, multiple)
    buffer = options.reward.overlong_buffer(r.rollout_max_response_len)
    limit = f"; the model has {args.positions} positions" if args.positions else ""
    warmup = u.lr_warmup_rollouts * u.num_steps_per_rollout
    rows: list[tuple[str, Any]] = [
        ("rollout step", f"{r.rollout_batch_size} prompts x {r.n_samples_per_prompt} samples = {samples} responses"),
        ("sampling", ("dynamic, " if s.dynamic_sampling else "no filter, ") + waves),
        ("optimizer steps", f"{samples} = {args.global_batch_size} per step x {u.num_steps_per_rollout} steps per rollout"),
        ("run", f"{r.num_rollout} rollouts = {args.train_iters} optimizer steps"),
        ("warm-up", f"{u.lr_warmup_rollouts} rollouts = {warmup} optimizer steps = {warmup * args.global_batch_size} responses"),
        ("prompts", _prompts(options)),
        ("data parallel", f"{args.global_batch_size / dp:g} responses a step on each of {dp}"),
        ("lengths", f"prompt {prompt} + response {r.rollout_max_response_len}, padded to {multiple}{limit}"),
        ("micro-batch", f"at most {budget} packed tokens"),
        ("overlong", f"penalty from {r.rollout_max_response_len - buffer} tokens on" if buffer else "no penalty"),
    ]  # fmt: skip
    rows += [("note", note) for note in args.notes]
    return ["# batches", *(f"#   {name}: {text}" for name, text in rows)]


def _prompts(options: Options) -> str:
    d = options.data
    chat = {
        None: "through the tokenizer's chat template, where it has one",
        True: "through the chat template",
        False: "raw",
    }
    wording = {"auto": "in the dapo wording", "dapo": "in the dapo wording", "none": "as they stand"}
    return (
        f"{chat[d.apply_chat_template]}; plain questions {wording.get(d.prompt_template, 'in your --prompt-template')}"
    )
