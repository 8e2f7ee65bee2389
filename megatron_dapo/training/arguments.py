"""One flat list of options: Megatron's flags, ours beside them, a recipe below the command line.

Order of precedence, low to high: Megatron's defaults, ``DEFAULTS`` here, what the machine needs (``compat``),
the recipe, the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NoReturn

from megatron.training import arguments as megatron_arguments
from megatron.training.argument_utils import ArgumentGroupFactory, core_transformer_config_from_args
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_dapo import compat
from megatron_dapo.config import OPTION_PARTS, ModelOptions, Options, PublishOptions, ServerOptions, TrackingOptions
from megatron_dapo.config.ranges import RANGES, check_megatron_ranges, check_ranges
from megatron_dapo.config.recipe import (
    nearest,
    read_recipe,
    recipe_to_argv,
    recipe_value,
    take_server_flags,
    take_server_keys,
)
from megatron_dapo.training.argument_checks import check_arguments, sequence_multiple
from megatron_dapo.training.model_flags import Purpose, check_lengths, check_model, models_of, number, positions_of
from megatron_dapo.types import InputError
from megatron_dapo.weights.hf_folder import is_hf_checkpoint, load_config
from megatron_dapo.weights.mapping import arguments_of

DEFAULTS = [
    "--lr", "1e-6", "--lr-decay-style", "constant", "--weight-decay", "0.1", "--clip-grad", "1.0",
    "--adam-beta1", "0.9", "--adam-beta2", "0.999", "--global-batch-size", "512",
    "--attention-dropout", "0", "--hidden-dropout", "0", "--moe-token-dispatcher-type", "alltoall",
    "--use-distributed-optimizer", "--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable",
    "--save-interval", "50", "--eval-interval", "0", "--logging-level", "30",
    "--calculate-per-token-loss", "--no-check-for-nan-in-loss-and-grad",
    "--dataloader-type", "external", "--eval-iters", "0", "--no-create-attention-mask-in-dataloader",
    "--tokenizer-type", "NullTokenizer", "--micro-batch-size", "1", "--seq-length", "1",
    "--max-position-embeddings", "1", "--train-iters", "1",
]  # fmt: skip
"""Below recipe and command line. The last lines are what our loop, not Megatron's data loader, decides; ``_derive`` sets
the lengths and iterations from DAPO's own options."""

CAN_BE_OFF = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
"""Switches of DEFAULTS that get a ``--no-...`` beside them; the loop relies on the others."""

DERIVED = {
    "seq_length": "it is --rollout-max-prompt-len plus --rollout-max-response-len",
    "train_iters": "it is --num-rollout x --num-steps-per-rollout",
    "micro_batch_size": "a micro-batch is a packed row of --max-tokens-per-gpu tokens",
    "lr_warmup_iters": "warm-up counts rollout steps: --lr-warmup-rollouts",
    "yaml_cfg": "a recipe in TOML is the first word of the command line",
}
"""Megatron's flags that DAPO's options decide, and how: refused where somebody gives them."""

NEGATIVE_NUMBER = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|^-(inf|nan)$")
"""Words that begin with a dash and are values: argparse alone takes -1e-3 for a flag."""


class _Flags(ArgumentGroupFactory):  # type: ignore[misc]
    """Megatron's factory, with switches that can be turned on and off (``--x`` and ``--no-x``)."""

    def _build_argparse_kwargs_from_field(self, attribute: Any) -> dict[str, Any]:
        flag: dict[str, Any] = super()._build_argparse_kwargs_from_field(attribute)
        flag["help"] = " ".join(flag["help"].split()).replace("%", "%%")
        if attribute.name in RANGES:
            default = "" if attribute.default is None else " (default: %(default)s)"
            flag["help"] += f"{default} Range: {RANGES[attribute.name]}."
        if attribute.type in (bool, bool | None):
            flag |= {
                "arg_names": [self._format_arg_name(attribute.name)],
                "action": argparse.BooleanOptionalAction,
            }
        return flag


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults behind the flags that have one; some help texts of Megatron hold a bare %, at which argparse would stop."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            return action.help or ""


def _checked(kind: Callable[[str], Any], choices: Any) -> Callable[[str], Any]:
    """A flag's type of Megatron's own, which refuses what it cannot read as argparse wants it refused."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except Exception:
            names = ", ".join(choice.name for choice in choices or [] if isinstance(choice, enum.Enum))
            raise argparse.ArgumentTypeError(f"invalid value {text!r}{f'; one of {names}' if names else ''}") from None

    return read


class _Argv:
    """Adds our flags to Megatron's parser, then puts the recipe's words in front of the user's."""

    def __init__(self, argv: list[str]) -> None:
        self.recipe_path = argv[0] if argv and not argv[0].startswith("-") else None
        given = argv[1:] if self.recipe_path else argv
        self.given, self.server_flags = take_server_flags(given)
        self.parser: argparse.ArgumentParser | None = None
        self.words: list[str] = []
        self.turned_off: list[str] = []
        self.values: dict[str, Any] = {}
        for word in argv:
            if not word.isprintable() and ("\0" in word or any("\ud800" <= c <= "\udfff" for c in word)):
                raise InputError(f"command line: {ascii(word)[:80]}: not text in UTF-8; write it again")

    def __call__(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        self.parser = parser
        parser.prog = "python -m megatron_dapo train [RECIPE.toml]"
        parser.usage = "%(prog)s [FLAGS]   (DAPO's flags first, then Megatron's)"
        parser.description, parser.formatter_class = "Recipe keys are flag names; the command line wins.", _Help
        parser.error = self._refuse  # type: ignore[method-assign]
        megatrons = len(parser._action_groups)
        for part in OPTION_PARTS:
            _Flags(part).build_group(parser, title=f"DAPO, {part.__name__.removesuffix('Options').lower()}")
        groups = parser._action_groups
        groups[:] = groups[megatrons:] + groups[:megatrons]  # what people look for stands on top
        parser._option_string_actions["--rotary-base"].type = number  # Megatron's int would cut 10000.5
        for flag in CAN_BE_OFF:
            dest = parser._option_string_actions[flag].dest
            parser.add_argument("--no-" + flag[2:], dest=dest, action="store_false", help=f"turn {flag} off")
        parser._negative_number_matcher = NEGATIVE_NUMBER
        for action in parser._actions:
            if callable(action.type) and action.type not in (int, float, str, bool):
                action.type = _checked(action.type, action.choices)
        recipe = self._recipe(parser)
        model = self._model([*recipe, *self.given])
        for key in self.turned_off:
            if "--" + key.replace("_", "-") in model:
                raise InputError(f"{self.recipe_path}: {key} = false contradicts --hf-checkpoint; remove the line")
        self.words = [*model, *recipe, *self.given]
        self.values = _given(parser, self.words)
        for name in DERIVED.keys() & self.values.keys():
            raise InputError(f"--{name.replace('_', '-')} {self.values[name]}: leave it out; {DERIVED[name]}")
        sys.argv = [sys.argv[0], *DEFAULTS, *compat.default_flags(), *self.words]
        return parser

    def _model(self, words: list[str]) -> list[str]:
        """Words that --hf-checkpoint stands for: the model's flags, its tokenizer and its weights."""
        early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        early.error = self._refuse  # type: ignore[method-assign]
        early.add_argument("--hf-checkpoint")
        folder = early.parse_known_args(words)[0].hf_checkpoint
        if folder is None:
            return []
        values = arguments_of(load_config(folder))
        if os.path.isfile(os.path.join(folder, "tokenizer.json")):
            values["tokenizer_model"] = folder
        if is_hf_checkpoint(folder):
            values["load"] = folder
        assert self.parser is not None
        return recipe_to_argv(values, self.parser, folder)

    def _recipe(self, parser: argparse.ArgumentParser) -> list[str]:
        """The recipe as words of the command line."""
        if not self.recipe_path:
            return []
        recipe, server_flags = take_server_keys(read_recipe(self.recipe_path), self.recipe_path)
        self.server_flags = server_flags | self.server_flags
        for key, value in recipe.items():
            flag = "--" + key.replace("_", "-")
            if value is False and flag in DEFAULTS and flag not in CAN_BE_OFF:
                raise InputError(f"{self.recipe_path}: {key} = false: DAPO's step needs it; remove the line")
        self.turned_off = [key for key, value in recipe.items() if value is False]
        return recipe_to_argv(recipe, parser, self.recipe_path)

    def _refuse(self, message: str) -> NoReturn:
        assert self.parser is not None
        unknown = message.removeprefix("unrecognized arguments: ").split()[0] if "unrecognized" in message else ""
        hint = nearest(unknown, self.parser._option_string_actions) if unknown.startswith("--") else ""
        raise InputError(f"command line: {message}{hint}")


@contextlib.contextmanager
def _argv_of_this_call() -> Iterator[None]:
    before = list(sys.argv)
    try:
        yield
    finally:
        sys.argv = before


def parse(argv: list[str], purpose: Purpose = "train") -> tuple[argparse.Namespace, Options]:
    """Parse ``[RECIPE.toml] flags...`` into Megatron's arguments, validated, and our options. Of an evaluation and a conversion
    nothing is asked that only training needs, such as batches that divide; a conversion may have lengths that the model has not.

    Raises:
        InputError: an unknown key or flag, a bad value, or numbers that do not fit together.
    """
    ours = _Argv(argv)
    with _argv_of_this_call():
        args = megatron_arguments.parse_args(extra_args_provider=ours)
    assert ours.parser is not None
    check_megatron_ranges(vars(args))
    configs = models_of(args)
    check_model(ours.parser, args, configs)
    if args.rollout_correction == "auto":
        stale = args.rollout_mode != "sync" and args.old_logprobs == "recompute"
        args.rollout_correction = "tis" if stale else "none"
    args.run_dir = args.run_dir or os.path.join("runs", _recipe_name(ours.recipe_path))
    options = Options.from_args(args)
    args.recipe, args.resolved = ours.recipe_path, _resolved(ours.parser, args, ours.values)
    args.names_weights = any(word.split("=")[0] in ("--load", "--hf-checkpoint") for word in ours.given)
    args.sglang_flags = ours.server_flags
    passed_on = {"sglang_" + name.replace("-", "_"): value for name, value in ours.server_flags.items()}
    args.resolved |= {name: True if value is None else value for name, value in passed_on.items()}
    if args.dry_run:
        args.rank, args.world_size = 0, options.plan.actor_num_nodes * options.plan.actor_num_gpus_per_node
    check_arguments(args, options, purpose == "train")
    args.notes, args.changed = check_lengths(args, configs, options, purpose), []
    args.positions = min(map(positions_of, configs.values()), default=None)
    _derive(args, options, purpose == "train")
    _validate(args)
    return args, options


def _validate(args: argparse.Namespace) -> None:
    """Megatron's own checks: of the arguments, and of the model that they describe."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            megatron_arguments.validate_args(args)
            core_transformer_config_from_args(args)
    except Exception as error:
        plain = str(error) if isinstance(error, (AssertionError, ValueError, RuntimeError)) else ""
        reason = plain or f"{type(error).__name__} {error} in {_raised_at(error)}"
        raise InputError(f"Megatron refuses these arguments: {' '.join(reason.split())}") from error
    args.variable_seq_lengths = True  # validation resets it; every micro-batch has its own length


def parse_for_servers(argv: list[str]) -> argparse.Namespace:
    """What ``serve`` reads of a trainer's recipe and command line: the servers' options; the rest concerns training only.

    Raises:
        InputError: a value is none.
    """
    ours = _Argv(argv)
    parser = argparse.ArgumentParser(
        prog="python -m megatron_dapo serve [RECIPE.toml]",
        description="Start SGLang servers on this machine; --sglang-NAME VALUE goes to them. Flags for training are ignored.",
        allow_abbrev=False,
    )
    parser.error = ours._refuse  # type: ignore[method-assign]
    ours.parser = parser
    for part in (ServerOptions, PublishOptions, ModelOptions, TrackingOptions):
        _Flags(part).build_group(parser, title=part.__name__.removesuffix("Options").lower())
    parser.add_argument("--bf16", action="store_true", help="serve in bfloat16; default: float32")
    parser.add_argument("--seed", type=int, default=1234)
    recipe: dict[str, Any] = {}
    if ours.recipe_path:
        recipe, server_flags = take_server_keys(read_recipe(ours.recipe_path))
        ours.server_flags = server_flags | ours.server_flags
    known = {flag[2:].replace("-", "_") for flag in parser._option_string_actions}
    words = recipe_to_argv({k: v for k, v in recipe.items() if k in known}, parser, ours.recipe_path or "")
    args, _ = parser.parse_known_args([*words, *ours.given])
    check_ranges(vars(args), RANGES)
    args.sglang_flags = ours.server_flags
    args.run_dir = args.run_dir or os.path.join("runs", _recipe_name(ours.recipe_path))
    return args


def _given(parser: argparse.ArgumentParser, words: list[str]) -> dict[str, Any]:
    """What ``words`` set, by destination, and nothing that is a default."""
    unset = object()
    namespace = argparse.Namespace(**{action.dest: unset for action in parser._actions})
    return {dest: value for dest, value in vars(parser.parse_args(words, namespace)).items() if value is not unset}


def _resolved(parser: argparse.ArgumentParser, args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    """The run as a recipe that trains the same again, on another machine too: all of DAPO's options, and of Megatron's flags
    what the user or ``DEFAULTS`` set; what this machine lacks (``compat``) is worked out again where it is read."""
    ours = {f.name for part in OPTION_PARTS for f in fields(part)}
    below = {action.dest: action.default for action in parser._actions}
    ours_of_megatron = {dest: value for dest, value in _given(parser, DEFAULTS).items() if value != below[dest]}
    recipe: dict[str, Any] = {}
    values = ours_of_megatron | {name: getattr(args, name) for name in ours} | given
    for action in parser._actions:
        if action.dest not in values or action.dest in (*DERIVED, "dry_run"):
            continue
        if action.dest == "max_position_embeddings" and action.dest not in given:  # _derive sets it
            continue
        switch = action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction)
        if not switch or action.const == values[action.dest]:
            key, value = recipe_value(action, values[action.dest])
            recipe[key] = value
    return recipe


def _derive(args: argparse.Namespace, options: Options, training: bool) -> None:
    """Megatron arguments that follow from DAPO's options; lengths count a prompt and its response."""
    steps = options.update.num_steps_per_rollout
    args.train_iters = options.rollout.num_rollout * steps
    args.lr_warmup_iters = options.update.lr_warmup_rollouts * steps
    args.lr_decay_iters = args.lr_decay_iters or max(args.train_iters, args.lr_warmup_iters + 1)
    args.micro_batch_size = 1
    args.saves_never = args.save_interval == 0  # Megatron has no word for it
    args.save_interval = args.save_interval or args.train_iters
    if not training:
        args.global_batch_size = args.world_size  # of no use, but Megatron divides it over the ranks
    args.seq_length = sequence_multiple(args) * -(-options.longest_sequence // sequence_multiple(args))
    args.max_position_embeddings = max(args.max_position_embeddings, args.seq_length)
    if args.position_embedding_type == "yarn":
        args.apply_rope_fusion = False  # the fused kernel for packed rows leaves the attention factor out
    args.save = args.save or os.path.join(args.run_dir, "checkpoints")
    if args.vocab_size is None:
        raise InputError("--vocab-size is missing: give the number of rows of the model's embedding before padding")
    if args.padded_vocab_size is None:
        args.padded_vocab_size = calculate_padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, False
        )


def _recipe_name(path: str | None) -> str:
    return os.path.splitext(os.path.basename(path))[0] if path else "dapo"


def _raised_at(error: BaseException) -> str:
    """The line of Megatron's that has no words of its own."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.line} ({os.path.basename(frame.filename)}:{frame.lineno})"
