"""What only rank 0 does: prompts, sampling, rewards, evaluation problems, recorded rollouts, and the state of all that."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.algorithm.advantages import RunningStatistics
from megatron_dapo.config import Options
from megatron_dapo.data.prompts import PromptCursor, load_eval_prompts, load_prompts
from megatron_dapo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dapo.evaluation import EvalReport, evaluate
from megatron_dapo.rewards.math import check_answer, require_number
from megatron_dapo.rewards.registry import reward_of
from megatron_dapo.rewards.watch import WatchedRewards, form_warning
from megatron_dapo.rollout.budget import make_budget
from megatron_dapo.rollout.engine import Engine
from megatron_dapo.rollout.replay import available_steps, dump_rollouts, load_rollouts
from megatron_dapo.rollout.sampler import DynamicSampler
from megatron_dapo.rollout.trajectories import build_trajectories
from megatron_dapo.text_metrics import text_sums
from megatron_dapo.types import Group, InputError, Prompt, Sums, Trajectories, merge_sums
from megatron_dapo.weights.hf_folder import ending_ids, is_hf_checkpoint

Progress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Problems:
    """What a run reads before anything is built, so that bad input costs seconds and not a model's start."""

    tokenizer: Tokenizer
    train: list[Prompt]
    eval: list[Prompt]
    stop_token_ids: tuple[int, ...]


def load_problems(args: Namespace, options: Options, evaluation_only: bool = False) -> Problems | None:
    """Tokenizer and problems of the recipe; None where recorded rollouts need neither.

    Raises:
        InputError: a file, a row, the tokenizer or its vocabulary is not as the recipe says.
    """
    if not evaluation_only:
        _check_recorded(options)
    training = not (evaluation_only or options.replay.load_rollouts)
    if not training and not options.eval.eval_prompt_data:
        if evaluation_only:
            raise InputError("--eval-prompt-data is missing: give the .jsonl or .parquet files to evaluate on")
        return None
    if not args.tokenizer_model:
        raise InputError("--tokenizer-model is missing: give the folder of the model's tokenizer.json")
    if training and not options.data.prompt_data:
        raise InputError("--prompt-data is missing: give one or more .jsonl or .parquet files of prompts")
    tokenizer = load_tokenizer(args.tokenizer_model, chat_template=args.chat_template)
    tokenizer.check_vocab(args.vocab_size)
    number = options.data.answer_type == "number"
    check = require_number if number else check_answer

    def is_checked(source: str) -> bool:
        """Of any answer only the ones that the verifier of mathematics compares: others are their reward's business."""
        return number or reward_of(source, options.reward) == "math"

    files = options.data.prompt_data or []
    train = load_prompts(files, options.data, tokenizer, check, is_checked=is_checked) if training else []
    files = options.eval.eval_prompt_data or []
    evaluation = load_eval_prompts(files, options.data, tokenizer, check, is_checked=is_checked) if files else []
    for prompts in (train, evaluation):
        if warning := form_warning(prompts, options.reward):
            print(warning, flush=True)
    return Problems(
        tokenizer=tokenizer,
        train=train,
        eval=evaluation,
        stop_token_ids=tuple(options.rollout.rollout_stop_token_ids or _stop_token_ids(args, tokenizer)),
    )


def _stop_token_ids(args: Namespace, tokenizer: Tokenizer) -> list[int]:
    """What ends a response: the tokenizer's ids, and those of config.json and generation_config.json, at which servers stop."""
    folders = {args.tokenizer_model, args.hf_checkpoint, args.load if is_hf_checkpoint(args.load) else None} - {None}
    found = set(tokenizer.stop_token_ids).union(*(ending_ids(folder) for folder in folders))
    return sorted(token for token in found if 0 <= token < args.vocab_size)


def _check_recorded(options: Options) -> None:
    """Every step of the run has to be in --load-rollouts."""
    folder, wanted = options.replay.load_rollouts, range(options.rollout.num_rollout)
    if folder is not None and (missing := sorted(set(wanted) - set(available_steps(folder)))):
        raise InputError(
            f"--load-rollouts {folder}: {len(missing)} of --num-rollout {len(wanted)} steps are not there, step {missing[0]} the "
            "first; lower --num-rollout, or dump them with --dump-rollouts"
        )


class RolloutSide:
    """Collects the groups of a step and turns them into trajectories. Lives on rank 0."""

    def __init__(
        self,
        args: Namespace,
        options: Options,
        problems: Problems | None,
        engine: Engine | None,
        faults: str | Path | None = None,
    ) -> None:
        self.options = options
        self.seed = args.seed
        self.run_dir = Path(args.run_dir)
        self.engine = engine
        self.problems = problems
        self.running = RunningStatistics()
        self.rewards = WatchedRewards(options.reward, Path(faults or self.run_dir))
        self.sampler = self._sampler() if problems and problems.train else None

    def _sampler(self) -> DynamicSampler:
        assert self.problems is not None and self.engine is not None
        cursor = PromptCursor(self.problems.train, self.seed, self.options.data.rollout_shuffle)
        params = self.options.train_sampling(self.problems.stop_token_ids)
        budget = make_budget(self.options)
        return DynamicSampler(self.options, self.seed, cursor, self.engine, self._judge, budget, params)

    def _judge(self, groups: list[Group]) -> Sums:
        """The verdicts on a wave, and how much of it the tokenizer cannot read."""
        assert self.problems is not None
        samples = [sample for group in groups for sample in group.samples]
        unknown = sum(self.problems.tokenizer.unknown(sample.token_ids) for sample in samples)
        tokens = sum(sample.length for sample in samples)
        return {**self.rewards.score(groups), "sampling/unknown_ids": (float(unknown), float(tokens))}

    def collect(self, step: int, progress: Progress | None = None) -> tuple[Trajectories, Sums]:
        """The trajectories of rollout step ``step``: sampled, or read back from a dump."""
        sampled: Sums = {}
        if self.options.replay.load_rollouts:
            groups = load_rollouts(self.options.replay.load_rollouts, step)
        else:
            assert self.sampler is not None
            batch = self.sampler.collect(progress)
            groups, sampled = batch.groups, batch.report
            assert self.engine is not None
            sampled = merge_sums(sampled, self.engine.report())
        if self.options.replay.dump_rollouts:
            dump_rollouts(self.run_dir / "rollouts", step, groups)
        rows, shaped = build_trajectories(groups, self.options, self.running)
        text = text_sums([s for g in groups for s in g.samples])
        return rows, {**merge_sums(sampled, shaped), **text}

    def evaluate(self) -> EvalReport:
        """Accuracy on the evaluation problems."""
        assert self.engine is not None and self.problems is not None
        params = self.options.eval_sampling(self.problems.stop_token_ids)
        return evaluate(self.engine, self.problems.eval, self.options, params, self.rewards.score, self.seed)

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs besides Megatron's checkpoint."""
        return {
            "sampler": self.sampler.state_dict() if self.sampler else None,
            "running": self.running.state_dict(),
            "rewards": self.rewards.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        if self.sampler is not None and state["sampler"] is not None:
            self.sampler.load_state_dict(state["sampler"])
        self.running.load_state_dict(state["running"])
        self.rewards.load_state_dict(state.get("rewards", {"known": []}))

    def close(self) -> None:
        """Stop the reward workers."""
        self.rewards.close()
