"""The checks across DAPO's options: what does not fit together is refused before anything is built."""

from __future__ import annotations

import re

from megatron_dapo.config import Options
from megatron_dapo.types import InputError


def check_options(options: Options, global_batch_size: int, training: bool = True) -> None:
    """Refuse options that do not fit together; what only training needs is not asked of an evaluation.

    Raises:
        InputError: the first thing that is wrong, with the values and the flag to change.
    """
    only_training = _training_rules(options, global_batch_size) if training else []
    rules = [*only_training, *_evaluation_rules(options), *_server_rules(options)]
    for holds, message in rules:
        if not holds:
            raise InputError(message)


def _training_rules(options: Options, global_batch_size: int) -> list[tuple[bool, str]]:
    """What a rollout step and its updates need."""
    r, loss, u = options.rollout, options.loss, options.update
    samples, updates = r.rollout_batch_size * r.n_samples_per_prompt, global_batch_size * u.num_steps_per_rollout
    buffer = options.reward.overlong_buffer(r.rollout_max_response_len)
    return [
        (
            samples == updates,
            f"--rollout-batch-size {r.rollout_batch_size} x --n-samples-per-prompt {r.n_samples_per_prompt} = {samples} is not "
            f"--global-batch-size {global_batch_size} x --num-steps-per-rollout {u.num_steps_per_rollout} = {updates}; "
            "make them equal",
        ),
        (
            not options.model.save_hf_interval or options.model.hf_checkpoint is not None,
            f"--save-hf-interval {options.model.save_hf_interval} needs --hf-checkpoint DIR, whose config and tokenizer it takes",
        ),
        (
            r.rollout_top_p == 1.0 and r.rollout_top_k == -1,
            f"--rollout-top-p {r.rollout_top_p} --rollout-top-k {r.rollout_top_k}: the trainer's log-probs are those of the "
            "whole distribution; sample it whole (1.0 and -1)",
        ),
        (
            r.n_samples_per_prompt > 1 or options.advantage.advantage_mean != "group",
            "--n-samples-per-prompt 1: a group of one has no advantage; sample more, or set --advantage-mean none",
        ),
        (
            buffer <= r.rollout_max_response_len,
            f"--overlong-buffer-len {buffer} is above --rollout-max-response-len {r.rollout_max_response_len}; lower it, or "
            "leave it out for a fifth of the response",
        ),
        (
            options.wave_size >= r.rollout_batch_size,
            f"--over-sampling-batch-size {options.wave_size} is below --rollout-batch-size {r.rollout_batch_size}; raise it",
        ),
        (
            loss.rollout_correction in ("auto", "none") or loss.old_logprobs != "rollout",
            f"--rollout-correction {loss.rollout_correction} compares the trainer's old log-probs with the engine's, which "
            "--old-logprobs rollout makes the same; use --old-logprobs recompute",
        ),
        (
            _low_and_high(options.tracking.alarm_entropy),
            f"--alarm-entropy {options.tracking.alarm_entropy}: give a low and a high bound",
        ),
        (_low_and_high(loss.icepop_range), f"--icepop-range {loss.icepop_range}: give a low and a high bound"),
    ]


def _evaluation_rules(options: Options) -> list[tuple[bool, str]]:
    """What an evaluation needs."""
    name = options.eval.eval_name
    return [
        (
            name is None or _names_an_evaluation(name),
            f"--eval-name {name}: letters, digits and . _ + = - only, and not step_<number>, which is training's own",
        ),
    ]


def _low_and_high(bounds: list[float] | None) -> bool:
    return bounds is None or (len(bounds) == 2 and bounds[0] < bounds[1])


def _names_an_evaluation(name: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.+=-]{0,150}", name, re.ASCII)) and not re.match(r"step_\d", name)


def _server_rules(options: Options) -> list[tuple[bool, str]]:
    """What SGLang servers, publication and overlap need."""
    r, server, publish, overlap = options.rollout, options.server, options.publish, options.overlap
    served = r.rollout_engine == "sglang"
    generates = not options.plan.dry_run and options.replay.load_rollouts is None
    return [
        (
            not served or options.model.hf_checkpoint is not None or not generates,
            "--rollout-engine sglang needs --hf-checkpoint DIR: servers start from it and weights get its names",
        ),
        (
            served or overlap.rollout_mode == "sync",
            f"--rollout-mode {overlap.rollout_mode}: the embedded engine is the training model and cannot generate beside it; "
            "use --rollout-engine sglang",
        ),
        (
            not publish.colocate or overlap.rollout_mode == "sync",
            f"--colocate with --rollout-mode {overlap.rollout_mode}: shared GPUs either generate or train; use sync",
        ),
        (
            not publish.colocate or publish.weight_transport == "disk",
            "--colocate: servers on the trainer's GPUs take weights by --weight-transport disk",
        ),
        (
            not (publish.rollout_fp8 and publish.weight_transport == "disk"),
            "--rollout-fp8 is quantised on its way to the servers: use --weight-transport broadcast",
        ),
        (
            not (publish.rollout_fp8 and publish.weight_checksum),
            "--weight-checksum compares the trainer's tensors, --rollout-fp8 sends others; leave one out",
        ),
        (
            all(url.startswith(("http://", "https://")) for url in server.rollout_server_urls or []),
            f"--rollout-server-urls {server.rollout_server_urls}: give each as http://host:port",
        ),
    ]
