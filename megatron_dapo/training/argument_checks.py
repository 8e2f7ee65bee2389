"""What only makes sense with Megatron's numbers beside DAPO's: refused before anything is built, by ``plan`` too."""

from __future__ import annotations

from argparse import Namespace

from megatron.core.fp8_utils import get_fp8_align_size

from megatron_dapo import compat
from megatron_dapo.algorithm.losses import LOSSES
from megatron_dapo.config import Options
from megatron_dapo.config.checks import check_options
from megatron_dapo.data.prompts import check_data_options
from megatron_dapo.rollout.engine import ENGINES
from megatron_dapo.types import InputError


def check_arguments(args: Namespace, options: Options, training: bool) -> None:
    """Refuse what does not fit together: divisions first, then the numbers that follow from them.

    Raises:
        InputError: the first thing that is wrong, with the values and the flag to change.
    """
    _check_layout(args)
    check_options(options, global_batch_size=args.global_batch_size, training=training)
    check_data_options(options.data)
    if args.chat_template and options.data.apply_chat_template is False:
        raise InputError("--chat-template: nothing reads it with --no-apply-chat-template; leave one out")
    ENGINES.check(options.rollout.rollout_engine)
    LOSSES[options.loss.policy_loss]  # noqa: B018 - it refuses what is unknown
    if args.fp16:
        raise InputError("--fp16: its loss scaler would hide skipped steps; use --bf16")
    if args.fp8:
        _check_fp8(args)
    if training:
        _check_optimizer(args)
        _check_schedule(args, options)
        options.token_budget(args.context_parallel_size, sequence_multiple(args))


def _check_layout(args: Namespace) -> None:
    """Every division that a layout asks for."""
    tp, pp, cp, ep = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
        args.expert_model_parallel_size,
    )
    if args.world_size % (tp * pp * cp):
        raise InputError(
            f"{args.world_size} processes do not divide by tensor x pipeline x context = {tp * pp * cp}; change one of them"
        )
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    uneven = (
        args.decoder_first_pipeline_num_layers
        or args.decoder_last_pipeline_num_layers
        or args.pipeline_model_parallel_layout
    )
    stages = pp * (args.num_virtual_stages_per_pipeline_rank or 1)
    expert_tp = args.expert_tensor_parallel_size or tp
    divisions = [
        ("--tensor-model-parallel-size", tp, "--num-attention-heads", args.num_attention_heads),
        ("--tensor-model-parallel-size", tp, "--num-query-groups (key-value heads)", groups),
        ("--tensor-model-parallel-size", tp, "--ffn-hidden-size", args.ffn_hidden_size),
        ("pipeline stages:", stages, "--num-layers", None if uneven else args.num_layers),
        ("--expert-model-parallel-size", ep, "--num-experts", args.num_experts),
        ("--expert-tensor-parallel-size", expert_tp, "--moe-ffn-hidden-size", args.moe_ffn_hidden_size),
    ]
    if args.num_experts:
        ranks = expert_tp * ep * pp
        divisions.append(("expert tensor x expert x pipeline =", ranks, "the number of processes,", args.world_size))
    for flag, size, of, number in divisions:
        if number is not None and number % size:
            raise InputError(f"{flag} {size} does not divide {of} {number}; change one of them")
    if ep > 1 and not args.num_experts:
        raise InputError(f"--expert-model-parallel-size {ep}: the model has no experts; leave it out")


def _check_optimizer(args: Namespace) -> None:
    data_parallel = args.world_size // (
        args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    )
    if args.global_batch_size % data_parallel:
        raise InputError(
            f"--global-batch-size {args.global_batch_size} does not divide over {data_parallel} data-parallel ranks; change "
            "one of them"
        )
    if args.kl_coef and not (args.ref_load or args.load):
        raise InputError(f"--kl-coef {args.kl_coef} needs a reference policy: give --ref-load or --load DIR")
    if args.use_precision_aware_optimizer and not (args.dry_run or compat.has_transformer_engine()):
        raise InputError(
            "--use-precision-aware-optimizer (and --optimizer-cpu-offload, which needs it) take Transformer Engine's Adam, "
            "which is not installed; remove the flag or install it"
        )


def _check_schedule(args: Namespace, options: Options) -> None:
    """What Megatron's scheduler asserts when it is built."""
    warm_up = options.update.lr_warmup_rollouts * options.update.num_steps_per_rollout
    for name in ("min_lr", "lr_warmup_init"):
        if (value := getattr(args, name)) > args.lr:
            raise InputError(f"--{name.replace('_', '-')} {value} is above --lr {args.lr}; lower it")
    if args.lr_decay_iters is not None and args.lr_decay_iters <= warm_up:
        raise InputError(
            f"--lr-decay-iters {args.lr_decay_iters} is not above the warm-up, --lr-warmup-rollouts "
            f"{options.update.lr_warmup_rollouts} x --num-steps-per-rollout {options.update.num_steps_per_rollout} = {warm_up} "
            "optimizer steps; raise it"
        )
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        raise InputError("--lr-decay-style WSD needs --lr-wsd-decay-iters, the optimizer steps of its last part")
    if args.use_checkpoint_opt_param_scheduler:
        raise InputError(
            "--use-checkpoint-opt-param-scheduler: a resumed run takes learning rate and schedule from its recipe; give the old "
            "values there and leave the flag out"
        )


def _check_fp8(args: Namespace) -> None:
    """Megatron accepts FP8 where it then does nothing; here it is on or refused."""
    if args.transformer_impl != "transformer_engine":
        raise InputError("--fp8-format is silently ignored with --transformer-impl local; use transformer_engine")
    if not args.bf16:
        raise InputError("--fp8-format is silently ignored with fp32 parameters; add --bf16")
    if args.first_last_layers_bf16 and args.fp8_recipe == "delayed":
        raise InputError("--first-last-layers-bf16 does not go with --fp8-recipe delayed; use another recipe")
    if not args.dry_run and not compat.has_transformer_engine():
        raise InputError("--fp8-format needs Transformer Engine, which is not installed; remove the flag or install it")


def sequence_multiple(args: Namespace) -> int:
    """Every packed sequence is padded to this many tokens: zigzag context parallelism wants 2 x cp, sequence parallelism tp,
    FP8 kernels 16 a rank, or 32 with mxfp8."""
    cp, tp = args.context_parallel_size, args.tensor_model_parallel_size
    zigzag = 2 * cp if cp > 1 else 1
    multiple = zigzag * (tp if args.sequence_parallel else 1)
    return multiple * get_fp8_align_size(args.fp8_recipe) if args.fp8 else multiple
