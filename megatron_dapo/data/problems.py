"""Everything that a run reads before a model is built: tokenizer, prompts to train on, problems to evaluate on, stop ids."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from megatron_dapo.config import Options
from megatron_dapo.data.prompts import load_eval_prompts, load_prompts
from megatron_dapo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dapo.rewards.math import check_answer, require_number
from megatron_dapo.rewards.registry import reward_of
from megatron_dapo.rewards.watch import form_warning
from megatron_dapo.types import InputError, Prompt
from megatron_dapo.weights.hf_folder import ending_ids, is_hf_checkpoint


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
