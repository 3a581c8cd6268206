"""Disjoint sets (union-find), and pairs of overlapping spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class DisjointSets:
    """Groups of the numbers from 0 to ``count`` - 1: each number alone at first, then merged by ``join`` (union-find).

    >>> groups = DisjointSets(4); groups.join(1, 3); groups.lists()
    [[0], [1, 3], [2]]
    """

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def root(self, i: int) -> int:
        """Return the smallest number of the group of ``i``."""
        parent = self._parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(self, i: int, j: int) -> None:
        """Merge the groups of ``i`` and ``j``."""
        one, two = self.root(i), self.root(j)
        self._parent[max(one, two)] = min(one, two)

    def lists(self) -> list[list[int]]:
        """Return the groups, each in order, ordered by their first numbers."""
        found: dict[int, list[int]] = {}
        for i in range(len(self._parent)):
            found.setdefault(self.root(i), []).append(i)
        return list(found.values())


def overlapping(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the indices of every pair of ``spans``, (start, stop) each, that overlap.

    >>> list(overlapping([(0, 4), (4, 6), (2, 5)]))
    [(2, 0), (1, 2)]
    """
    reaching: list[int] = []  # earlier spans that reach past the start of the current one
    for i in sorted(range(len(spans)), key=lambda i: (spans[i][0], -spans[i][1])):
        start = spans[i][0]
        reaching = [j for j in reaching if spans[j][1] > start]
        for j in reaching:
            yield i, j
        reaching.append(i)
