"""The correction memory: counts, bound, and a file that decides alike."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.rules.memory import OnlineCorrectionMemory

pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=80)


@given(pairs)
def test_unbounded_memory_is_a_counter(seen: list[tuple[int, int]]) -> None:
    memory = OnlineCorrectionMemory().calibrate(seen)
    counts = Counter(seen)
    assert dict(memory.items()) == counts
    assert len(memory) == len(counts)
    assert all(memory.count(*pair) == n for pair, n in counts.items())
    assert memory.count(99, 99) == 0


def evicting(seen: list[tuple[int, int]], capacity: int) -> list[tuple[tuple[int, int], int]]:
    """The bounded memory, by searching all pairs for the one to drop."""
    held: dict[tuple[int, int], int] = {}
    for pair in seen:
        if pair not in held and len(held) == capacity:
            # min() keeps the first of equals, and a dict iterates in order of entry.
            del held[min(held, key=lambda p: held[p])]
        held[pair] = held.get(pair, 0) + 1
    return list(held.items())


@given(pairs, st.integers(1, 6))
@settings(max_examples=200)
def test_bounded_memory_drops_the_least_frequent_then_the_oldest(
    seen: list[tuple[int, int]], capacity: int
) -> None:
    memory = OnlineCorrectionMemory(capacity).calibrate(seen)
    assert memory.items() == evicting(seen, capacity)
    assert len(memory) <= capacity


def test_bounded_memory_over_many_additions_stays_right() -> None:
    rng = np.random.default_rng(0)
    seen = [(int(a), int(b)) for a, b in rng.zipf(1.5, (3000, 2)) % 30]
    memory = OnlineCorrectionMemory(5).calibrate(seen)
    assert memory.items() == evicting(seen, 5)
    assert memory.evictions > 0


@given(seen=pairs, later=pairs, capacity=st.one_of(st.none(), st.integers(1, 6)))
@settings(max_examples=60, deadline=None)
def test_a_saved_memory_decides_alike_ever_after(
    tmp_path_factory: pytest.TempPathFactory,
    seen: list[tuple[int, int]],
    later: list[tuple[int, int]],
    capacity: int | None,
) -> None:
    path = tmp_path_factory.mktemp("memory") / "ocm.npz"
    memory = OnlineCorrectionMemory(capacity).calibrate(seen)
    path.write_bytes(memory.content())
    loaded = OnlineCorrectionMemory.load(path)
    assert loaded.capacity == capacity
    for pair in later:
        assert loaded.count(*pair) == memory.count(*pair)
        loaded.add(*pair)
        memory.add(*pair)
    assert loaded.items() == memory.items()


def test_saving_twice_writes_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "ocm.npz"
    memory = OnlineCorrectionMemory(9).calibrate([(1, 2), (3, 4), (1, 2)])
    path.write_bytes(memory.content())
    assert OnlineCorrectionMemory.load(path).content() == memory.content()


def test_unreadable_files_are_named_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "ocm.npz"
    with pytest.raises(ValueError, match=r"ocm\.npz: no such correction memory"):
        OnlineCorrectionMemory.load(path)
    whole = OnlineCorrectionMemory().calibrate([(1, 2)] * 5).content()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"ocm\.npz: not a readable .* calibrate it again"):
            OnlineCorrectionMemory.load(path)
    path.write_text("hello")
    with pytest.raises(ValueError, match="not a readable correction memory"):
        OnlineCorrectionMemory.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "schema 99, this version reads 1"),
        ({"table": np.array([[1, 2, 0]])}, "field 'table' .* impossible counts"),
        ({"table": np.array([[1, 2]])}, "field 'table' .* impossible counts"),
        ({"table": np.array([[1, 2, 1], [1, 2, 4]])}, "repeats pairs"),
        ({"table": np.array([[1, 2, 1], [3, 2, 4]]), "capacity": 1}, "exceeds capacity 1"),
        ({"table": None}, "not a readable correction memory"),
    ],
)
def test_inconsistent_files_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "ocm.npz"
    fields: dict[str, Any] = {"schema": 1, "capacity": 0, "table": np.array([[1, 2, 3]]), **change}
    np.savez(path, **{k: v for k, v in fields.items() if v is not None})
    with pytest.raises(ValueError, match=message):
        OnlineCorrectionMemory.load(path)


def test_growth_is_noted_per_request() -> None:
    memory = OnlineCorrectionMemory()
    for request in ([(1, 2)], [(1, 2)], [(3, 4), (5, 6)]):
        memory.calibrate(request).end_request()
    assert memory.sizes == [1, 1, 3]


@pytest.mark.parametrize("capacity", [0, -3])
def test_impossible_capacity(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity is {capacity}"):
        OnlineCorrectionMemory(capacity)


def test_impossible_count() -> None:
    with pytest.raises(ValueError, match="times is 0"):
        OnlineCorrectionMemory().add(1, 2, 0)
