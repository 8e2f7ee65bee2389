"""Recorded rollouts: one gzipped file of JSON lines per step, to read, and to train on again exactly.

A line is a group. Prompt, responses, answers and verdicts are readable as they stand (``zcat
step_000012.jsonl.gz``); token ids are plain numbers; log-probs are base64 of little-endian float32, so that
not a bit is lost.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.files import replacing
from megatron_dapo.types import Group, InputError, Prompt, Request, Sample, SamplingParams, Sums

_NAME = re.compile(r"step_(\d{6,})\.jsonl\.gz")


def step_file(folder: str | Path, step: int) -> Path:
    """Where ``folder`` keeps the groups of rollout step ``step`` (from 0)."""
    return Path(folder) / f"step_{step:06d}.jsonl.gz"


def available_steps(folder: str | Path) -> list[int]:
    """The steps that ``folder`` holds, ascending; none where there is no such folder."""
    names = [entry.name for entry in Path(folder).iterdir()] if Path(folder).is_dir() else []
    return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)


def check_recorded(folder: str | None, steps: int) -> None:
    """Every one of the first ``steps`` steps has to be in ``folder``, where there is one.

    Raises:
        InputError: some are missing.
    """
    if folder is not None and (missing := sorted(set(range(steps)) - set(available_steps(folder)))):
        raise InputError(
            f"--load-rollouts {folder}: {len(missing)} of --num-rollout {steps} steps are not there, step {missing[0]} the "
            "first; lower --num-rollout, or dump them with --dump-rollouts"
        )


def dump_rollouts(folder: str | Path, step: int, groups: list[Group]) -> Path:
    """Write the groups of ``step``; the file. It appears whole or not at all, and replaces an older one."""
    path = step_file(folder, step)
    with (
        replacing(path) as draft,
        gzip.open(draft, "wt", compresslevel=1, encoding="utf-8", errors="surrogatepass") as lines,
    ):
        for group in groups:
            lines.write(json.dumps(_to_json(group), ensure_ascii=False, default=_plain) + "\n")
    return path


def load_rollouts(folder: str | Path, step: int) -> list[Group]:
    """The groups that ``dump_rollouts`` wrote, equal in every field and bit.

    Raises:
        InputError: the step was not dumped, or its file is cut short or something else.
    """
    path = step_file(folder, step)
    if not path.is_file():
        steps = available_steps(folder)
        there = f"steps {steps[0]} .. {steps[-1]}" if steps else "no steps"
        raise InputError(f"{path}: no such file, its folder holds {there}; dump them with --dump-rollouts")
    try:
        if path.stat().st_size == 0:  # gzip would read no groups from it, and no error
            raise EOFError("empty file")
        with gzip.open(path, "rt", encoding="utf-8", errors="surrogatepass") as lines:
            return [_from_json(json.loads(line)) for line in lines]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{path}: not a whole dump of rollouts ({what}); remove it or dump them again") from error


def load_step(run: str | Path, step: int | None = None) -> tuple[int, list[Group]]:
    """Number and groups of a step (default: the last one there) that the run in folder ``run`` dumped; ``run`` may be its
    rollouts/ folder as well.

    Raises:
        InputError: nothing was dumped there, or not this step.
    """
    below = Path(run, "rollouts")
    folder = below if below.is_dir() else Path(run)
    steps = available_steps(folder)
    if not steps:
        raise InputError(f"{run}: no dumped rollouts there; train with --dump-rollouts")
    chosen = steps[-1] if step is None else step
    return chosen, load_rollouts(folder, chosen)


def _to_json(group: Group) -> dict[str, Any]:
    samples = [
        {
            "text": s.text,
            "prediction": s.prediction,
            "acc": s.acc,
            "score": s.score,
            "status": s.status,
            "finish_reason": s.finish_reason,
            "weight_version": s.weight_version,
            "spans": s.spans,
            "token_ids": s.token_ids.tolist(),
            "logprobs": base64.b64encode(np.asarray(s.logprobs, dtype="<f4").tobytes()).decode("ascii"),
        }
        for s in group.samples
    ]
    return {"order": group.order, "prompt": asdict(group.prompt), "samples": samples}


def _from_json(line: dict[str, Any]) -> Group:
    prompt = Prompt(**{**line["prompt"], "token_ids": tuple(line["prompt"]["token_ids"])})
    samples = []
    for fields in line["samples"]:
        raw = base64.b64decode(fields["logprobs"])
        logprobs = np.frombuffer(raw, dtype="<f4").astype(np.float32)  # a copy: buffers are read-only
        token_ids = np.array(fields["token_ids"], dtype=np.int64)
        if len(logprobs) != len(token_ids):
            raise ValueError(f"{len(logprobs)} log-probs for {len(token_ids)} tokens")
        spans = tuple(tuple(span) for span in fields.get("spans", ()))
        samples.append(Sample(**{**fields, "token_ids": token_ids, "logprobs": logprobs, "spans": spans}))
    return Group(prompt, samples, line["order"])


def _plain(value: Any) -> Any:
    """numpy values that a data file may have put into a prompt's ``extra``."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{value!r} in a prompt's extra fields cannot be written as JSON")


class NoEngine:
    """The engine of a run that generates nothing: all of its rollouts are recorded ones."""

    weight_version = 0

    def generate(
        self, requests: list[Request], params: SamplingParams, on_finish: Callable[[int], None] | None = None
    ) -> list[Sample]:
        """Never called: nothing is sampled and nothing evaluated."""
        raise AssertionError("a run of recorded rollouts was asked to generate")

    def publish(self, version: int) -> None:
        """Nobody needs the weights."""

    def follow(self) -> None:
        """Nothing is asked of the other ranks."""

    def release(self) -> None:
        """Nobody waits."""

    def report(self) -> Sums:
        """Nothing happened."""
        return {}

    def close(self) -> None:
        """Nothing to stop."""
