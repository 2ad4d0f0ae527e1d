"""Faults for tests to catch: functions of production code that go wrong, one at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import pytest


@dataclass(frozen=True)
class Fault:
    """A function of a class or module, and how it goes wrong."""

    owner: Any
    name: str
    wrong: Callable[..., Any]  # called with the right function, then its arguments
    during: tuple[Any, str] | None = None  # another function: it goes wrong only while that one runs

    def __post_init__(self) -> None:
        """Raise an AttributeError where a function was renamed, in the ordinary run too."""
        for owner, name in filter(None, ((self.owner, self.name), self.during)):
            getattr(owner, name)

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the function until the patch is undone."""
        if self.during is None:
            replace(patch, self.owner, self.name, self.wrong)
            return

        def run(outer: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            with pytest.MonkeyPatch.context() as inside:
                replace(inside, self.owner, self.name, self.wrong)
                return outer(*arguments, **options)

        replace(patch, *self.during, run)


def replace(patch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Let a function, method, class method or static method be called through `wrong`."""
    is_bound = isinstance(inspect.getattr_static(owner, name), (classmethod, staticmethod))
    right = getattr(owner, name)

    @wraps(right)
    def call(*arguments: Any, **options: Any) -> Any:
        return wrong(right, *arguments, **options)

    patch.setattr(owner, name, staticmethod(call) if is_bound else call)


def dropped(_right: Callable[..., Any], *_arguments: Any, **_options: Any) -> None:
    """Do nothing."""


def returns(value: Any) -> Callable[..., Any]:
    """Do nothing but return a value."""
    return lambda *_arguments, **_options: value


def with_attributes(**attributes: Any) -> Callable[..., Any]:
    """Run a method while its object has other values of some attributes."""

    def run(right: Callable[..., Any], self: Any, *arguments: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in attributes.items():
                patch.setattr(self, name, value)
            return right(self, *arguments, **options)

    return run
