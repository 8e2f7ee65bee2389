"""The checks across DAPO's options: what does not fit together is refused before anything is built."""

from __future__ import annotations

from megatron_dapo.config import Options
from megatron_dapo.types import InputError


def check_options(options: Options, global_batch_size: int) -> None:
    """Refuse options that do not fit together.

    Raises:
        InputError: the first thing that is wrong, with the values and the flag to change.
    """
    r, s, e, loss, u = options.rollout, options.sampler, options.reward, options.loss, options.update
    samples = r.rollout_batch_size * r.n_samples_per_prompt
    rules: list[tuple[bool, str]] = [
        (
            samples == global_batch_size * u.num_steps_per_rollout,
            f"--rollout-batch-size {r.rollout_batch_size} x --n-samples-per-prompt {r.n_samples_per_prompt} = {samples} is not "
            f"--global-batch-size {global_batch_size} x --num-steps-per-rollout {u.num_steps_per_rollout} = "
            f"{global_batch_size * u.num_steps_per_rollout}; make them equal",
        ),
        (
            not options.model.save_hf_interval or options.model.hf_checkpoint is not None,
            f"--save-hf-interval {options.model.save_hf_interval} needs --hf-checkpoint DIR, whose config and tokenizer it takes",
        ),
        (
            r.rollout_temperature > 0,
            f"--rollout-temperature {r.rollout_temperature}: training needs a temperature above 0",
        ),
        (
            r.rollout_top_p == 1.0 and r.rollout_top_k in (-1, 0),
            f"--rollout-top-p {r.rollout_top_p} --rollout-top-k {r.rollout_top_k}: the trainer's log-probs are those of the "
            "whole distribution; sample it whole (1.0 and -1)",
        ),
        (
            r.n_samples_per_prompt > 1 or options.advantage.advantage_mean != "group",
            "--n-samples-per-prompt 1: a group of one has no advantage; sample more, or set --advantage-mean none",
        ),
        (
            0 <= e.overlong_buffer_len <= r.rollout_max_response_len,
            f"--overlong-buffer-len {e.overlong_buffer_len} must lie in 0 .. --rollout-max-response-len "
            f"{r.rollout_max_response_len}",
        ),
        (
            options.wave_size >= r.rollout_batch_size,
            f"--over-sampling-batch-size {options.wave_size} is below --rollout-batch-size {r.rollout_batch_size}; raise it",
        ),
        (
            s.max_num_gen_batches >= 1,
            f"--max-num-gen-batches {s.max_num_gen_batches}: at least 1 (the loop is always bounded)",
        ),
        (0 < loss.eps_clip < 1, f"--eps-clip {loss.eps_clip} must lie between 0 and 1"),
        (loss.eps_clip_high > 0, f"--eps-clip-high {loss.eps_clip_high} must be above 0"),
        (
            loss.eps_clip_c is None or loss.eps_clip_c > 1,
            f"--eps-clip-c {loss.eps_clip_c} caps a ratio, so it must be above 1 (the released recipe has 10)",
        ),
        (
            loss.rollout_correction in ("auto", "none") or loss.old_logprobs != "rollout",
            f"--rollout-correction {loss.rollout_correction} compares the trainer's old log-probs with the engine's, which "
            "--old-logprobs rollout makes the same; use --old-logprobs recompute",
        ),
        (
            loss.loss_norm_length is None or loss.loss_norm_length > 0,
            f"--loss-norm-length {loss.loss_norm_length} must be above 0",
        ),
        (
            options.tracking.alarm_entropy is None or len(options.tracking.alarm_entropy) == 2,
            f"--alarm-entropy {options.tracking.alarm_entropy}: give a low and a high bound",
        ),
        (
            loss.icepop_range is None or (len(loss.icepop_range) == 2 and loss.icepop_range[0] < loss.icepop_range[1]),
            f"--icepop-range {loss.icepop_range}: give a low and a high bound",
        ),
        (u.max_skipped_updates >= 0, f"--max-skipped-updates {u.max_skipped_updates}: 0 (never stop) or more"),
        (
            u.max_tokens_per_gpu is None or u.max_tokens_per_gpu > 0,
            f"--max-tokens-per-gpu {u.max_tokens_per_gpu} must be above 0",
        ),
    ]
    for holds, message in [*rules, *_server_rules(options)]:
        if not holds:
            raise InputError(message)


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
        (overlap.max_staleness >= 1, f"--max-staleness {overlap.max_staleness}: at least 1 (sync has none)"),
        (server.rollout_num_servers >= 1, f"--rollout-num-servers {server.rollout_num_servers}: at least 1"),
        (
            publish.weight_bucket_mb >= 1,
            f"--weight-bucket-mb {publish.weight_bucket_mb}: at least 1",
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
