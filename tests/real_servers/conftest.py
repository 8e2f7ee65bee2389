"""Two real SGLang servers for all tests that can share them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import save_served_model, served


@pytest.fixture(scope="session", autouse=True)
def sglang_is_there() -> None:
    """SGLang is installed by ``make test``; another environment may lack it."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: make test installs it", allow_module_level=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, sglang_is_there: None) -> Path:
    """An untied model with bias on query, key and value and grouped key-value heads."""
    folder = tmp_path_factory.mktemp("served") / "hf"
    save_served_model(folder)
    return folder


@pytest.fixture(scope="session")
def servers(checkpoint: Path) -> Iterator[list[str]]:
    """URLs of two servers of ``checkpoint``; tests leave them up."""
    with served(checkpoint.parent / "serve", checkpoint, 2) as urls:
        yield urls
