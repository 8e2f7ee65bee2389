"""Functions by name: those that come with the package and the user's own, given as ``package.module:function``."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from megatron_dapo.types import InputError


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that looks most like ``name``; there is at least one known."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]


def import_function(flag: str, path: str) -> Any:
    """The function at ``package.module:function``.

    Raises:
        InputError: it cannot be imported, or is no function; the message begins with ``flag`` and says why.
    """
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a plug-in's import runs the user's code: anything may be raised
        why = " ".join(f"{type(error).__name__}: {error}".split())
        message = f"{flag} {path}: cannot import {module_name!r} ({why}); is it on PYTHONPATH?"
        raise InputError(message) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"{flag} {path}: {module_name!r} has no function {function_name!r}")
    return function


class Registry[T: Callable[..., Any]]:
    """Functions of one kind by the names that ``flag`` takes.

    Example::

        LOSSES = Registry[PolicyLoss]("--policy-loss", "loss")

        @LOSSES.register("reinforce")
        def reinforce(batch, options): ...

        LOSSES["reinforce"], LOSSES["my_package.losses:my_loss"]
    """

    def __init__(self, flag: str, kind: str, builtin: dict[str, str] | None = None) -> None:
        self.flag, self.kind = flag, kind
        self.known: dict[str, T] = {}
        self.builtin = builtin or {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make a function known as ``name``."""
        assert name and ":" not in name, f"names have no colon: {name!r}"

        def add(function: T) -> T:
            assert name not in self.known, f"{self.kind} {name!r} is registered twice"
            self.known[name] = function
            return function

        return add

    def __contains__(self, name: str) -> bool:
        return name in self.known or name in self.builtin

    def check(self, name: str) -> None:
        """Raises: ``InputError`` where ``name`` is neither a known name nor the form of an import path."""
        if ":" not in name and name not in self:
            names = sorted({*self.known, *self.builtin})
            raise InputError(
                f"{self.flag} {name}: no such {self.kind}; did you mean {nearest(name, names)!r}? "
                f"(known: {', '.join(names)}; your own: package.module:function)"
            )

    def __getitem__(self, name: str) -> T:
        """The function of that name, or imported.

        Raises:
            InputError: there is none; the message names the nearest, or says why the import failed.
        """
        self.check(name)
        if name in self.known:
            return self.known[name]
        found: T = import_function(self.flag, self.builtin.get(name, name))
        return found
