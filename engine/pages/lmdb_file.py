"""LMDB's file, read without LMDB: its roots, its trees and the list of its free pages, and whether they hold.

Always true:
  - nothing of the file is believed, and none of it is mapped: bytes that are wrong are `Damage`, and a disk
    that does not read is an OSError;
  - what passed `check_file` LMDB can follow without an end of its own: each of its pages is in the file, has
    its own number, is used once or free, and every key lies where a search looks for it;
  - the content of large values is not read, and of their pages the first few bytes only where that is asked
    for. LMDB believes those when a value is replaced or deleted, so `check_values` looks at them then;
  - compiled or not, the same files pass. What is wrong is said here.

This is LMDB 0.9's format on a machine of 64 bits, with databases that have one value a key. `docs/PAGES.md`
says what is added to it.
"""

from __future__ import annotations

import os
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import gt
from typing import NamedTuple

from blake3 import blake3

from lowwater.engine.format import fast
from lowwater.engine.format.fast import CheckedTree
from lowwater.engine.seams.real import RealFile

MAGIC = 0xBEEFC0DE
VERSION = 1
PAGE_HEAD = struct.Struct("<QHHHH")  # number, 2 bytes that are not used, kind, lower, upper
ROOTS = struct.Struct("<IIQQ48s48sQQ")  # magic, version, address, map size, two trees, last page, transaction
TREE = struct.Struct("<IHHQQQQQ")
NODE = struct.Struct("<HHHH")
NUMBER = struct.Struct("<Q")

BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8
BIG, SUBTREE = 1, 2
# The keys of the list of free pages are numbers, and LMDB keeps its own settings with the flag.
NUMBER_KEYS = 8
NO_ROOT = 2**64 - 1
META_PAGES = 2
DEPTH_MAX = 32
KEY_BYTES_MAX = 511
PAGE_BYTES_MAX = 2**15
PAGE_BYTES_MIN = 256
# Another process writes roots in one call, of which a reader may see a part.
TORN_READS_MAX = 3
# How far LMDB may count beyond the end of the file: pages that were taken and given back.
SLACK_PAGES = 2**20
SUM_MASK = 2**64 - 1


class Damage(Exception):
    """What is wrong with the file."""


class NotOne(Damage):
    """It is no file of LMDB, or none of this version."""


class Overtaken(Damage):
    """The roots that were asked for are not there. Others may have been written in their place since."""


class Tree(NamedTuple):
    page_bytes: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class Roots(NamedTuple):
    """One of the two meta pages."""

    page_bytes: int
    txn: int
    last_page: int
    free: Tree
    main: Tree


class LmdbRow(NamedTuple):
    """One entry of a tree, as it lies there."""

    key: bytes
    flags: int
    value: bytes


class FoundPages(NamedTuple):
    """What a file that was checked has: its other trees by name, the values beside them, and of each tree the
    sum of its keys."""

    roots: Roots
    trees: dict[bytes, Tree]
    values: dict[bytes, bytes]
    key_sums: dict[bytes, int]


# ---------------------------------------------------------------------------- sums


def sum_of(parts: Iterable[bytes]) -> int:
    """A number for a set of keys, or of rows, in whatever order they come: what is added to the set is added
    to it, and what goes is subtracted."""
    from_bytes = int.from_bytes
    return sum(from_bytes(blake3(part).digest(8), "little") for part in parts) & SUM_MASK


def sum_of_rows(rows: Mapping[bytes, bytes]) -> int:
    return sum_of(b"%d %s%s" % (len(key), key, value) for key, value in rows.items())


# ---------------------------------------------------------------------------- roots


def read_roots(file: RealFile, txn: int | None = None) -> Roots:
    """The roots that LMDB begins with, or those of this transaction."""
    for _ in range(TORN_READS_MAX):
        try:
            return _read_roots(file, txn)
        except Damage:
            continue  # perhaps they were being written
    return _read_roots(file, txn)


def _read_roots(file: RealFile, txn: int | None) -> Roots:
    first = _roots_at(file, 0, 0)
    second = _roots_at(file, 1, first.page_bytes)
    if second.page_bytes != first.page_bytes:
        raise Damage("its two meta pages are of different page sizes")
    newest = second if first.txn < second.txn else first
    if txn is None:
        return newest
    for roots in (first, second):
        if roots.txn == txn:
            return roots
    raise Overtaken(f"none of its meta pages is of transaction {txn}")


def _roots_at(file: RealFile, page: int, page_bytes: int) -> Roots:
    data = file.read_at(page * page_bytes, PAGE_HEAD.size + ROOTS.size)
    if len(data) < PAGE_HEAD.size + ROOTS.size:
        raise Damage(f"it ends within meta page {page}")
    _, _, kind, _, _ = PAGE_HEAD.unpack_from(data)
    magic, version, _, _, free, main, last_page, txn = ROOTS.unpack_from(data, PAGE_HEAD.size)
    if magic != MAGIC or version != VERSION or kind != META:
        # One that is whole says that it is LMDB's.
        other = file.read_at((1 - page) * (page_bytes or os.sysconf("SC_PAGESIZE")) + PAGE_HEAD.size, 8)
        if other != struct.pack("<II", MAGIC, VERSION):
            raise NotOne(f"meta page {page} is none")
        raise Damage(f"meta page {page} is none")
    roots = Roots(0, txn, last_page, Tree(*TREE.unpack(free)), Tree(*TREE.unpack(main)))
    size = roots.free.page_bytes
    if size & (size - 1) or not PAGE_BYTES_MIN <= size <= PAGE_BYTES_MAX:
        raise Damage(f"its pages are said to have {size:,} bytes")
    if roots.free.flags != NUMBER_KEYS or roots.main.flags or roots.main.page_bytes:
        raise Damage(f"the trees of meta page {page} are said to be of another kind")
    return roots._replace(page_bytes=size)


# ---------------------------------------------------------------------------- all of it


def check_file(file: RealFile, roots: Roots, *, headers: bool = False) -> FoundPages:
    """Look at all that LMDB would follow from these roots; with `headers` at the beginning of each large
    value too. Nobody may write to these pages meanwhile: LMDB does not while a transaction reads them."""
    limit = pages_limit(file, roots)
    used = bytearray(roots.last_page + 1)
    free = _Walk(file, roots.page_bytes, limit, used, headers=True, is_numbers=True)
    free.check(roots.free, "the list of free pages")
    trees, values = _main_rows(file, roots, limit, used)
    sums = {}
    for name, tree in trees.items():
        counts = check_tree(file, roots.page_bytes, limit, used, tree, None, headers)
        _compare(tree, counts, f"the tree {_shown(name)}")
        sums[name] = counts[4]
    for row in free.rows:
        _mark_free(row, used, roots.txn)
    lost = used.find(0, META_PAGES)
    if lost >= 0:
        raise Damage(f"page {lost} is neither used nor free")
    return FoundPages(roots, trees, values, sums)


def check_values(
    file: RealFile, txn: int, wanted: Mapping[bytes, Sequence[bytes]]
) -> dict[bytes, dict[bytes, bool]]:
    """Return, for some keys of some trees, whether they are there as of this transaction. The way to them is
    checked once more, and so is what LMDB believes of their values when they are replaced or deleted."""
    roots = read_roots(file, txn)
    limit = pages_limit(file, roots)
    trees, _ = _main_rows(file, roots, limit, None)
    answer = {}
    for name, keys in wanted.items():
        if name not in trees:
            raise Damage(f"the tree {_shown(name)} is missing")
        keys = sorted(set(keys))
        found = check_tree(file, roots.page_bytes, limit, None, trees[name], keys, True)[5]
        assert found is not None
        answer[name] = dict(zip(keys, map(bool, found), strict=True))
    return answer


def pages_limit(file: RealFile, roots: Roots) -> int:
    """The first page that cannot be in use."""
    in_file = file.size() // roots.page_bytes
    if not META_PAGES <= roots.last_page + 1 <= in_file + max(in_file, SLACK_PAGES):
        raise Damage(f"it is said to have {roots.last_page + 1:,} pages, and has {in_file:,}")
    return min(in_file, roots.last_page + 1)


def _main_rows(
    file: RealFile, roots: Roots, limit: int, used: bytearray | None
) -> tuple[dict[bytes, Tree], dict[bytes, bytes]]:
    """What the unnamed database has: other trees, and values."""
    walk = _Walk(file, roots.page_bytes, limit, used, flags=BIG | SUBTREE, headers=True)
    walk.check(roots.main, "the tree of trees")
    trees: dict[bytes, Tree] = {}
    values: dict[bytes, bytes] = {}
    for key, flags, value in walk.rows:
        if flags != SUBTREE:
            values[key] = value
        elif len(value) != TREE.size:
            raise Damage(f"the tree {_shown(key)} has no root")
        else:
            trees[key] = tree = Tree(*TREE.unpack(value))
            if tree.flags or tree.page_bytes:
                raise Damage(f"the tree {_shown(key)} is said to be of another kind")
    return trees, values


def _mark_free(row: LmdbRow, used: bytearray, txn: int) -> None:
    (of_txn,) = NUMBER.unpack(row.key)
    pages = array("Q")
    if not 1 <= of_txn <= txn or not row.value or len(row.value) % 8:
        raise Damage(f"the list of free pages of transaction {of_txn} is none")
    pages.frombytes(row.value)
    if pages[0] != len(pages) - 1:
        raise Damage(f"the list of free pages of transaction {of_txn} is of another length")
    del pages[0]
    if not pages:
        return
    if not all(map(gt, pages, pages[1:])) or pages[-1] < META_PAGES or pages[0] >= len(used):
        raise Damage(f"the list of free pages of transaction {of_txn} is out of order")
    for page in pages:
        if used[page]:
            raise Damage(f"page {page} is free, and used or free elsewhere")
        used[page] = 1


# ---------------------------------------------------------------------------- one tree


def check_tree(
    file: RealFile,
    page_bytes: int,
    limit: int,
    used: bytearray | None,
    tree: Tree,
    wanted: list[bytes] | None,
    headers: bool,
) -> CheckedTree:
    """A tree with values below keys of bytes: all of it, or the way to the wanted keys, which are in order.
    Its pages are marked as used."""
    if tree.root != NO_ROOT and tree.depth <= DEPTH_MAX:
        marked = None if used is None else bytearray(used)
        compiled = fast.check_tree(
            file.fileno(), page_bytes, limit, marked, tree.root, tree.depth, wanted, headers
        )
        if compiled is not None:
            if used is not None:
                assert marked is not None
                used[:] = marked
            return compiled
    walk = _Walk(file, page_bytes, limit, used, wanted=wanted, headers=headers)
    walk.walk(tree)
    return walk.counts


def _compare(tree: Tree, counts: CheckedTree, what: str) -> None:
    if counts[:4] != (tree.branch_pages, tree.leaf_pages, tree.overflow_pages, tree.entries):
        raise Damage(f"{what} has not as many pages and entries as it says")


class _Walk:
    """A tree, page by page. Without `wanted` all of it; its `rows` are kept where it is not one of ours."""

    def __init__(
        self,
        file: RealFile,
        page_bytes: int,
        limit: int,
        used: bytearray | None,
        *,
        flags: int = BIG,
        wanted: list[bytes] | None = None,
        headers: bool = False,
        is_numbers: bool = False,
    ) -> None:
        self._file = file
        self._page_bytes = page_bytes
        self._limit = limit
        self._used = used
        self._flags = flags
        self._wanted = wanted
        self._headers = headers
        self._is_numbers = is_numbers
        self._keeps_rows = is_numbers or flags != BIG
        self._depth = 0
        self._counts = [0, 0, 0, 0, 0]
        self._found = bytearray(len(wanted or ()))
        self.rows: list[LmdbRow] = []

    @property
    def counts(self) -> CheckedTree:
        branch, leaf, overflow, entries, key_sum = self._counts
        return (
            branch,
            leaf,
            overflow,
            entries,
            key_sum & SUM_MASK,
            None if self._wanted is None else bytes(self._found),
        )

    def check(self, tree: Tree, what: str) -> None:
        try:
            self.walk(tree)
        except Damage as damage:
            raise Damage(f"{what}: {damage}") from damage
        _compare(tree, self.counts, what)

    def walk(self, tree: Tree) -> None:
        if tree.root == NO_ROOT:
            if tree.depth:
                raise Damage("a tree without a root is said to have levels")
            return
        if not 1 <= tree.depth <= DEPTH_MAX:
            raise Damage(f"a tree is said to have {tree.depth} levels")
        self._depth = tree.depth
        self._page(tree.root, 1, None, None, 0, len(self._found))

    def _take(self, page: int, count: int) -> None:
        if page < META_PAGES or page + count > self._limit:
            raise Damage(f"page {page} is beyond its end")
        if self._used is not None:
            if self._used.find(1, page, page + count) >= 0:
                raise Damage(f"page {page} is used twice")
            self._used[page : page + count] = b"\1" * count

    def _read(self, offset: int, size: int) -> bytes:
        data = self._file.read_at(offset, size)
        if len(data) < size:
            raise Damage(f"it ends before byte {offset + size:,}")
        return data

    def _page(
        self, page: int, level: int, low: bytes | None, high: bytes | None, begin: int, end: int
    ) -> None:
        self._take(page, 1)
        data = self._read(page * self._page_bytes, self._page_bytes)
        if level == self._depth:
            self._leaf(page, data, low, high, begin, end)
        else:
            self._branch(page, data, level, low, high, begin, end)

    def _nodes(self, page: int, data: bytes, kind: int) -> list[tuple[int, bytes]]:
        """Where each node lies, with its key. They lie one behind the other up to the end of the page."""
        number, _, found, lower, upper = PAGE_HEAD.unpack_from(data)
        if number != page:
            raise Damage(f"page {page} says that it is page {number}")
        if found != kind:
            raise Damage(f"page {page} is of the kind {found}, and not {kind}")
        size = self._page_bytes
        if not PAGE_HEAD.size <= lower <= upper <= size or lower & 1 or upper & 1:
            raise Damage(f"page {page} has no such parts")
        count = (lower - PAGE_HEAD.size) // 2
        # LMDB itself ends the process at a branch of less.
        if count < (1 if kind == LEAF or self._is_numbers else 2):
            raise Damage(f"page {page} has too few entries")
        places = struct.unpack_from(f"<{count}H", data, PAGE_HEAD.size)
        nodes, ends = [], {}
        for at in places:
            if at & 1 or at < upper or at + NODE.size > size:
                raise Damage(f"page {page} has an entry outside of it")
            low, high, flags, key_bytes = NODE.unpack_from(data, at)
            stop = at + NODE.size + key_bytes
            if key_bytes > KEY_BYTES_MAX or (self._is_numbers and kind == LEAF and key_bytes != 8):
                raise Damage(f"page {page} has a key of {key_bytes} bytes")
            nodes.append((at, data[at + NODE.size : stop]))
            if kind == LEAF:
                if not key_bytes or (flags and flags not in (self._flags & BIG, self._flags & SUBTREE)):
                    raise Damage(f"page {page} has an entry of another kind")
                stop += 8 if flags & BIG else low | high << 16
            ends[at] = stop + (stop & 1)
        starts = sorted(ends)
        if len(starts) != count or [upper, *(ends[at] for at in starts)] != [*starts, size]:
            raise Damage(f"the entries of page {page} do not fill it")
        return nodes

    def _order(self, key: bytes) -> bytes:
        return key[::-1] if self._is_numbers else key

    def _branch(
        self, page: int, data: bytes, level: int, low: bytes | None, high: bytes | None, begin: int, end: int
    ) -> None:
        nodes = self._nodes(page, data, BRANCH)
        self._counts[0] += 1
        keys = [self._order(key) for _, key in nodes[1:]]
        bounds = [key for key in (low, *keys, high) if key is not None]
        if self._is_numbers and any(len(key) != 8 for key in keys):
            raise Damage(f"page {page} has a key that is no number")
        if not all(keys) or any(one >= other for one, other in pairwise(bounds)):
            raise Damage(f"the keys of page {page} are out of order")
        children = []
        for at, _ in nodes:
            first, second, third, _ = NODE.unpack_from(data, at)
            children.append(first | second << 16 | third << 32)
        if self._wanted is None and hasattr(os, "posix_fadvise"):
            for child in children:
                if child < self._limit:
                    os.posix_fadvise(
                        self._file.fileno(),
                        child * self._page_bytes,
                        self._page_bytes,
                        os.POSIX_FADV_WILLNEED,
                    )
        for child, lower, upper in zip(children, [low, *keys], [*keys, high], strict=True):
            stop = end
            if self._wanted is not None:
                if upper is not None:
                    stop = bisect_left(self._wanted, upper, begin, end)
                if stop == begin:
                    continue
            self._page(child, level + 1, lower, upper, begin, stop)
            begin = stop

    def _leaf(
        self, page: int, data: bytes, low: bytes | None, high: bytes | None, begin: int, end: int
    ) -> None:
        nodes = self._nodes(page, data, LEAF)
        keys = [self._order(key) for _, key in nodes]
        if (
            any(one >= other for one, other in pairwise(keys))
            or (low is not None and keys[0] < low)
            or (high is not None and keys[-1] >= high)
        ):
            raise Damage(f"the keys of page {page} are out of order")
        self._counts[1] += 1
        self._counts[3] += len(nodes)
        if self._wanted is None:
            self._counts[4] += sum_of(key for _, key in nodes)
            for at, key in nodes:
                self._value(data, at, key)
            return
        places = dict(zip(keys, nodes, strict=True))
        for index in range(begin, end):
            if (node := places.get(self._wanted[index])) is not None:
                self._found[index] = 1
                self._value(data, *node)

    def _value(self, data: bytes, at: int, key: bytes) -> None:
        low, high, flags, key_bytes = NODE.unpack_from(data, at)
        size = low | high << 16
        at += NODE.size + key_bytes
        if not flags & BIG:
            if self._keeps_rows:
                self.rows.append(LmdbRow(key, flags, data[at : at + size]))
            return
        (page,) = NUMBER.unpack_from(data, at)
        count = (PAGE_HEAD.size - 1 + size) // self._page_bytes + 1
        self._take(page, count)
        self._counts[2] += count
        offset = page * self._page_bytes
        if self._headers:
            number, _, kind, lower, upper = PAGE_HEAD.unpack(self._read(offset, PAGE_HEAD.size))
            if number != page or kind != OVERFLOW or lower | upper << 16 != count:
                raise Damage(f"page {page} is not the beginning of a value of {count} pages")
        if self._keeps_rows:
            self.rows.append(LmdbRow(key, flags, self._read(offset + PAGE_HEAD.size, size)))


def _shown(name: bytes) -> str:
    return repr(name.decode("ascii", "backslashreplace"))[:40]
