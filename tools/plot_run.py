"""Draw runs: accuracy, evaluation, score, response length, entropy, keep rate, from their ``metrics.jsonl``.

Example: ``python tools/plot_run.py runs/dapo runs/grpo --out plot.png``. Needs matplotlib, nothing
of this package.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

Array = npt.NDArray[np.float64]

VAL_CORE = "val-core/<source>/acc/mean@k"
PANELS = [
    ("Accuracy while sampling", "sampling/acc", "share"),
    ("Evaluation, avg@k ± SE", VAL_CORE, "share"),
    ("Score", "critic/score/mean", "reward"),
    ("Response length", "response_length/mean", "tokens"),
    ("Entropy", "actor/entropy", "nats"),
    ("Groups with a signal", "sampling/keep_rate", "share"),
]
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B8860B", "#6A3D9A", "#444444"]
"""Told apart by colour-blind readers too (after Okabe and Ito)."""
LINES = ["-", "--", ":", "-."]
INK, FAINT = "#222222", "#8a8a8a"
SMOOTH_FROM = 40
"""Runs of more steps are drawn as a moving average over faint points."""
LONGEST_NAME = 24
EVAL_NAME = re.compile(r"val-core/(?P<source>.+)/acc/mean@\d+")


class UnreadableRun(ValueError):
    """A folder that cannot be drawn; one line that says why."""


@dataclass
class Run:
    """The metrics of a run, a row per step."""

    name: str
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)

    def column(self, metric: str) -> tuple[Array, Array]:
        """Steps and values, both [S], where ``metric`` was logged as a finite number."""
        points = [(step, row[metric]) for step, row in sorted(self.rows.items()) if row.get(metric) is not None]
        table = np.array(points, dtype=np.float64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def evaluations(self, overall: bool) -> dict[str, str]:
        """Source -> name of its avg@k; with ``overall`` only that of all sources together, if any."""
        names = sorted({name for row in self.rows.values() for name in row})
        found = {match["source"]: name for name in names if (match := EVAL_NAME.fullmatch(name))}
        if overall and "all" in found:
            return {"all": found["all"]}
        return {source: name for source, name in found.items() if source != "all"}


def read_run(folder: Path) -> Run:
    """Read ``folder``/metrics.jsonl. Of a step the last line counts; one still being written is left alone.

    Raises:
        UnreadableRun: no such file, nothing in it, or a line that is not one of ours.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UnreadableRun(f"{path}: no such file; give the folder of a run that has finished a step")
    run = Run(folder.resolve().name)
    lines = path.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            run.rows[row["step"]] = row
        except (ValueError, KeyError, TypeError):
            raise UnreadableRun(f"{path}, line {number}: not a line of metrics; repair or remove it") from None
    if not run.rows:
        raise UnreadableRun(f"{path}: no step in it yet; wait until the run has finished one")
    return run


def smooth(values: Array, window: int) -> Array:
    """Centred moving average [S] over ``window`` (odd) values, over fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    place, half = np.arange(len(values)), window // 2
    low, high = np.maximum(place - half, 0), np.minimum(place + half + 1, len(values))
    averaged: Array = (sums[high] - sums[low]) / (high - low)
    return averaged


def smoothing_window(steps: int) -> int:
    """Values that are averaged in a curve of ``steps``: 1 up to 40, then about a twentieth; odd."""
    return 1 if steps <= SMOOTH_FROM else max(5, steps // 20) | 1


def shorten(name: str) -> str:
    """The end of a long name: the panels must keep their room."""
    return name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]


@dataclass
class Label:
    """A text beside the right end of a line."""

    text: str
    color: str
    y: float


def draw_curve(ax: Any, run: Run, metric: str, color: str) -> Label | None:
    """One run's line; None where it did not log the metric."""
    steps, values = run.column(metric)
    if not len(steps):
        return None
    window = smoothing_window(len(steps))
    if window > 1:
        ax.scatter(steps, values, s=5, color=color, alpha=0.22, linewidths=0)
    line = smooth(values, window)
    ax.plot(steps, line, color=color, lw=1.9, marker="o" if len(steps) < 12 else None, ms=3.5)
    return Label(shorten(run.name), color, line[-1])


def draw_curves(ax: Any, runs: Sequence[Run], metric: str, unit: str) -> list[Label]:
    """Every run's line, labelled with its name, or with its last value where there is one run."""
    curves = [draw_curve(ax, run, metric, COLORS[i % len(COLORS)]) for i, run in enumerate(runs)]
    labels = [label for label in curves if label]
    if len(runs) == 1:
        for label in labels:
            shares = unit == "share"
            label.text = _percent(label.y, 3) if shares else f"{label.y:,.{0 if label.y >= 100 else 3}f}"
    return labels


def draw_evaluation(ax: Any, run: Run, metric: str, color: str, line: str) -> Label:
    """Evaluation points with their standard errors."""
    steps, values = run.column(metric)
    error_at = dict(zip(*run.column(metric.rpartition("/")[0] + "/se"), strict=True))
    errors = [error_at.get(step, 0.0) for step in steps]
    ax.errorbar(
        steps,
        values,
        yerr=errors,
        color=color,
        lw=1.2,
        ls=line,
        marker="o",
        ms=4,
        elinewidth=1.1,
        capsize=2,
        capthick=1.1,
    )
    return Label(shorten(run.name), color, values[-1])


def draw_evaluations(ax: Any, runs: Sequence[Run]) -> list[Label]:
    """Runs by colour and their sources by line where there are several runs, else sources by colour."""
    several, labels = len(runs) > 1, []
    for i, run in enumerate(runs):
        sources = run.evaluations(overall=several)
        for j, (source, metric) in enumerate(sources.items()):
            color, line = (i, j) if several else (j, 0)
            label = draw_evaluation(ax, run, metric, COLORS[color % len(COLORS)], LINES[line % len(LINES)])
            name = source if not several else label.text if len(sources) == 1 else f"{label.text} {source}"
            label.text = f"{name}  {_percent(label.y, digits=3)}"
            labels.append(label)
    return labels


def style(ax: Any, title: str, metric: str, unit: str) -> None:
    """Title on the left, light grid, no box; shares in percent."""
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=16)
    ax.text(0, 1.025, f"{metric}, {unit}", transform=ax.transAxes, fontsize=7.5, color=FAINT, va="bottom")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color("#bbbbbb")
    ax.grid(axis="y", color="#e6e6e6", lw=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(length=0, labelsize=8, colors="#555555")
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    if unit == "share":
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _percent(y)))
    elif unit == "tokens":
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.6g}"))


def _percent(value: float, digits: int = 4) -> str:
    return f"{100 * value:.{digits}g}%"


def write_labels(ax: Any, labels: Sequence[Label], gap: float = 0.075) -> None:
    """Put the texts right of their lines' ends, moved apart to at least ``gap`` of the panel's height."""
    low, high = ax.get_ylim()
    ordered = sorted(labels, key=lambda label: label.y)
    places = spread([(label.y - low) / (high - low) for label in ordered], gap)
    for label, place in zip(ordered, places, strict=True):
        ax.text(
            1.015,
            place,
            label.text,
            transform=ax.transAxes,
            color=label.color,
            fontsize=8,
            va="center",
            ha="left",
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Ascending ``places`` moved apart to at least ``gap``; a cluster stays about where its middle was."""
    moved = list(places)
    for _ in range(100):
        crowded = False
        for i in range(len(moved) - 1):
            missing = gap - (moved[i + 1] - moved[i])
            if missing > 1e-9:
                moved[i], moved[i + 1], crowded = moved[i] - missing / 2, moved[i + 1] + missing / 2, True
        if not crowded:
            break
    return moved


def draw(runs: Sequence[Run], out: Path) -> None:
    """Write the picture of all panels to ``out``; the suffix names the format."""
    fig, axes = plt.subplots(2, 3, figsize=(13, 7), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    first, last = min(min(run.rows) for run in runs), max(max(run.rows) for run in runs)
    margin = 0.03 * max(1, last - first)
    for ax, (title, metric, unit) in zip(axes.flat, PANELS, strict=True):
        style(ax, title, metric, unit)
        labels = draw_evaluations(ax, runs) if metric == VAL_CORE else draw_curves(ax, runs, metric, unit)
        ax.set_xlim(first - margin, last + margin)
        if unit == "share":
            low, high = ax.get_ylim()
            ax.set_ylim(max(low, -0.01), min(high, 1.01))
        if labels:
            write_labels(ax, labels)
        else:
            ax.text(0.5, 0.5, "not logged", transform=ax.transAxes, color=FAINT, ha="center", va="center")
            ax.set_yticks([])
    for ax in axes[1]:
        ax.set_xlabel("rollout step", fontsize=8.5, color="#555555")
    names = "  ·  ".join(run.name for run in runs)
    title = names if len(names) < 90 else f"{len(runs)} runs"
    fig.suptitle(title, x=0.012, ha="left", fontsize=13, color=INK)
    window = max(smoothing_window(len(run.rows)) for run in runs)
    if window > 1:
        note = f"points: single steps; lines: their moving average over {window}"
        fig.text(0.988, 0.975, note, fontsize=8, color=FAINT, ha="right", va="center")
    fig.savefig(out)
    plt.close(fig)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw and name the picture; 2 where a run cannot be read, after one line that says why."""
    parser = argparse.ArgumentParser(prog="plot_run.py", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", nargs="+", type=Path, metavar="RUN_DIR", help="folder with a metrics.jsonl")
    parser.add_argument("--out", type=Path, default=Path("plot.png"), help="picture to write (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        runs = [read_run(folder) for folder in args.run_dir]
        if len({run.name for run in runs}) < len(runs):
            for run, folder in zip(runs, args.run_dir, strict=True):
                run.name = str(folder)
        if args.out.suffix[1:] not in FigureCanvasAgg.get_supported_filetypes():
            raise UnreadableRun(f"--out {args.out}: unknown kind of picture; end it in .png, .svg or .pdf")
    except UnreadableRun as error:
        print(f"plot_run: error: {error}", file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, args.out)
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
