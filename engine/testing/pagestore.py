"""What the engine relies on in every PageStore. A new one is tested by a few lines:

    class TestMyPages(PageStoreConformance):
        @pytest.fixture
        def place(self, tmp_path: Path) -> Place:
            return lambda: MyPages.open(str(tmp_path / "pages"))

Always true: each test finds a new place; `open_pages` gives the store that is there, which was closed
before. What a crash or a failing disk leaves is not tested here: no call of the interface makes one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from lowwater.engine.pages.pagestore import KEY_BYTES_MAX, PageStore
from lowwater.errors import Closed

# Opens the store of one place, again and again.
Place = Callable[[], PageStore]


class PageStoreConformance:
    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError("a subclass says how its store is opened")

    def test_a_new_store_is_empty(self, place: Place) -> None:
        """The engine takes a store without meta for one that was never written."""
        pages = place()
        assert pages.read_meta() == {}
        assert list(pages.page_keys()) == []
        assert pages.get(b"a") is None
        assert pages.get_many([b"a", b"b"]) == [None, None]
        pages.close()

    def test_what_was_written_is_there_and_stays_there(self, place: Place) -> None:
        """In this life and in the next one."""
        pages = place()
        pages.write([(b"a", b"1"), (b"b", b"")], [], {b"applied": b"7", b"empty": b""})
        for _ in range(2):
            assert pages.get(b"a") == b"1"
            assert pages.get(b"b") == b""
            assert pages.get(b"c") is None
            assert pages.read_meta() == {b"applied": b"7", b"empty": b""}
            assert list(pages.page_keys()) == [b"a", b"b"]
            pages.close()
            pages = place()
        pages.close()

    def test_a_write_replaces_deletes_and_keeps_the_rest(self, place: Place) -> None:
        """A flush changes some pages of many, and a part of the meta."""
        pages = place()
        pages.write([(b"a", b"1"), (b"b", b"1"), (b"c", b"1")], [], {b"x": b"1", b"y": b"1", b"z": b"1"})
        pages.write([(b"a", b"2"), (b"d", b"2")], [b"b", b"missing"], {b"x": b"2", b"y": None, b"no": None})
        assert pages.get_many([b"a", b"b", b"c", b"d"]) == [b"2", None, b"1", b"2"]
        assert list(pages.page_keys()) == [b"a", b"c", b"d"]
        assert list(pages.page_sizes()) == [(b"a", 1), (b"c", 1), (b"d", 1)]
        assert pages.read_meta() == {b"x": b"2", b"z": b"1"}
        pages.close()

    def test_a_page_that_is_deleted_and_put_is_there(self, place: Place) -> None:
        """A page that splits goes, and of those that come one has its key."""
        pages = place()
        pages.write([(b"a", b"whole")], [], {})
        pages.write([(b"a", b"left"), (b"m", b"right")], [b"a"], {})
        assert pages.get_many([b"a", b"m"]) == [b"left", b"right"]
        pages.close()

    def test_pages_and_meta_have_their_own_keys(self, place: Place) -> None:
        """A page key is whatever a user's key is."""
        pages = place()
        pages.write([(b"applied", b"page")], [], {b"applied": b"meta"})
        pages.write([], [b"applied"], {})
        assert pages.get(b"applied") is None
        assert pages.read_meta() == {b"applied": b"meta"}
        pages.close()

    def test_writing_nothing_changes_nothing(self, place: Place) -> None:
        """A checkpoint may find nothing dirty."""
        pages = place()
        pages.write([], [], {})
        assert pages.read_meta() == {}
        assert list(pages.page_keys()) == []
        pages.close()

    def test_keys_come_in_the_order_of_their_bytes(self, place: Place) -> None:
        """The engine finds a key's page by bisection of this list."""
        pages = place()
        keys = [
            b"\0",
            b"\0\0",
            b"\0\1",
            b"a",
            b"a\0",
            b"aa",
            b"b" * KEY_BYTES_MAX,
            b"\x7f",
            b"\xff",
            b"\xff\xff",
        ]
        pages.write([(key, key) for key in reversed(keys)], [], {})
        assert list(pages.page_keys()) == sorted(keys)
        assert pages.get_many(keys) == keys
        pages.close()

    def test_keys_come_once_each_however_many_there_are(self, place: Place) -> None:
        """They are read in runs, and nothing may fall between two of them."""
        pages = place()
        keys = [b"%06d" % number for number in range(5003)]
        pages.write([(key, b"page") for key in keys], [], {})
        assert list(pages.page_keys()) == keys
        pages.close()

    def test_keys_can_be_read_while_pages_change(self, place: Place) -> None:
        """A scan must not need a long transaction. What stays is seen once, wherever the scan is."""
        pages = place()
        keys = [b"%06d" % number for number in range(3000)]
        pages.write([(key, b"page") for key in keys], [], {})
        seen = []
        for number, key in enumerate(pages.page_keys()):
            seen.append(key)
            if number % 500 == 0:
                # The one that the scan stands on, one behind it, and one that may be before it or not.
                pages.write([(key + b"+", b"new")], [key, b"%06d" % (2999 - number)], {})
        deleted = set(keys) - set(pages.page_keys())
        old = [key for key in seen if not key.endswith(b"+")]
        assert old == sorted(set(old))
        assert set(keys) - deleted <= set(old)
        pages.close()

    @pytest.mark.parametrize("size", [1, 2000, 2031, 4080, 4081, 65_536, 8 * 2**20])
    def test_pages_of_any_size_come_back_as_they_were(self, place: Place, size: int) -> None:
        """Many keys that are equal in their first 500 bytes share one page."""
        pages = place()
        page = bytes(range(256)) * (size // 256 + 1)
        pages.write([(b"a", page[:size]), (b"b", page[:size][::-1])], [], {})
        assert pages.get_many([b"b", b"a"]) == [page[:size][::-1], page[:size]]
        pages.close()

    def test_a_key_that_no_store_takes_is_refused_before_anything_is_written(self, place: Place) -> None:
        """It is a bug of the engine, and must not cost the pages that were beside it."""
        pages = place()
        for key in (b"", b"x" * (KEY_BYTES_MAX + 1)):
            with pytest.raises(AssertionError):
                pages.write([(b"a", b"1"), (key, b"1")], [], {})
            with pytest.raises(AssertionError):
                pages.write([(b"a", b"1")], [key], {})
            with pytest.raises(AssertionError):
                pages.write([(b"a", b"1")], [], {key: b"1"})
        with pytest.raises(AssertionError):
            pages.write([(b"a", b"1"), (b"a", b"2")], [], {})
        assert list(pages.page_keys()) == []
        pages.write([(b"a", b"1")], [], {})
        pages.close()

    def test_sizes_follow_what_is_stored(self, place: Place) -> None:
        """They are shown to operators, and decide when space is to be won back."""
        pages = place()
        empty = pages.used_bytes()
        pages.write([(b"%04d" % number, bytes(5000)) for number in range(100)], [], {})
        full = pages.used_bytes()
        assert full - empty >= 500_000
        assert pages.size_bytes() >= full
        pages.write([], [b"%04d" % number for number in range(100)], {})
        assert pages.used_bytes() < empty + 50_000
        assert pages.size_bytes() >= pages.used_bytes()
        pages.close()

    def test_a_closed_store_refuses_everything_but_close(self, place: Place) -> None:
        """Also to a scan that began before."""
        pages = place()
        pages.write([(b"%06d" % number, b"page") for number in range(3000)], [], {})
        scan = pages.page_keys()
        next(scan)
        pages.close()
        pages.close()
        with pytest.raises(Closed):
            list(scan)
        for call in (
            lambda: pages.get(b"a"),
            lambda: pages.get_many([b"a"]),
            lambda: pages.write([], [], {}),
            pages.read_meta,
            pages.size_bytes,
            pages.used_bytes,
        ):
            with pytest.raises(Closed):
                call()

    def test_readers_in_other_threads_see_whole_transactions(self, place: Place) -> None:
        """A page that splits must never be seen half split."""
        pages = place()
        pages.write([(b"left", b"0"), (b"right", b"0")], [], {})
        done = threading.Event()
        wrong: list[object] = []

        def read() -> None:
            last = 0
            while not done.is_set():
                left, right = pages.get_many([b"left", b"right"])
                if left is None or left != right or int(left) < last:
                    wrong.append((left, right, last))
                    return
                last = int(left)

        readers = [threading.Thread(target=read) for _ in range(4)]  # noqa: TID251 - this is a test
        for thread in readers:
            thread.start()
        try:
            for number in range(1, 200):
                pages.write([(b"left", b"%d" % number), (b"right", b"%d" % number)], [], {})
        finally:
            done.set()
            for thread in readers:
                thread.join()
        assert wrong == []
        pages.close()
