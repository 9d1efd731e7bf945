"""What Lowwater relies on in every object store. A new one is tested by a few lines:

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def place(self) -> Place:
            uri = f"mystore://bucket/{uuid4()}"
            return lambda: open_store(uri)

Always true: each test finds an empty place, and `place()` opens a store there, as another process would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from lowwater.errors import Closed, InvalidEntry, NotFound
from lowwater.tiering.checksums import Sent
from lowwater.tiering.store import FoundObject, Part, Store
from lowwater.tiering.verified_writes import write_verified

# Opens the store of one place, again and again.
Place = Callable[[], Store]

# Above two parts of 8 MiB, and no multiple of anything.
LARGE_BYTES = 17 * 1024 * 1024 + 12_345


NO_NAMES = [
    *("", "/", "/a", "a/", "a//b", "..", "../a", "\udcff", "a/../b", "a/./b", ".probe", ".tmp/x"),
    *("a\0b", "a\nb", "a\\b", "x" * 256, "x/" * 600 + "x"),
]


def put(store: Store, name: str, data: bytes) -> bool:
    return bool(store.write(name, [data], size=len(data)))


def names(found: Iterator[FoundObject]) -> list[str]:
    return [name for name, _ in found]


def pattern(size: int) -> bytes:
    """Bytes of which no two parts are alike."""
    return b"".join(number.to_bytes(8, "big") for number in range(-(-size // 8)))[:size]


class StoreConformance:
    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError("a subclass says which store")

    @pytest.fixture
    def store(self, place: Place) -> Iterator[Store]:
        store = place()
        yield store
        store.close()

    def test_an_object_whose_size_is_not_known_before_is_streamed(self, place: Place) -> None:
        """What is compressed on the way knows its size at the end."""
        store = place()
        parts = [bytes([number]) * 5_000_000 for number in range(5)]
        assert store.write("a/unknown", iter(parts), size=None)
        assert store.stat("a/unknown") == FoundObject("a/unknown", 25_000_000)
        assert store.read("a/unknown") == b"".join(parts)
        assert not store.write("a/unknown", iter(parts), size=None)
        store.close()

    def test_what_was_written_is_read(self, store: Store) -> None:
        """By its name, with its size, and by whoever opens the place."""
        assert put(store, "wal/1/segment", b"0123456789") is True
        assert store.read("wal/1/segment") == b"0123456789"
        assert store.stat("wal/1/segment") == FoundObject("wal/1/segment", 10)

    def test_another_process_sees_it(self, place: Place) -> None:
        """An object is in the store, not in the handle that wrote it."""
        writer = place()
        assert put(writer, "a/b", b"x")
        reader = place()
        assert reader.read("a/b") == b"x"
        assert names(reader.list()) == ["a/b"]
        writer.close()
        reader.close()

    def test_a_new_place_is_empty(self, place: Place) -> None:
        """Looking at what a server can do leaves nothing behind."""
        for _ in range(2):
            store = place()
            assert list(store.list()) == []
            store.close()

    def test_a_name_that_is_taken_is_kept(self, store: Store, place: Place) -> None:
        """Names are never used again for other content: who comes second learns it."""
        assert put(store, "a", b"first") is True
        assert put(store, "a", b"second") is False
        other = place()
        assert put(other, "a", b"third, and longer") is False
        other.close()
        assert store.read("a") == b"first"
        assert store.stat("a").size == 5

    def test_one_of_many_writers_at_once_makes_it(self, store: Store) -> None:
        """Shippers of one log meet at every object. Without a condition in the server two may say that they
        made it, one after the other; what is there is always whole."""
        answers: list[bool] = []
        gate = threading.Barrier(4)

        def write() -> None:
            gate.wait()
            answers.append(put(store, "epochs/1", b"the same" * 1000))

        threads = [threading.Thread(target=write) for _ in range(4)]  # noqa: TID251  # from outside
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 4
        assert any(answers)
        assert store.read("epochs/1") == b"the same" * 1000

    def test_the_parts_may_be_of_any_size_and_kind(self, store: Store) -> None:
        """They come from files, maps and compressors."""
        parts: list[Part] = [b"", b"a", bytearray(b"bc"), memoryview(b"xdefx")[1:4], b"", b"g" * 70_000]
        assert store.write("a", iter(parts), size=70_006)
        assert store.read("a") == b"abcdef" + b"g" * 70_000

    def test_an_object_may_be_empty(self, store: Store) -> None:
        """And is then there."""
        assert store.write("a", [], size=0)
        assert store.stat("a") == FoundObject("a", 0)
        assert store.read("a") == store.read("a", 3, 9) == b""

    def test_an_object_may_be_larger_than_a_part(self, store: Store) -> None:
        """It is sent in parts, and read in ranges."""
        data = pattern(LARGE_BYTES)
        parts = [data[at : at + 1_000_003] for at in range(0, len(data), 1_000_003)]
        assert write_verified(store, "large/one", lambda: parts, size=len(data))
        assert not write_verified(store, "large/one", lambda: parts, size=len(data))
        assert store.stat("large/one").size == len(data)
        middle = 8 * 1024 * 1024
        assert store.read("large/one", middle - 5, middle + 5) == data[middle - 5 : middle + 5]
        assert store.read("large/one", len(data) - 3, len(data) + 100) == data[-3:]
        assert store.read("large/one") == data
        assert store.copy("large/one", "large/two") is True
        assert store.read("large/two") == data

    @pytest.mark.parametrize(
        ("start", "end", "expected"),
        [
            (0, None, b"0123456789"),
            (3, None, b"3456789"),
            (0, 1, b"0"),
            (3, 7, b"3456"),
            (9, 10, b"9"),
            (3, 100, b"3456789"),
            (0, 1000, b"0123456789"),
            (10, None, b""),
            (10, 11, b""),
            (500, 501, b""),
            (500, None, b""),
            (4, 4, b""),
        ],
    )
    def test_a_range_ends_where_the_object_does(
        self, store: Store, start: int, end: int | None, expected: bytes
    ) -> None:
        """Readers ask for whole blocks, and the last block is shorter."""
        put(store, "a", b"0123456789")
        assert store.read("a", start, end) == expected

    def test_what_is_missing_is_not_found(self, store: Store) -> None:
        """By each call that needs it; the error says which store and which object."""
        put(store, "a/b", b"x")
        for name in ("a/c", "c", "a/b-", "x/y/z"):
            for call in (store.read, store.stat, lambda name: store.read(name, 3, 9)):
                with pytest.raises(NotFound) as caught:
                    call(name)
                assert caught.value.path == f"{store.uri.rstrip('/')}/{name}"
                assert caught.value.hint

    def test_the_beginning_of_a_name_is_no_object(self, store: Store) -> None:
        """A folder is nothing in a store."""
        put(store, "a/b/c", b"x")
        for name in ("a", "a/b"):
            with pytest.raises(NotFound):
                store.stat(name)
            with pytest.raises(NotFound):
                store.read(name)
        assert names(store.list()) == ["a/b/c"]

    def test_a_copy_is_an_object_of_its_own(self, store: Store, place: Place) -> None:
        """With the same bytes, for everybody, and whatever becomes of the other."""
        put(store, "a/b", b"0123456789")
        put(store, "a/none", b"")
        assert store.copy("a/b", "c/ü d") is True
        assert store.copy("a/none", "c/none") is True
        other = place()
        assert other.stat("c/ü d") == FoundObject("c/ü d", 10)
        assert other.read("a/b") == other.read("c/ü d") == b"0123456789"
        assert other.read("c/none") == b""
        other.close()
        store.delete("a/b")
        assert store.read("c/ü d") == b"0123456789"
        assert names(store.list()) == ["a/none", "c/none", "c/ü d"]

    def test_a_copy_keeps_a_name_that_is_taken(self, store: Store) -> None:
        """Also its own: it is there already."""
        put(store, "a", b"first")
        put(store, "b", b"second, and longer")
        assert store.copy("b", "a") is False
        assert store.copy("a", "a") is False
        assert store.read("a") == b"first"

    def test_a_copy_of_what_is_missing_makes_nothing(self, store: Store) -> None:
        """And the error names what is missing."""
        put(store, "a/b", b"x")
        for name in ("a", "a/c"):
            with pytest.raises(NotFound) as caught:
                store.copy(name, "b")
            assert caught.value.path == f"{store.uri.rstrip('/')}/{name}"
        assert names(store.list()) == ["a/b"]

    def test_an_object_is_written_over_where_that_is_asked_for(self, store: Store, place: Place) -> None:
        """Which is what mends one that was damaged; also one that is gone."""
        put(store, "a", b"first")
        store.replace("a", [b"second, ", b"and longer"], size=18)
        store.replace("b/c", [b"x"], size=1)
        data = pattern(LARGE_BYTES)
        store.replace("large", [data], size=len(data))
        store.replace("large", [data[:1], data[2:]], size=None)
        other = place()
        assert other.read("a") == b"second, and longer"
        assert other.stat("b/c").size == 1
        assert other.read("large") == data[:1] + data[2:]
        assert names(other.list()) == ["a", "b/c", "large"]
        other.close()

    @pytest.mark.parametrize("size", [0, 10, LARGE_BYTES])
    def test_a_checksum_is_that_of_the_bytes_or_says_nothing(self, store: Store, size: int) -> None:
        """And is of the object's size; of what is missing there is none."""
        data = pattern(size)
        put(store, "a/b", data)
        said = store.checksum("a/b")
        assert said.size == size
        if said.md5:
            assert store.hashing is not None
            sent = Sent(store.hashing)
            assert b"".join(sent.passing([data])) == data
            assert said.md5 in sent.md5s
        with pytest.raises(NotFound):
            store.checksum("a")

    def test_what_was_deleted_is_gone(self, store: Store) -> None:
        """And can be deleted again, and written again."""
        put(store, "a/b", b"x")
        put(store, "a/c", b"y")
        for _ in range(2):
            store.delete("a/b")
        store.delete("never/there")
        assert names(store.list()) == ["a/c"]
        with pytest.raises(NotFound):
            store.read("a/b")
        assert put(store, "a/b", b"z") is True
        assert store.read("a/b") == b"z"

    def test_a_list_is_sorted_whatever_the_names(self, store: Store) -> None:
        """By their bytes: a slash stands between other letters, and folders sort as the whole names do."""
        expected = sorted(
            [
                "a",
                "a-",
                "a-b/x",
                "b/1",
                "b/10",
                "b/2",
                "b-/0",
                "b0",
                "c/d/e",
                "c/d.e",
                "c/d0",
                "c.d",
                "ü/1",
                "Z",
                "日本",
            ],
            key=str.encode,
        )
        for number, name in enumerate(expected[::2] + expected[1::2]):
            put(store, name, bytes(number))
        listed = list(store.list())
        assert [found.name for found in listed] == expected
        assert {found.size for found in listed} == set(range(len(expected)))

    def test_a_list_begins_with_a_prefix_or_above_a_name(self, store: Store) -> None:
        """A prefix need not end with a slash; the name to start after need not exist."""
        everything = ["a/1", "a/2", "a/2/x"[:3] + "2", "a/3", "ab/1", "b"]
        for name in everything:
            put(store, name, b"")
        assert names(store.list("a/")) == ["a/1", "a/2", "a/22", "a/3"]
        assert names(store.list("a")) == ["a/1", "a/2", "a/22", "a/3", "ab/1"]
        assert names(store.list("a/2")) == ["a/2", "a/22"]
        assert names(store.list("a/", "a/2")) == ["a/22", "a/3"]
        assert names(store.list("a/", "a/21")) == ["a/22", "a/3"]
        assert names(store.list("", "a/3")) == ["ab/1", "b"]
        assert names(store.list("a/", "b")) == []
        assert names(store.list("ab/", "a")) == ["ab/1"]
        assert names(store.list("", "a")) == everything
        assert names(store.list("nothing/")) == []
        assert names(store.list("", "z")) == []

    def test_a_list_goes_on_while_objects_come_and_go(self, store: Store) -> None:
        """Collectors delete what they list. Whatever was there all the time is listed once."""
        for number in range(20):
            put(store, f"l/{number:03}", b"")
        seen = []
        for found in store.list("l/"):
            seen.append(found.name)
            store.delete(found.name)
            put(store, f"k/{found.name[2:]}", b"")
        assert seen == [f"l/{number:03}" for number in range(20)]
        assert names(store.list("l/")) == []

    def test_parts_that_fail_leave_nothing(self, store: Store) -> None:
        """A file that cannot be read is no object. Its error is not the store's."""
        for size in (100, LARGE_BYTES):

            def parts(size: int = size) -> Iterator[bytes]:
                yield bytes(size - 10)
                raise OSError(5, "the disk failed")

            with pytest.raises(OSError, match="the disk failed"):
                store.write("a", parts(), size=size)
            assert names(store.list()) == []
            with pytest.raises(NotFound):
                store.stat("a")
        assert put(store, "a", b"now") is True

    @pytest.mark.parametrize("size", [10, LARGE_BYTES])
    @pytest.mark.parametrize("difference", [-1, 1])
    def test_parts_that_come_to_another_size_leave_nothing(
        self, store: Store, size: int, difference: int
    ) -> None:
        """A file that grew or shrank while it was read."""
        with pytest.raises(InvalidEntry, match="bytes came for an object of"):
            store.write("a", [bytes(size - 5), bytes(5)], size=size + difference)
        with pytest.raises(NotFound):
            store.stat("a")

    @pytest.mark.parametrize("name", NO_NAMES)
    def test_what_is_no_name_is_refused(self, store: Store, name: str) -> None:
        """A name must not lead out of the prefix, and must mean the same in every store."""
        copies = (lambda n: store.copy(n, "a"), lambda n: store.copy("a", n))
        for call in (store.read, store.stat, store.delete, lambda n: put(store, n, b""), *copies):
            with pytest.raises(InvalidEntry):
                call(name)
        assert list(store.list()) == []

    def test_a_closed_store_says_so(self, place: Place) -> None:
        """To every call but `close`."""
        store = place()
        store.close()
        store.close()
        for call in (
            store.read, store.stat, store.delete, lambda n: put(store, n, b""), store.list,
            lambda n: store.copy(n, "b"),
        ):  # fmt: skip
            with pytest.raises(Closed):
                call("a")

    def test_the_uri_and_the_repr_name_the_place(self, store: Store) -> None:
        """Messages use them."""
        assert "://" in store.uri
        assert store.uri in repr(store)
