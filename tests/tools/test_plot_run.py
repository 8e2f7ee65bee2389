"""The picture of runs, as a user draws it."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TOOL = Path(__file__).parents[2] / "tools/plot_run.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("plot_run", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["plot_run"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def write_run(
    folder: Path, steps: int, sources: tuple[str, ...] = ("aime",), tail: str = "", shift: float = 0.0
) -> Path:
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            x = step / steps
            row = {
                "step": step,
                "time": 1.8e9,
                "sampling/acc": 0.1 + 0.6 * x + shift,
                "critic/score/mean": -0.8 + 1.2 * x + shift,
                "response_length/mean": 700 + 4000 * x,
                "actor/entropy": 0.7 - 0.3 * math.sin(3 * x) + shift,
                "sampling/keep_rate": None if step == 2 else 0.3 + 0.4 * x,
            }
            for source in sources if step % 5 == 0 else ():
                row |= {
                    f"val-core/{source}/acc/mean@32": 0.1 + 0.4 * x + shift,
                    f"val-core/{source}/acc/se": 0.03,
                }
            file.write(json.dumps(row) + "\n")
        file.write(tail)
    return folder


def colour_share(path: Path, colour: str) -> float:
    """Share of pixels within a whisker of ``colour``."""
    import matplotlib.image
    from matplotlib.colors import to_rgb

    pixels = matplotlib.image.imread(path)[..., :3]
    return float((np.abs(pixels - np.array(to_rgb(colour))).max(-1) < 0.02).mean())


def test_one_run_from_the_command_line(tmp_path):
    run, out = write_run(tmp_path / "first", 60), tmp_path / "new/plot.png"
    done = subprocess.run(
        [sys.executable, str(TOOL), str(run), "--out", str(out)], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(out), "")
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert colour_share(out, "#0072B2") > 0.002  # curves in the first colour
    assert colour_share(out, "#D55E00") == 0.0  # and none in the second
    assert 0.5 < colour_share(out, "white") < 0.99


def test_several_runs_in_their_colours(tool, tmp_path):
    runs = [write_run(tmp_path / f"run{i}", steps, shift=0.1 * i) for i, steps in enumerate((60, 30, 8))]
    out = tmp_path / "plot.png"
    assert tool.main([*map(str, runs), "--out", str(out)]) == 0
    assert all(colour_share(out, colour) > 0.001 for colour in tool.COLORS[:3])
    assert colour_share(out, tool.COLORS[3]) == 0.0


def texts(svg: Path) -> list[str]:
    """What is written in the picture: matplotlib leaves every text as a comment beside its glyphs."""
    return [line.strip()[5:-4] for line in svg.read_text().splitlines() if line.strip().startswith("<!-- ")]


def test_lines_are_labelled_directly(tool, tmp_path):
    one, two = (
        write_run(tmp_path / "a/same", 12, ("aime", "gsm8k", "all")),
        write_run(tmp_path / "b/same", 12),
    )
    out = tmp_path / "plot.svg"
    tool.main([str(one), "--out", str(out)])
    written = texts(out)
    assert {"same", "aime  43.3%", "gsm8k  43.3%", "70%", "4,700", "Response length"} <= set(written)
    assert not any(text.startswith("all") for text in written)  # one run: its sources, not their mean
    tool.main([str(one), str(two), "--out", str(out)])
    for folder in ("a/same", "b/same"):  # same names: told apart by folder, its end in what room there is
        written = [text for text in texts(out) if folder in text and "·" not in text]
        assert len(written) == 6 and all(len(text) <= len("…23 characters of a path  43.3%") for text in written)
    assert sum(text.endswith("a/same  43.3%") for text in texts(out)) == 1


def test_panels_of_what_was_not_logged_say_so(tool, tmp_path):
    run = tmp_path / "sparse"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "sampling/acc": 0.5}\n')
    out = tmp_path / "plot.svg"
    assert tool.main([str(run), "--out", str(out)]) == 0
    assert texts(out).count("not logged") == 5


def test_a_line_being_written_is_left_alone_and_the_last_of_a_step_counts(tool, tmp_path):
    again = '{"step": 3, "sampling/acc": 0.99}\n'
    run = tool.read_run(write_run(tmp_path / "live", 3, tail=again + '{"step": 4, "sampl'))
    assert list(run.rows) == [1, 2, 3] and run.column("sampling/acc")[1][-1] == 0.99
    assert list(run.column("sampling/keep_rate")[0]) == [1.0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        ("", "no step in it yet"),
        ('{"step": 1', "no step in it yet"),
        ('{"step": 1}\nnot json\n', "line 2: not a line of metrics"),
        ("[1]\n", "line 1: not a line of metrics"),
    ],
)
def test_a_run_without_metrics_is_one_line_and_exit_2(tool, tmp_path, capsys, content, words):
    good, bad = write_run(tmp_path / "good", 3), tmp_path / "bad"
    if content is not None:
        bad.mkdir()
        (bad / "metrics.jsonl").write_text(content)
    assert tool.main([str(good), str(bad), "--out", str(tmp_path / "plot.png")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("plot_run: error: ") and str(bad) in line and words in line
    assert not (tmp_path / "plot.png").exists()


def test_an_unknown_kind_of_picture_is_refused(tool, tmp_path, capsys):
    assert tool.main([str(write_run(tmp_path / "run", 3)), "--out", "plot.jpq"]) == 2
    assert "--out plot.jpq" in capsys.readouterr().err


def test_help(tool, capsys):
    with pytest.raises(SystemExit) as stopped:
        tool.main(["--help"])
    assert stopped.value.code == 0 and "RUN_DIR" in capsys.readouterr().out


def test_smoothing_keeps_lines_and_averages_noise(tool):
    line = np.arange(50.0)
    np.testing.assert_allclose(tool.smooth(line, 5)[2:-2], line[2:-2])
    np.testing.assert_allclose(tool.smooth(np.array([0.0, 3.0, 6.0, 0.0]), 3), [1.5, 3.0, 3.0, 3.0])
    np.testing.assert_allclose(tool.smooth(line, 1), line)
    assert [tool.smoothing_window(n) for n in (40, 41, 330)] == [1, 5, 17]


def test_labels_move_apart_and_no_further(tool):
    assert tool.spread([0.1, 0.5, 0.9], 0.1) == [0.1, 0.5, 0.9]
    moved = tool.spread([0.5, 0.5, 0.5, 0.9], 0.1)
    assert np.diff(moved).min() >= 0.1 - 1e-6 and moved[3] == 0.9 and moved[1] == pytest.approx(0.5, abs=0.01)
