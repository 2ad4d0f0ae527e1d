"""Which adapters an engine knows, and which of them have a slot of the model: host bookkeeping, between steps."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from graphdecode.engine.request import RequestError
from graphdecode.errors import ArgumentError
from graphdecode.models.adapters import Adapter, AdapterSlots, HoldingWeights


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter that requests can name; whoever runs with it keeps it, also when the name is gone or another's."""

    name: str
    folder: str  # that it was read from
    number: int  # never given twice: what is cached with one adapter is not another's
    weights: Adapter


@dataclass
class AdapterStats:
    """Counts since the engine was made."""

    slots: int = 0
    writes: int = 0  # of an adapter into a slot
    evictions: int = 0  # of an adapter from a slot, for another one
    requests: Counter[str] = field(default_factory=Counter)  # by adapter's name


class EngineAdapters:
    """The adapters of an engine: any number by name in host memory, some in the slots of the model.

    `load`, `unload` and `named` may be called from any thread, the others by whoever steps the engine.

    Args:
        slots: of the model; None: it has no room for adapters.
        write: puts an adapter into a slot, on all ranks; None: none is ever needed.
        holding_weights: see `AdapterSlots.read`.
    """

    def __init__(
        self,
        slots: AdapterSlots | None,
        write: Callable[[int, Adapter], None] | None = None,
        holding_weights: HoldingWeights = nullcontext,
    ) -> None:
        self._slots, self._write, self._holding_weights = slots, write, holding_weights
        self._by_name: dict[str, LoadedAdapter] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._holders: dict[int, LoadedAdapter] = {}  # by slot, the least recently used first
        self._pins: Counter[int] = Counter()  # rows that use a slot
        self.stats = AdapterStats(0 if slots is None else slots.count)

    @property
    def names(self) -> list[str]:
        """The names that requests can give, in the order in which they came."""
        return list(self._by_name)

    def load(self, name: str, folder: str | Path) -> None:
        """Read an adapter; see `AdapterSlots.read`. No captured graph changes.

        Raises:
            AdapterError: it cannot be used.
            ArgumentError: the name is taken or empty, or there is no room for adapters.
            EngineStateError: it has a copy of weights that sleep now, or are dropped.
        """
        if self._slots is None:
            raise ArgumentError(f"adapter {name!r}: there is no room for adapters; LLM(..., max_adapters=N) makes some")
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"an adapter's name must be a text that is not empty, got {name!r}")
        with self._lock:
            if name in self._by_name:
                raise ArgumentError(f"there is an adapter {name!r} already; unload it first")
            weights = self._slots.read(folder, self._holding_weights)
            self._by_name[name] = LoadedAdapter(name, str(folder), next(self._numbers), weights)

    def load_once(self, name: str, folder: str | Path) -> None:
        """Load an adapter unless it is there; see `load`. An ArgumentError says that it came from another folder."""
        with self._lock:
            loaded = self._by_name.get(name)
            if loaded is None:
                self.load(name, folder)
            elif loaded.folder != str(folder):
                raise ArgumentError(f"the adapter {name!r} was loaded from {loaded.folder}, not from {folder}")

    def unload(self, name: str) -> None:
        """Forget an adapter's name; requests that have it go on."""
        with self._lock:
            if self._by_name.pop(name, None) is None:
                raise ArgumentError(self._missing(name))

    def named(self, name: str | None) -> LoadedAdapter | None:
        """Return what a request asks for.

        Raises:
            RequestError: there is no adapter of that name.
        """
        if name is None:
            return None
        adapter = self._by_name.get(name)
        if adapter is None:
            raise RequestError(self._missing(name))
        return adapter

    def _missing(self, name: str) -> str:
        return f"there is no adapter {name!r}; there are {', '.join(self._by_name) or 'none'}"

    def acquire(self, adapter: LoadedAdapter) -> int | None:
        """Return the slot of an adapter, which stays its own until it is released; None where all are in use."""
        assert self._write is not None
        slot = next((slot for slot, holder in self._holders.items() if holder is adapter), None)
        if slot is None:
            slot = self._free_slot()
            if slot is None:
                return None
            self._holders.pop(slot, None)  # before its contents change
            self._write(slot, adapter.weights)
            self.stats.writes += 1
        self._holders.pop(slot, None)
        self._holders[slot] = adapter  # the most recently used
        self._pins[slot] += 1
        return slot

    def has_slot(self, adapter: LoadedAdapter) -> bool:
        """Whether an adapter has a slot, or could take one."""
        may_take = adapter in self._holders.values() or len(self._holders) < self.stats.slots
        return may_take or not all(self._pins[slot] for slot in self._holders)

    def _free_slot(self) -> int | None:
        unused = next((slot for slot in range(self.stats.slots) if slot not in self._holders), None)
        if unused is not None:
            return unused
        evicted = next((slot for slot in self._holders if not self._pins[slot]), None)
        self.stats.evictions += evicted is not None
        return evicted

    def release(self, slot: int) -> None:
        """Let a row's slot be another's."""
        self._pins[slot] -= 1

    def forget_slots(self) -> None:
        """Take all slots for empty: the next request of each adapter writes it again."""
        self._holders.clear()

    def reset(self) -> None:
        """Forget which rows use slots: there are none any more."""
        self._pins.clear()
