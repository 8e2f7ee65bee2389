"""Read what a run sampled: prompts, responses and verdicts of one dumped rollout step, in a terminal.

python tools/inspect_rollouts.py runs/x [--step 12] [--num 3] [--only right|wrong|mixed|truncated] [--full]

Needs a run with --dump-rollouts. Steps count from 0, as in the names of the files.
"""

from __future__ import annotations

import argparse
import signal
import sys
import textwrap
from itertools import zip_longest
from pathlib import Path

from megatron_dapo.algorithm.filtering import has_verdict, verdict_of
from megatron_dapo.rollout.replay import load_step
from megatron_dapo.types import Group, InputError, Sample

WIDTH = 100
HEAD, TAIL = 12, 8
"""Lines shown of either end of a long response without --full."""


def main(argv: list[str] | None = None) -> int:
    """Print the samples asked for; 0, or 2 after one line about what is wrong with the request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run, or its rollouts/ folder")
    parser.add_argument("--step", type=int, help="rollout step (default: the last one there)")
    parser.add_argument("--num", type=int, default=3, help="samples to print (default: 3)")
    kinds = ["right", "wrong", "mixed", "truncated"]
    parser.add_argument("--only", choices=kinds, help="mixed: samples of groups with a signal")
    parser.add_argument("--full", action="store_true", help="print long responses whole")
    given = parser.parse_args(argv)
    try:
        if given.num < 1:
            raise InputError(f"--num {given.num}: print at least 1 sample")
        step, groups = load_step(given.run, given.step)
        print(summary(step, groups))
        shown = choose(groups, given.only)[: given.num]
        if not shown:
            print("no sample to show" + (f" with --only {given.only}" if given.only else ""))
        for group, index in shown:
            print("\n" + render(group, index, given.full))
    except InputError as error:
        print(f"inspect_rollouts: error: {error}", file=sys.stderr)
        return 2
    return 0


def summary(step: int, groups: list[Group]) -> str:
    """One line about the whole step."""
    samples = [s for g in groups for s in g.samples]
    if not samples:
        return f"step {step}: no groups"
    right = sum(s.acc > 0.5 for s in samples) / len(samples)
    long = sum(s.truncated for s in samples) / len(samples)
    mixed = sum(verdict_of(g) == "mixed" for g in groups)
    mean = sum(s.length for s in samples) / len(samples)
    return (
        f"step {step}: {len(groups)} groups ({mixed} mixed), {len(samples)} samples, {right:.1%} right, "
        f"mean length {mean:.0f}, {long:.1%} truncated"
    )


def choose(groups: list[Group], only: str | None) -> list[tuple[Group, int]]:
    """The samples that match, as (group, index): one of every group before a second of any."""
    matching = [[(g, i) for i, s in enumerate(g.samples) if _matches(g, s, only)] for g in groups]
    return [found for row in zip_longest(*matching) for found in row if found is not None]


def _matches(group: Group, sample: Sample, only: str | None) -> bool:
    return {
        None: True,
        "right": has_verdict(sample) and sample.acc > 0.5,
        "wrong": has_verdict(sample) and sample.acc <= 0.5,
        "mixed": verdict_of(group) == "mixed",
        "truncated": sample.truncated,
    }[only]


def render(group: Group, index: int, full: bool) -> str:
    """A sample as a block of lines: where it comes from, prompt, response, verdict."""
    prompt, sample = group.prompt, group.samples[index]
    right = sum(s.acc > 0.5 for s in group.samples)
    verdict = ("right" if sample.acc > 0.5 else "wrong") if has_verdict(sample) else "no verdict"
    predicted = f"'{visible(sample.prediction)}'" if sample.prediction else "nothing"
    logp = f"{sample.logprobs.mean():.3f}" if sample.length else "none"
    title = (
        f"group {group.order} | {prompt.data_source or 'no source'} | {prompt.uid} | "
        f"{right} of {len(group.samples)} right | sample {index + 1}"
    )
    facts = (
        f"score {sample.score:g} | acc {sample.acc:g} | status {sample.status} | {sample.length} tokens | "
        f"finish {sample.finish_reason} | mean log-prob {logp} | weights {sample.weight_version}"
    )
    return "\n".join(
        [
            "─" * WIDTH,
            visible(title),
            "── prompt",
            *_lines(prompt.text, full),
            "── response",
            *_lines(sample.text, full),
            f"── {verdict}: predicted {predicted}, answer '{visible(prompt.answer)}'",
            facts,
        ]
    )


def _lines(text: str, full: bool) -> list[str]:
    """Wrapped to the width, a long text without its middle."""
    lines = [
        part
        for line in visible(text).split("\n")
        for part in textwrap.wrap(line, WIDTH - 2, drop_whitespace=False, replace_whitespace=False) or [""]
    ]
    if not full and len(lines) > HEAD + TAIL + 1:
        lines = [*lines[:HEAD], f"... {len(lines) - HEAD - TAIL} lines, see --full ...", *lines[-TAIL:]]
    return ["  " + line for line in lines]


def visible(text: str) -> str:
    """Control characters a policy may emit, spelled out: they must not drive the reader's terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text.expandtabs(4))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet under "| head"
    sys.exit(main())
