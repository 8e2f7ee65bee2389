"""The reference policy of the KL term: other weights for the same model, kept in host memory and put in place for a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ReferencePolicy:
    """Frozen weights of every chunk of this rank's model; ``read`` puts them there once."""

    def __init__(self, model: list[Any], read: Callable[[], None]) -> None:
        self.parameters = [p for chunk in model for p in chunk.parameters()]
        with torch.no_grad():
            policy = self._copies()
            read()
            self.weights = [copy.cpu() for copy in self._copies()]
            self._put(policy)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model is the reference policy; afterwards the policy again, to the bit."""
        policy = self._copies()
        self._put(self.weights)
        try:
            yield
        finally:
            self._put(policy)

    def _copies(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.parameters]

    def _put(self, values: list[torch.Tensor]) -> None:
        for p, value in zip(self.parameters, values, strict=True):
            p.data.copy_(value)
