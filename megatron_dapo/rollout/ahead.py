"""Generation beside training: a thread that collects the next steps while this one trains, and how far ahead it may be.

The rule that bounds staleness: the rollouts of step ``s`` may begin when the weights' version is at least ``s - lead``, so no
token of theirs is more than ``lead`` versions older than the weights it is trained on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Ahead[T]:
    """Calls ``collect(step)`` for the steps ``first`` .. ``last`` - 1 in a thread of its own, one after the other.

    ``snapshot`` is the state of the collector; its value before every step that is not yet trained is kept, so that a
    checkpoint holds the prompts of what was generated ahead and a resume draws them again.

    Example:
        ahead = Ahead(side.collect, side.state_dict, first=0, last=500, lead=1)
        ahead.publish(0)                  # the weights of version 0 are out: steps 0 and 1 may be generated
        rows, metrics = ahead.take(0)     # waits for step 0
    """

    def __init__(
        self, collect: Callable[[int], T], snapshot: Callable[[], dict[str, Any]], first: int, last: int, lead: int
    ) -> None:
        self.collect, self.snapshot, self.lead = collect, snapshot, lead
        self.version = -1
        self.finished: dict[int, T] = {}
        self.before: dict[int, dict[str, Any]] = {}
        self.error: BaseException | None = None
        self.busy = self.held = self.closing = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._work, args=(first, last), daemon=True)
        self.thread.start()

    def _work(self, first: int, last: int) -> None:
        try:
            for step in range(first, last):
                with self.changed:
                    self.changed.wait_for(lambda step=step: self._may_begin(step))  # type: ignore[misc]
                    if self.closing:
                        return
                    self.before[step] = self.snapshot()
                    self.busy = True
                rows = self.collect(step)
                with self.changed:
                    self.finished[step], self.busy = rows, False
                    self.changed.notify_all()
        except BaseException as raised:  # it belongs to whoever takes the step
            with self.changed:
                self.error, self.busy = raised, False
                self.changed.notify_all()

    def _may_begin(self, step: int) -> bool:
        return self.closing or (not self.held and self.version >= 0 and step <= self.version + self.lead)

    def publish(self, version: int) -> None:
        """The servers have weights ``version`` now."""
        with self.changed:
            self.version = version
            self.changed.notify_all()

    def take(self, step: int) -> T:
        """What was collected for ``step``; waits for it, and raises what its collection raised."""
        with self.changed:
            self.changed.wait_for(lambda: step in self.finished or self.error is not None)
            if step not in self.finished:
                assert self.error is not None
                raise self.error
            self.before = {later: state for later, state in self.before.items() if later > step}
            return self.finished.pop(step)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Inside, nothing is collected: the step under way is waited for and the next one waits."""
        with self.changed:
            self.held = True
            self.changed.wait_for(lambda: not self.busy)
        try:
            yield
        finally:
            with self.changed:
                self.held = False
                self.changed.notify_all()

    def state_dict(self, step: int) -> dict[str, Any]:
        """The collector's state before ``step``, the first that is not trained yet."""
        with self.changed:
            return self.before[step] if step in self.before else self.snapshot()

    def close(self) -> None:
        """Begin nothing more. A step under way is not waited for: its process is about to end."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
