"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Seconds by part of a step. Parts are flat: one at a time, the same one as often as wanted.

    Example::

        with clock("gen"):
            ...
        clock.lap()  # {"timing_s/gen": 41.2, "timing_s/other": 0.3, "timing_s/step": 41.5}
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._parts: dict[str, float] = {}
        self._running: str | None = None
        self._started: float | None = None

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count what happens inside to ``part``."""
        assert self._running is None, f"clock({part!r}) inside clock({self._running!r}): parts do not nest"
        before = self._now()
        # The first step begins with its first part, so that building the model is not in it.
        self._started = before if self._started is None else self._started
        self._running = part
        try:
            yield
        finally:
            self._running = None
            self._parts[part] = self._parts.get(part, 0.0) + self._now() - before

    def lap(self) -> dict[str, float]:
        """``timing_s/<part>`` since the last lap, ``/step`` (wall time) and ``/other`` (in no part)."""
        now = self._now()
        step = now - (now if self._started is None else self._started)
        parts, self._parts, self._started = self._parts, {}, now
        rest = max(0.0, step - sum(parts.values()))
        seconds = {f"timing_s/{part}": value for part, value in parts.items()}
        return seconds | {"timing_s/other": rest, "timing_s/step": step}
