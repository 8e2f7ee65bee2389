"""Atomic writes: whoever reads a file sees the old content or the new, never half of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft beside ``path`` to write into; it takes that place when the block ends without an error.

    Example::

        with replacing(folder / "state.pt") as draft:
            torch.save(state, draft)
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    yield draft
    os.replace(draft, path)


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, atomically."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
