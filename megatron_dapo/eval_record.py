"""What an evaluation was of and how: all that is needed to repeat it, and the folder that is its alone."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform as machine
import re
import shlex
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_dapo import __version__
from megatron_dapo.config import Options
from megatron_dapo.rewards.registry import reward_for
from megatron_dapo.types import InputError, Prompt

CIRCUMSTANCES = ("command", "directory", "versions", "processes")
"""Parts of a setup that may differ between two runs of the same evaluation."""
NOT_OF_PROMPTS = ("prompt_data", "dedup_prompts", "rollout_shuffle")
PACKAGES = ("torch", "megatron-core", "transformers", "sglang", "reasoning-gym", "math-verify")
LONGEST_NAME = 60


class EvalRecord:
    """What a run's evaluations are of. Training's belong to a step; the one of ``eval`` has a ``name``, which is refused where
    another evaluation has it, before a model is loaded. ``weights`` has the ``path`` of what is evaluated, and its ``iteration``
    (None: a Hugging Face checkpoint); training's are of the policy itself, wherever it came from.
    """

    def __init__(self, args: Namespace, setup: dict[str, Any], weights: dict[str, Any] | None) -> None:
        self._setup, self._weights, self._run = setup, weights, os.path.abspath(args.run_dir)
        self.name, self.folder = None, Path(args.run_dir)
        if weights is not None:
            whole = {**setup, "checkpoint": weights}
            self.name = args.eval_name or default_name(whole)
            check_name(self.name, self.folder, whole)
            self.folder = self.folder / "eval" / self.name

    def setup(self, step: int) -> dict[str, Any]:
        """All of an evaluation after ``step`` rollout steps."""
        in_training = {"path": self._run, "iteration": step, "in_training": True}
        return {**self._setup, "checkpoint": self._weights or in_training}


def describe_setup(
    args: Namespace, options: Options, prompts: Sequence[Prompt], stop_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Data, prompts, sampling, reward and circumstances of an evaluation; its checkpoint is ``checkpoint``, to be added."""
    sampling = asdict(options.eval_sampling(tuple(stop_token_ids)))
    told = hashlib.sha256(json.dumps([p.token_ids for p in prompts]).encode()).hexdigest()
    return {
        "data": [{"path": path, "sha256": _hash(path)} for path in options.eval.eval_prompt_data or []],
        "problems": {"all": len(prompts), **Counter(p.data_source for p in prompts)},
        "prompts": {k: v for k, v in asdict(options.data).items() if k not in NOT_OF_PROMPTS}
        | {"tokenizer": args.tokenizer_model, "sha256_of_token_ids": told},
        "checkpoint": {},
        "sampling": {
            "samples_per_problem": options.eval.n_samples_per_eval_prompt,
            **sampling,
            "seed": args.seed,
            "engine": options.rollout.rollout_engine,
            "precision": "bf16" if args.bf16 else "fp32",
        },
        "reward": {
            "by_source": {p.data_source: reward_for(p, options.reward) for p in prompts},
            "verifier_mode": options.reward.verifier_mode,
            "timeout_s": options.reward.reward_timeout_s,
        },
        "versions": {"megatron_dapo": __version__, "python": machine.python_version(), **_versions()},
        "processes": args.world_size,
        "directory": os.getcwd(),
        "command": shlex.join(["python", "-m", "megatron_dapo", *sys.argv[1:]]),
    }


def identity(setup: Mapping[str, Any]) -> dict[str, Any]:
    """What makes an evaluation this one and no other, as JSON has it."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(setup)))
    return {name: value for name, value in plain.items() if name not in CIRCUMSTANCES}


def default_name(setup: Mapping[str, Any]) -> str:
    """The files, the checkpoint, and a few digits that stand for everything else: another evaluation has another name.

    Example: ``aime-2024-step_000004-3f2a9c1d``
    """
    stems = "+".join(dict.fromkeys(Path(d["path"]).name.split(".")[0] for d in setup["data"]))
    iteration = setup["checkpoint"].get("iteration")
    weights = Path(setup["checkpoint"]["path"]).name if iteration is None else f"step_{iteration:06d}"
    digits = hashlib.sha256(json.dumps(identity(setup), sort_keys=True).encode()).hexdigest()[:8]
    return re.sub(r"[^\w.+=-]", "_", f"{stems[:LONGEST_NAME]}-{weights[-LONGEST_NAME:]}") + f"-{digits}"


def check_name(name: str, folder: Path, setup: Mapping[str, Any]) -> None:
    """Raises: ``InputError`` where ``folder`` holds an evaluation of this name that is another one."""
    path = folder / "eval" / name / "report.json"
    if not path.is_file():
        return
    there = read_report(path).get("setup") or {}
    differs = [k for k in _flat(identity(setup)) if _flat(identity(there)).get(k) != _flat(identity(setup))[k]]
    if differs:
        shown = ", ".join(
            f"{key} is {_flat(identity(there)).get(key)!r} there and {_flat(identity(setup))[key]!r} here"
            for key in differs[:3]
        )
        raise InputError(f"--eval-name {name}: {path} is another evaluation ({shown}); choose another name")


def own_folder(folder: Path, name: str, content: Mapping[str, Any]) -> Path:
    """``folder``/eval/``name``, or with the next free number behind it where another report is there already: the same
    evaluation with the same result takes the same folder again, nothing else is written over."""
    number = 1
    while True:
        target = folder / "eval" / (name if number == 1 else f"{name}-{number}")
        path = target / "report.json"
        if not path.exists() or _result(read_report(path)) == _result(json.loads(json.dumps(content))):
            return target
        number += 1


def read_report(path: Path) -> dict[str, Any]:
    """A report, {} where the file is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _result(content: Mapping[str, Any]) -> dict[str, Any]:
    """A report without its circumstances."""
    return {**content, "setup": identity(content.get("setup") or {})}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def markdown(setup: Mapping[str, Any]) -> str:
    """The setup as a table."""
    rows = [f"| {name} | {_cell(value)} |" for name, value in _flat(setup).items() if value not in (None, "")]
    return "## What was evaluated, and how\n\n| | |\n| --- | --- |\n" + "\n".join(rows) + "\n"


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split()).replace("|", "\\|")


def _hash(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
