"""How good the policy is: avg@k with its standard error, pass@k, maj@k, by data source; the report's files.

A sample without a verdict (the verifier died, the response was lost) is not a wrong answer: it leaves every
accuracy, and its share is reported beside them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import comb, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.algorithm.filtering import ACC_TOLERANCE, has_verdict
from megatron_dapo.config import Options
from megatron_dapo.eval_record import markdown, own_folder
from megatron_dapo.files import replace_text
from megatron_dapo.rollout.engine import Engine, request_seed
from megatron_dapo.types import Group, Prompt, Request, SamplingParams, Sums

OVERALL = "all"
"""Stands for the source where several sources are taken together."""


@dataclass(frozen=True)
class ProblemResult:
    """All samples of one problem; ``acc`` and ``predictions`` are of those with a verdict, in order."""

    uid: str
    data_source: str
    acc: tuple[float, ...]
    predictions: tuple[str, ...]
    lengths: tuple[int, ...]
    truncated: int
    unscored: int

    @classmethod
    def of(cls, group: Group) -> ProblemResult:
        """The result of a scored group."""
        judged = [s for s in group.samples if has_verdict(s)]
        return cls(
            uid=group.prompt.uid,
            data_source=group.prompt.data_source,
            acc=tuple(float(s.acc) for s in judged),
            predictions=tuple(s.prediction for s in judged),
            lengths=tuple(s.length for s in group.samples),
            truncated=sum(s.truncated for s in group.samples),
            unscored=len(group.samples) - len(judged),
        )

    @property
    def right(self) -> int:
        """Samples that are right; partial credit is not."""
        return sum(a >= 1.0 - ACC_TOLERANCE for a in self.acc)


@dataclass(frozen=True)
class Scores:
    """A set of problems summed up. Shares in [0, 1], lengths in tokens.

    ``problems`` counts those with a verdict; ``mean`` is avg@k, ``se`` its standard error over problems (None
    with one problem), ``pass_at`` k -> pass@k, ``maj`` maj@k; None or empty where no problem has a verdict.
    """

    problems: int
    mean: float | None
    se: float | None
    pass_at: dict[int, float]
    maj: float | None
    truncated: float
    mean_length: float
    unscored: float


@dataclass(frozen=True)
class EvalReport:
    """An evaluation with ``k`` samples per problem: ``overall``, each source by itself, and every problem."""

    k: int
    overall: Scores
    by_source: dict[str, Scores]
    results: list[ProblemResult]

    @property
    def rows(self) -> dict[str, Scores]:
        """The sources, and behind them ``all`` where there are several."""
        return self.by_source | ({OVERALL: self.overall} if len(self.by_source) > 1 else {})

    def headline(self) -> str:
        """One line for the console.

        Example: ``math_dapo acc 41.2% ± 3.0 (mean@32, 30 problems), pass@32 70.0%, maj@32 50.0%, len 5312
        (clip 3.1%)``
        """
        return " | ".join(self._describe(source, scores) for source, scores in self.rows.items())

    def _describe(self, source: str, scores: Scores) -> str:
        if scores.mean is None:
            return f"{source} without a verdict on any of its samples"
        se = "" if scores.se is None else f" ± {100 * scores.se:.1f}"
        parts = [f"{source} acc {scores.mean:.1%}{se} (mean@{self.k}, {scores.problems} problems)"]
        if self.k > 1:
            widest = max(scores.pass_at)
            parts += [f"pass@{widest} {scores.pass_at[widest]:.1%}", f"maj@{self.k} {scores.maj:.1%}"]
        parts.append(f"len {scores.mean_length:.0f} (clip {scores.truncated:.1%})")
        if scores.unscored:
            parts.append(f"unscored {scores.unscored:.1%}")
        return ", ".join(parts)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, c of them right, drawn without replacement, hold a right one.

    ``1 - C(n-c, k) / C(n, k)`` (Chen et al., arXiv 2107.03374, eq. 1), in integers until the one division, so
    exact to the last bit. 0 <= c <= n, 1 <= k <= n.
    """
    assert 0 <= c <= n and 1 <= k <= n, f"pass@{k} of {c} right among {n}"
    return (comb(n, k) - comb(n - c, k)) / comb(n, k)


def majority_acc(acc: Sequence[float], predictions: Sequence[str]) -> float:
    """Accuracy of the prediction given most often; of several, of the one given first.

    Samples without an answer (empty prediction) vote only where no sample has one.
    """
    votes = Counter(p for p in predictions if p) or Counter(predictions)
    winner = max(votes, key=lambda p: votes[p])  # of equals the first: Counter keeps the order of appearance
    return acc[predictions.index(winner)]


def mean_and_se(means: Sequence[float]) -> tuple[float, float | None]:
    """Mean over problems, and its standard error: std (ddof 1) / sqrt(problems), None for one problem."""
    values = np.asarray(means, dtype=np.float64)
    se = float(values.std(ddof=1)) / sqrt(len(values)) if len(values) > 1 else None
    return float(values.mean()), se


def _scores(results: Sequence[ProblemResult], k: int) -> Scores:
    judged = [r for r in results if r.acc]
    samples = sum(len(r.lengths) for r in results)
    mean, se = mean_and_se([sum(r.acc) / len(r.acc) for r in judged]) if judged else (None, None)
    pass_at = {}
    for size in _powers_of_two(k):
        # A problem that lost samples to the verifier can only speak for the k it still has.
        enough = [pass_at_k(len(r.acc), r.right, size) for r in judged if len(r.acc) >= size]
        if enough:
            pass_at[size] = sum(enough) / len(enough)
    votes = [majority_acc(r.acc, r.predictions) for r in judged]
    return Scores(
        problems=len(judged),
        mean=mean,
        se=se,
        pass_at=pass_at,
        maj=sum(votes) / len(votes) if votes else None,
        truncated=sum(r.truncated for r in results) / samples,
        mean_length=sum(sum(r.lengths) for r in results) / samples,
        unscored=sum(r.unscored for r in results) / samples,
    )


def _powers_of_two(k: int) -> list[int]:
    return [2**i for i in range(k.bit_length())]


def summarise(results: Sequence[ProblemResult], k: int) -> EvalReport:
    """Sum up problems that were sampled ``k`` times each: overall, and by source in order of appearance."""
    assert results, "an evaluation without problems"
    sources = dict.fromkeys(r.data_source for r in results)
    by_source = {s: _scores([r for r in results if r.data_source == s], k) for s in sources}
    return EvalReport(k, _scores(results, k), by_source, list(results))


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    options: Options,
    params: SamplingParams,
    score: Callable[[list[Group]], Sums],
    seed: int,
) -> EvalReport:
    """Sample every prompt ``n_samples_per_eval_prompt`` times, score (``RewardPool.score``), sum up.

    Seeds depend on the problem's place and the sample's alone: two evaluations of the same weights are the
    same, and those of two policies are paired.
    """
    k = options.eval.n_samples_per_eval_prompt
    requests = [Request(p, request_seed(seed, order, i)) for order, p in enumerate(prompts) for i in range(k)]
    samples = engine.generate(requests, params)
    assert len(samples) == len(requests), f"{len(samples)} samples for {len(requests)} requests"
    groups = [Group(p, samples[i * k : (i + 1) * k], i) for i, p in enumerate(prompts)]
    score(groups)
    return summarise([ProblemResult.of(g) for g in groups], k)


def metrics(report: EvalReport) -> dict[str, float]:
    """``val-core/<source>/...`` by source, ``all`` where there are several; the undefined is left out."""
    values: dict[str, float | None] = {}
    for source, s in report.rows.items():
        name = f"val-core/{source}"
        values[f"{name}/acc/mean@{report.k}"] = s.mean
        values[f"{name}/acc/se"] = s.se
        values |= {f"{name}/acc/pass@{k}": p for k, p in s.pass_at.items()}
        values[f"{name}/acc/maj@{report.k}"] = s.maj
        values[f"{name}/response_length/mean"] = s.mean_length
        values[f"{name}/response_length/clip_ratio"] = s.truncated
        values[f"{name}/unscored"] = s.unscored
    return {name: value for name, value in values.items() if value is not None}


def write_report(
    report: EvalReport, folder: str | Path, step: int, setup: dict[str, Any] | None = None, name: str | None = None
) -> Path:
    """Write ``report.json`` (every problem, and the ``setup`` that repeats it) and ``report.md`` (tables) to
    ``<folder>/eval/<name>``; training's own evaluations are named ``step_<step>``.

    Returns: that folder; with a number behind its name where another evaluation lies there.
    """
    content: dict[str, Any] = {"step": step, "setup": setup or {}, **asdict(report)}
    target = own_folder(Path(folder), name or f"step_{step:06d}", content)
    target.mkdir(parents=True, exist_ok=True)
    tables = _markdown(report, step) + ("\n" + markdown(setup) if setup else "")
    replace_text(target / "report.md", tables.encode("utf-8", "backslashreplace").decode())
    replace_text(target / "report.json", json.dumps(content, indent=1) + "\n")
    return target


def _markdown(report: EvalReport, step: int) -> str:
    k = report.k
    sizes = sorted(report.overall.pass_at)
    header = ["source", "problems", f"avg@{k}", "± SE", *[f"pass@{size}" for size in sizes], f"maj@{k}"]
    header += ["truncated", "mean length", "unscored"]

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f}"

    table = [header, ["---", *["---:"] * (len(header) - 1)]]
    for source, s in report.rows.items():
        passes = [percent(s.pass_at.get(size)) for size in sizes]
        row = [source, str(s.problems), percent(s.mean), percent(s.se), *passes, percent(s.maj)]
        table.append([*row, percent(s.truncated), f"{s.mean_length:.0f}", percent(s.unscored)])
    lines = ["| " + " | ".join(row) + " |" for row in table]
    notes = (
        f"Shares in percent, lengths in tokens, {k} samples per problem. SE: standard error of avg@{k} over "
        "problems. pass@k: unbiased. Unscored samples (no verdict, or lost) are left out of the accuracies."
    )
    return f"# Evaluation after {step} rollout steps\n\n" + "\n".join(lines) + f"\n\n{notes}\n"
