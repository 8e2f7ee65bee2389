"""Flags that describe the model against the Hugging Face checkpoints that a run names."""

from __future__ import annotations

import argparse
import math

from megatron_dapo.config import Options
from megatron_dapo.types import InputError
from megatron_dapo.weights.hf_folder import is_hf_checkpoint, load_config
from megatron_dapo.weights.hf_rope import Yarn
from megatron_dapo.weights.mapping import HfConfig, arguments_of


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


def check_window(configs: dict[str, HfConfig], options: Options) -> None:
    """Every token sees all tokens before it here: the same as with a sliding window only while nothing is longer."""
    response = max(options.rollout.rollout_max_response_len, options.eval.eval_max_response_len or 0)
    longest = options.data.rollout_max_prompt_len + response
    for folder, config in configs.items():
        if config.window is not None and longest > config.window:
            raise InputError(
                f"{folder}/config.json: sliding_window {config.window}: longer texts are not supported, prompt and response "
                f"may take {longest} tokens; lower --rollout-max-prompt-len, --rollout-max-response-len, --eval-max-response-len"
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
