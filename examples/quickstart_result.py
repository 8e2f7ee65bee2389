"""Accuracy before and after a run, with standard errors, out of its metrics.jsonl: the last lines of the quick start."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Print the first and the last evaluation of a run."""
    rows = [json.loads(line) for line in (Path(sys.argv[1]) / "metrics.jsonl").read_text().splitlines()]
    name = next(key for row in rows for key in row if key.startswith("val-core/") and "/acc/mean@" in key)
    source = name.rsplit("/acc/", 1)[0]
    evaluations = [row for row in rows if name in row]
    for label, row in (("before", evaluations[0]), ("after", evaluations[-1])):
        accuracy, error, length = (
            row[f"{source}/{key}"] for key in (name[len(source) + 1 :], "acc/se", "response_length/mean")
        )
        print(
            f"{label:>6} DAPO: {accuracy:.3f} ± {error:.3f} of the held-out sums right, {length:.1f} tokens per response"
        )


if __name__ == "__main__":
    main()
