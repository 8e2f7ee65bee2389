"""Flags that describe the model against the Hugging Face checkpoints that a run names."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Literal

from megatron_dapo.config import Options
from megatron_dapo.types import InputError
from megatron_dapo.weights.hf_folder import is_hf_checkpoint, load_config, read_json
from megatron_dapo.weights.hf_rope import Yarn
from megatron_dapo.weights.mapping import HfConfig, arguments_of

Purpose = Literal["train", "evaluate", "convert"]
"""What arguments are for."""


def number(text: str) -> int | float:
    """A number of the command line, an integer where it is one."""
    value = float(text)
    return int(value) if value.is_integer() else value


def models_of(args: argparse.Namespace) -> dict[str, HfConfig]:
    """The models of --hf-checkpoint and of Hugging Face checkpoints in --load and --ref-load, by folder."""
    weights = [folder for folder in (args.load, args.ref_load) if is_hf_checkpoint(folder)]
    return {folder: load_config(folder) for folder in (args.hf_checkpoint, *weights) if folder is not None}


def check_model(parser: argparse.ArgumentParser, args: argparse.Namespace, configs: dict[str, HfConfig]) -> None:
    """Refuse a model flag that contradicts the config.json of a Hugging Face checkpoint."""
    for folder, config in configs.items():
        if config.yarn and args.rollout_engine == "sglang":
            _check_servers_yarn(config.yarn, folder)
        for name, value in arguments_of(config).items():
            flag = "--" + name.replace("_", "-")
            action = parser._option_string_actions[flag]
            given, switch = getattr(args, action.dest), action.nargs == 0
            wanted = (action.const if value else action.default) if switch else value
            if given != wanted and str(given).replace(" ", "") != str(wanted).replace(" ", ""):
                says = f"{flag} {given} contradicts {folder}/config.json, which says {value}"
                raise InputError(f"{says}; leave it out and give --hf-checkpoint {folder}")


def _check_servers_yarn(yarn: Yarn, folder: str) -> None:
    """Refuse an attention factor that servers would not apply."""
    if not math.isclose(yarn.attention_factor, yarn.server_attention_factor, rel_tol=1e-6):
        raise InputError(
            f"{folder}/config.json: YaRN's attention_factor {yarn.attention_factor:g} is not read by SGLang, which computes with "
            f"{yarn.server_attention_factor:g}; use --rollout-engine embedded"
        )


def notes(args: argparse.Namespace) -> list[str]:
    """What a user should know about the model that a run starts with."""
    found = [
        f"{folder}/config.json: transformers does not know {', '.join(config.ignored)} of {config.architecture}: ignored"
        for folder, config in models_of(args).items()
        if config.ignored
    ]
    if not (args.load or args.hf_checkpoint or args.pretrained_checkpoint):
        found.append("weights: random, for neither --load nor --hf-checkpoint names any")
    return found


def check_lengths(
    args: argparse.Namespace, configs: dict[str, HfConfig], options: Options, purpose: Purpose
) -> list[str]:
    """Compare the lengths that the flags allow with the limits that the model's files state; what is to be said of them.

    Raises:
        InputError: a length is beyond the positions of the model, or beyond a sliding window: every token sees all tokens before
            it here, which is the same only while nothing is longer.
    """
    if purpose == "convert":
        return []
    said: list[str] = []
    for flag, response in _responses(options, purpose):
        longest = options.data.rollout_max_prompt_len + response
        given = f"--rollout-max-prompt-len {options.data.rollout_max_prompt_len} + {flag} {response} = {longest} tokens"
        for folder, config in configs.items():
            if config.window is not None and longest > config.window:
                raise InputError(
                    f"{folder}/config.json: sliding_window {config.window}: longer texts are not supported, {given}; lower them"
                )
            if longest > (positions := positions_of(config)):
                text = f"{folder}/config.json: the model has {positions} positions, {given}"
                if not options.model.allow_longer_context:
                    raise InputError(f"{text}; lower them, or add --allow-longer-context")
                said.append(text)
        limit = tokenizer_limit(args.tokenizer_model)
        if limit is not None and longest > limit:
            said.append(f"{args.tokenizer_model}/tokenizer_config.json: model_max_length is {limit}, {given}")
    return said


def _responses(options: Options, purpose: Purpose) -> list[tuple[str, int]]:
    """The longest responses of training and of evaluation, with the flags that set them."""
    training = ("--rollout-max-response-len", options.rollout.rollout_max_response_len)
    evaluation = training
    if options.eval.eval_max_response_len is not None:
        evaluation = ("--eval-max-response-len", options.eval.eval_max_response_len)
    wanted = [training] if purpose == "train" else [evaluation]
    return wanted if evaluation in wanted else [*wanted, evaluation]


def positions_of(config: HfConfig) -> int:
    """Positions that the model was made for: max_position_embeddings, or what YaRN stretches its original ones to."""
    return max(config.max_positions, round(config.yarn.factor * config.yarn.original_positions) if config.yarn else 0)


def tokenizer_limit(folder: str | None) -> int | None:
    """``model_max_length`` of a tokenizer; None where it states none (transformers writes 10**30 for that)."""
    path = Path(folder or "", "tokenizer_config.json")
    if folder is None or not path.is_file():
        return None
    content = read_json(path)
    stated = content.get("model_max_length") if isinstance(content, dict) else None
    return (
        int(stated)
        if isinstance(stated, (int, float)) and not isinstance(stated, bool) and 0 < stated < 2**31
        else None
    )
