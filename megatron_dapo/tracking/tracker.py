"""Where a run's numbers go: ``metrics.jsonl``, W&B, TensorBoard."""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_dapo.config import TrackingOptions
from megatron_dapo.files import replace_text
from megatron_dapo.types import InputError


def check_places(run_dir: str | Path, wandb_mode: str, tensorboard_dir: str | None) -> None:
    """Refuse, before a run has built anything, a tracker or a folder that it could not write to.

    Raises:
        InputError: a package is not installed, or a folder cannot be made or written.
    """
    asked = {"wandb": ("--wandb-mode " + wandb_mode, wandb_mode != "disabled"),
             "tensorboard": (f"--tensorboard-dir {tensorboard_dir}", tensorboard_dir is not None)}  # fmt: skip
    for package, (flag, wanted) in asked.items():
        if wanted and find_spec(package) is None:
            raise InputError(f"{flag}: {package} is not installed; pip install {package}, or leave the flag out")
    for flag, folder in (("--run-dir", run_dir), ("--tensorboard-dir", tensorboard_dir)):
        if folder is None:
            continue
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{flag} {folder}: {error.strerror}; name a folder that can be written") from None
        if not os.access(folder, os.W_OK):
            raise InputError(f"{flag} {folder}: it cannot be written to; name another folder")


class Tracker:
    """Writes every step's metrics: always to ``<run_dir>/metrics.jsonl``, if wanted to W&B and TensorBoard.

    With ``enabled`` False (all ranks but 0) every method does nothing. The W&B run id is the one that
    ``<run_dir>/wandb_id`` remembers, or new; so a resumed run goes on in its W&B run, drawn over
    its own axis ``rollout/step``. W&B takes nothing back: steps that are run again appear twice there.

    Raises:
        InputError: W&B is to be online and refuses (no API key, no such entity).
    """

    def __init__(
        self,
        run_dir: str | Path,
        options: TrackingOptions,
        *,
        enabled: bool,
        wandb_project: str | None = None,
        wandb_entity: str | None = None,
        wandb_name: str | None = None,
        tensorboard_dir: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.enabled = enabled
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / "metrics.jsonl"
        self._wandb_id: str | None = None
        self._wandb: Any = None
        self._tensorboard: Any = None
        self._tensorboard_dir = tensorboard_dir
        self._purge_step: int | None = None
        if not enabled:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if options.wandb_mode != "disabled":
            self._wandb = self._start_wandb(
                mode=options.wandb_mode,
                project=wandb_project or "megatron-dapo",
                entity=wandb_entity,
                name=wandb_name or self.run_dir.name,
                config=dict(config or {}),
            )

    def _start_wandb(self, **wanted: Any) -> Any:
        import wandb

        remembered = self.run_dir / "wandb_id"
        if self._wandb_id is None and remembered.is_file():
            self._wandb_id = remembered.read_text().strip()
        self._wandb_id = self._wandb_id or uuid.uuid4().hex[:8]
        online = wanted["mode"] == "online"
        try:
            run = wandb.init(
                **wanted,
                id=self._wandb_id,
                resume="allow" if online else None,
                dir=str(self.run_dir),
                settings=wandb.Settings(console="off", silent=not online),
            )
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            raise InputError(f"--wandb-mode {wanted['mode']}: {reason} Or use --wandb-mode offline") from error
        remembered.write_text(self._wandb_id + "\n")
        run.define_metric("rollout/step")
        run.define_metric("*", step_metric="rollout/step")
        return run

    def truncate_after(self, step: int) -> None:
        """Resume at ``step``: lines of later steps, to be run again, move to ``metrics.jsonl.bak-<n>``.

        So does a line that a killed run left half-written. A run that begins at 0 writes step 0 itself, so
        nothing older stays.
        """
        if not self.enabled:
            return
        self._purge_step = step + 1
        if not self.path.exists():
            return
        lines = self.path.read_text().splitlines(keepends=True)
        parts: dict[bool, list[str]] = {True: [], False: []}
        for line in lines:
            parts[step > 0 and line.endswith("\n") and json.loads(line)["step"] <= step].append(line)
        if not parts[False]:
            return
        number = 1 + sum(1 for _ in self.run_dir.glob("metrics.jsonl.bak-*"))
        (self.run_dir / f"metrics.jsonl.bak-{number}").write_text("".join(parts[False]))
        replace_text(self.path, "".join(parts[True]))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one JSON line ``{"step": ..., "time": <Unix seconds>, <name>: <number or null>, ...}``.

        ``step`` counts finished rollout steps; null stands for NaN and infinities, which JSON lacks. The line
        is on disk on return.
        """
        if not self.enabled:
            return
        finite = {name: float(v) if math.isfinite(v) else None for name, v in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self._wandb is not None:
            self._wandb.log({"rollout/step": step, **values})
        if self._tensorboard_dir:
            for name, value in values.items():
                self._writer().add_scalar(name, value, step)
            self._writer().flush()

    def _writer(self) -> Any:
        if self._tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(self._tensorboard_dir, purge_step=self._purge_step)
        return self._tensorboard

    def close(self) -> None:
        """Flush W&B and TensorBoard; more than once is fine."""
        if self._wandb is not None:
            self._wandb.finish()
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._wandb = self._tensorboard = None
