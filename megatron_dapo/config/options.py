"""DAPO's own options: frozen dataclasses that become command-line flags beside Megatron's.

Every field is a flag (``rollout_batch_size`` -> ``--rollout-batch-size``), its default the paper's setting and its
docstring the flag's help; a number's range stands in ``ranges``. Annotations stay real objects (no
``from __future__ import annotations``), because Megatron's argument-group factory reads them. Nothing here imports torch or
megatron.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_dapo.config.ranges import Ranged


@dataclass(frozen=True)
class ModelOptions(Ranged):
    """The model, from a Hugging Face checkpoint."""

    hf_checkpoint: str | None = None
    """Folder of a Hugging Face checkpoint: its config.json sets the model's flags, its tokenizer and weights are used where
    --tokenizer-model and --load name no others. --load itself takes such a folder as well."""
    save_hf_interval: int = 0
    """Export the policy as a Hugging Face checkpoint to <run_dir>/hf every so many rollout steps, and at the end; 0: never."""
    allow_longer_context: bool = False
    """Allow prompts and responses beyond the positions that config.json states; the console says so. SGLang servers then need
    --sglang-context-length too."""


@dataclass(frozen=True)
class DataOptions(Ranged):
    """Prompts: files, columns, templates."""

    prompt_data: list[str] | None = None
    """Training prompts: one or more .jsonl or .parquet files."""
    input_key: str = "auto"
    """Column of the prompt; dots go into nested fields. auto: 'prompt' (DAPO rows), 'question' or 'problem'."""
    label_key: str = "auto"
    """Column of the answer; dots go into nested fields. auto: 'reward_model.ground_truth' or 'answer'."""
    label_regex: str | None = None
    """The answer is group 1 of this pattern's last match in the label. Default: what follows '####', where there is one."""
    answer_type: Literal["number", "any"] = "number"
    """number: refuse a row whose answer is not a number when the file is read; any: take LaTeX and text as well. What is no
    answer (proof, notfound, nan, ...) or cannot be parsed is refused with both where the reward is math."""
    prompt_template: str = "auto"
    """Text around a plain question, with {problem} in it; or dapo (the wording of the DAPO data sets), none. auto: dapo. Rows
    of chat messages are taken as they are."""
    apply_chat_template: bool | None = None
    """Render prompts through the tokenizer's chat template (a plain question as one user turn), as the released recipe does.
    Default: where the tokenizer has one, for base models as well; without one a plain question is raw text, with the
    tokenizer's begin-of-text id, and chat messages are refused."""
    chat_template_kwargs: str | None = None
    """Keywords for the chat template, as a JSON object: '{"enable_thinking": false}'. One that the template does not read is
    refused. A row's own, in a column of this name, win."""
    unrendered_keys: Literal["error", "ignore"] = "error"
    """What to do with a key of a message that the chat template does not render (name, tool_call_id ...)."""
    rollout_max_prompt_len: int = 2048
    """Longest prompt, in tokens."""
    prompt_overflow: Literal["error", "drop", "truncate"] = "error"
    """What to do with a longer prompt; truncate keeps its last tokens (left truncation, as in the released recipe), behind the
    begin-of-text id where it has one."""
    dedup_prompts: bool = True
    """Keep one of the rows that have the same prompt and answer (the published DAPO file holds each about 100 times)."""
    conflicting_answers: Literal["error", "keep", "drop"] = "keep"
    """What to do with a problem that has different answers in different rows; how many there are is printed."""
    rollout_shuffle: bool = True
    """Shuffle the prompts again in every epoch, by --seed."""


@dataclass(frozen=True)
class RolloutOptions(Ranged):
    """Generation."""

    rollout_engine: str = "embedded"
    """Who generates: the training model itself with a KV cache, or SGLang servers."""
    num_rollout: int = 500
    """Rollout steps of the run."""
    rollout_batch_size: int = 512
    """Prompts (groups) a rollout step trains on."""
    n_samples_per_prompt: int = 16
    """Responses a prompt: the G of the paper."""
    rollout_max_response_len: int = 20480
    """Hard cap on response tokens: the paper's L_max."""
    rollout_temperature: float = 1.0
    """Sampling temperature; log-probs of the trainer use logits / temperature as well."""
    rollout_top_p: float = 1.0
    """Nucleus mass; below 1 the rollout distribution is not the one trained on, and is refused."""
    rollout_top_k: int = -1
    """Number of candidates kept; -1 keeps all; anything else is refused for the same reason."""
    rollout_stop_token_ids: list[int] | None = None
    """Token ids that end a response. Default: the tokenizer's end of text, and end of turn where it has one."""
    embedded_batch_size: int = 64
    """Sequences that a data-parallel rank of the embedded engine decodes together."""


@dataclass(frozen=True)
class ServerOptions(Ranged):
    """SGLang servers. Every --sglang-NAME VALUE goes to them as --NAME VALUE."""

    rollout_server_urls: list[str] | None = None
    """Servers that run already (http://host:port ...). Default: start --rollout-num-servers on this machine."""
    rollout_num_servers: int = 1
    """Servers to start."""
    rollout_num_gpus_per_engine: int = 1
    """Tensor-parallel size of a server."""
    rollout_server_host: str = "127.0.0.1"
    """Address that started servers listen on."""
    rollout_server_port: int = 0
    """Port of the first started server, the next ones 10 further each; 0: free ports."""
    rollout_router_url: str | None = None
    """An sglang-router that deals out the requests; weights and control calls go to the servers themselves."""
    server_start_timeout_s: float = 900.0
    """Seconds a server may take until it answers; then the run stops and names it."""
    server_health_interval_s: float = 10.0
    """Seconds between two looks at every server's health."""
    server_health_failures: int = 3
    """Failed health checks in a row before a server is marked failed and restarted."""
    rollout_concurrency: int = 256
    """Requests under way at a server."""
    rollout_request_timeout_s: float = 300.0
    """Seconds without a new token after which a request is sent to another server. However long it takes, a response that
    grows is not cut, nor is a request that may be waiting in its server's queue."""
    rollout_max_retries: int = 5
    """Times a sample is sent again before it is marked failed and counted as lost."""


@dataclass(frozen=True)
class PublishOptions(Ranged):
    """Publication of weights to the servers."""

    weight_transport: Literal["broadcast", "disk"] = "broadcast"
    """Over a process group of trainer and servers; or through a checkpoint in <run_dir> that the servers read (colocated)."""
    weight_bucket_mb: int = 512
    """Tensors sent together, in MiB."""
    weight_update_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What a publication does to requests under way: keep them and recompute their caches; keep both; or cut them short,
    to be continued from their tokens."""
    weight_update_timeout_s: float = 600.0
    """Seconds that a bucket, or joining the group, may take."""
    weight_probe: bool = True
    """Compare the servers' log-probs of a fixed prompt with the trainer's after every publication."""
    weight_probe_tolerance: float | None = None
    """Largest absolute difference allowed. Default: 1e-4 with fp32 weights, 0.25 with bf16, 1.0 with FP8 servers."""
    weight_checksum: bool = False
    """Compare a checksum of every tensor on the servers with the trainer's after every publication."""
    rollout_fp8: bool = False
    """Publish weights in FP8 (e4m3, a scale per 128 x 128 block), for servers that compute in it."""
    colocate: bool = False
    """Servers share the trainer's GPUs: they release their memory while it trains."""


@dataclass(frozen=True)
class OverlapOptions(Ranged):
    """Generation beside training."""

    rollout_mode: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: generate, then train. one_step_off: the next step is generated while this one trains, weights change between
    steps. async: weights change under running requests, up to max_staleness steps ahead."""
    max_staleness: int = 2
    """async: versions that the weights of a sample's oldest token may be behind those it is trained on."""


@dataclass(frozen=True)
class MismatchOptions(Ranged):
    """How far the servers' log-probs may be from the trainer's."""

    mismatch_warn: float = 0.05
    """The console warns when the mean absolute difference of a step exceeds this."""
    mismatch_stop: float | None = None
    """When it exceeds this, the step is logged and saved, and the run stops with status 2. Default: never."""


@dataclass(frozen=True)
class SamplerOptions(Ranged):
    """Dynamic sampling (paper section 3.2)."""

    dynamic_sampling: bool = True
    """Keep only groups whose samples are neither all right nor all wrong, and sample again until the step is full."""
    over_sampling_batch_size: int | None = None
    """Prompts of a wave. Default: 3 x rollout_batch_size with dynamic sampling (the released recipe), else 1 x."""
    sampling_budget: Literal["fixed", "yield_adaptive"] = "fixed"
    """Size of the next wave: always over_sampling_batch_size, or what the observed keep rate says is still missing."""
    budget_margin: float = 0.1
    """yield_adaptive: how much more than the expectation to ask for."""
    budget_ema: float = 0.7
    """yield_adaptive: weight of the past in the moving average of the keep rate."""
    max_num_gen_batches: int = 10
    """Waves a step may take before on_exhausted applies."""
    max_gen_seconds: float = 7200.0
    """Seconds a step may sample before on_exhausted applies (looked at between waves)."""
    on_exhausted: Literal["error", "train_partial", "keep_zero_signal", "repeat"] = "train_partial"
    """Too few groups with a signal: stop; train on those there are (none: skip the update); fill up with groups that
    carry no signal; or fill up by repeating groups that do."""
    surplus: Literal["drop", "keep"] = "drop"
    """Groups with a signal beyond rollout_batch_size: drop them (paper), or keep them for the next step (stale: then use
    rollout_correction)."""


@dataclass(frozen=True)
class RewardOptions(Ranged):
    """Rewards and their shaping (paper sections 2.4 and 3.4)."""

    reward: str = "auto"
    """Reward function by name. auto: the row's data source where one is registered under it, else math."""
    verifier_mode: Literal["strict", "verl_compat"] = "strict"
    """math: our verifier, or the released one's rules with its known misjudgements."""
    reward_num_workers: int = 2
    """Child processes that verify."""
    reward_timeout_s: float = 10.0
    """Seconds a verification may take; then its worker is killed and the sample's status is timeout."""
    overlong_buffer_len: int | None = None
    """Tokens before the cap over which the soft punishment grows to its full size; 0 turns it off. Default: a fifth of
    rollout_max_response_len (the paper's 4096 of 20480)."""
    overlong_penalty_factor: float = 1.0
    """Size of the soft punishment at the cap."""
    overlong_filtering: bool = False
    """Leave truncated samples out of the loss and its denominator (group statistics still see them)."""

    def overlong_buffer(self, max_response_len: int) -> int:
        """Tokens of ``overlong_buffer_len``, or what its default comes to for this cap."""
        return max_response_len // 5 if self.overlong_buffer_len is None else self.overlong_buffer_len


@dataclass(frozen=True)
class AdvantageOptions(Ranged):
    """From rewards to advantages."""

    reward_clip: float | None = None
    """Clip shaped rewards to [-x, x] before normalising."""
    advantage_mean: Literal["none", "group", "batch", "running"] = "group"
    """What is subtracted from a reward."""
    advantage_std: Literal["none", "group", "batch", "running"] = "group"
    """What a centred reward is divided by (plus 1e-6). none: Dr.GRPO."""
    advantage_clip: float | None = None
    """Clip advantages to [-x, x]."""


@dataclass(frozen=True)
class LossOptions(Ranged):
    """The policy loss (paper sections 3.1 and 3.3)."""

    policy_loss: str = "dapo"
    """A name in the loss registry: dapo (decoupled clip), gspo, cispo, nll; or yours, as package.module:function."""
    eps_clip: float = 0.2
    """Lower clip range."""
    eps_clip_high: float = 0.28
    """Upper clip range: clip-higher."""
    eps_clip_c: float | None = None
    """Dual clip: cap on the ratio where the advantage is negative (10 in the released recipe, off in the paper)."""
    loss_agg_mode: Literal["token-mean", "prompt-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    """What the summed token losses are divided by: tokens of the step; tokens of each prompt's group; tokens of each
    response (GRPO); a constant (Dr.GRPO)."""
    loss_norm_length: int | None = None
    """seq-mean-token-sum-norm: the constant. Default: rollout_max_response_len."""
    entropy_coef: float = 0.0
    """Entropy bonus."""
    kl_coef: float = 0.0
    """Penalty on the KL divergence (k3 estimate) from the reference policy; the paper has none."""
    ref_load: str | None = None
    """kl_coef: checkpoint of the reference policy. Default: --load."""
    old_logprobs: Literal["recompute", "rollout", "none"] = "recompute"
    """Log-probs of the old policy: recomputed by Megatron before the updates; the engine's own (bypass); or none: every
    update counts as the first, with ratio 1 (for nll)."""
    rollout_correction: Literal["auto", "none", "tis", "icepop"] = "auto"
    """Correction for the engine's log-probs differing from the trainer's: truncated importance weights, or a mask. auto: none
    where rollouts are on-policy (--rollout-mode sync), else tis."""
    tis_clip: float = 2.0
    """tis: cap on the weight exp(logp_old - logp_rollout)."""
    icepop_range: list[float] | None = None
    """icepop: tokens whose weight lies outside [low, high] leave the loss. Default: 0.5 5.0."""


@dataclass(frozen=True)
class UpdateOptions(Ranged):
    """Optimizer steps of a rollout step."""

    num_steps_per_rollout: int = 16
    """Optimizer steps per rollout; rollout_batch_size x n_samples_per_prompt = global_batch_size x this."""
    max_tokens_per_gpu: int | None = None
    """Token budget of a packed micro-batch on one GPU (times the context-parallel size a micro-batch). Default: the
    longest prompt plus the longest response."""
    lr_warmup_rollouts: int = 20
    """Linear warm-up, in rollout steps; its first optimizer step already has a learning rate above 0."""
    max_skipped_updates: int = 3
    """Optimizer steps skipped in a row, over rollout steps, after which the run stops: the gradient is not finite, or no token
    is in the loss (a rollout step in which no group has a signal counts as one). 0: never stop."""


@dataclass(frozen=True)
class EvalOptions(Ranged):
    """Evaluation; how often is Megatron's --eval-interval, in rollout steps (0: never)."""

    eval_prompt_data: list[str] | None = None
    """Problems to evaluate on: one or more .jsonl or .parquet files."""
    n_samples_per_eval_prompt: int = 32
    """Responses a problem: the k of avg@k."""
    eval_temperature: float = 1.0
    """Temperature of evaluation."""
    eval_top_p: float = 0.7
    """Nucleus mass of evaluation."""
    eval_top_k: int = -1
    """Candidates kept in evaluation; -1 keeps all."""
    eval_max_response_len: int | None = None
    """Cap on response tokens. Default: rollout_max_response_len."""
    eval_before_train: bool = False
    """Evaluate the starting policy too."""
    eval_name: str | None = None
    """eval: the report's folder in <run_dir>/eval. Default: the data files, the checkpoint, and digits that stand for all
    settings. An evaluation with other settings under the same name is refused."""


@dataclass(frozen=True)
class TrackingOptions(Ranged):
    """Where a run leaves its traces."""

    run_dir: str | None = None
    """Folder of the run. Default: runs/<name of the recipe>."""
    wandb_mode: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases (project, entity and name are Megatron's --wandb-* flags)."""
    progress: bool = True
    """Progress bar while sampling."""
    alarm_entropy: list[float] | None = None
    """The console warns when the policy's entropy leaves [low, high]. Default: 0.1 1.5."""


@dataclass(frozen=True)
class ReplayOptions(Ranged):
    """Recorded rollouts."""

    dump_rollouts: bool = False
    """Write every step's groups to <run_dir>/rollouts, to look at or to train on again."""
    load_rollouts: str | None = None
    """Train on the rollouts dumped in this folder instead of generating."""
    rollout_only: bool = False
    """Generate and score, never update."""


@dataclass(frozen=True)
class PlanOptions(Ranged):
    """The cluster a recipe is meant for; only --dry-run and plan read it, a launched run counts its own ranks."""

    actor_num_nodes: int = 1
    """Nodes that train."""
    actor_num_gpus_per_node: int = 1
    """GPUs of a training node."""
    dry_run: bool = False
    """Print the resolved recipe, the layout of ranks and the batch arithmetic, and stop; needs no GPU and no weights."""
