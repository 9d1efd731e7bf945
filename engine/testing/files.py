"""What the engine relies on in every implementation of Files. A new one is tested by a few lines:

    class TestMyFiles(FilesConformance):
        @pytest.fixture
        def place(self) -> Place:
            files = MyFiles()
            files.make_directory("log")
            return files, "log"

Always true: the suite makes only calls of `seams.py`, and each test finds an empty directory. What a
crash leaves is not tested here: no call of the interface makes one.
"""

from __future__ import annotations

from typing import get_args

import pytest

from lowwater.engine.seams.seams import Files, SyncMode, write_all

# The files, and an empty directory in them.
Place = tuple[Files, str]


class FilesConformance:
    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError("a subclass says which files and which directory")

    def test_a_created_file_is_empty_and_has_a_name(self, place: Place) -> None:
        """The engine takes a file with bytes in it for one that an earlier run wrote."""
        files, directory = place
        file = files.open(f"{directory}/a", create=True)
        assert file.size() == 0
        assert file.read_at(0, 10) == b""
        assert files.list(directory) == ["a"]

    def test_create_refuses_a_name_that_is_taken(self, place: Place) -> None:
        """Creating over an existing segment would destroy it."""
        files, directory = place
        files.open(f"{directory}/a", create=True).write_at(0, [b"kept"])
        with pytest.raises(FileExistsError):
            files.open(f"{directory}/a", create=True)
        assert files.open(f"{directory}/a").read_at(0, 10) == b"kept"

    @pytest.mark.parametrize("write", [False, True])
    def test_open_refuses_a_file_that_is_missing(self, place: Place, write: bool) -> None:
        """A file that comes into being by being looked at would hide that it was lost."""
        files, directory = place
        with pytest.raises(FileNotFoundError):
            files.open(f"{directory}/a", write=write)
        assert files.list(directory) == []

    def test_nothing_works_in_a_directory_that_is_missing(self, place: Place) -> None:
        """A wrong path must not look like an empty log."""
        files, directory = place
        files.open(f"{directory}/a", create=True)
        with pytest.raises(FileNotFoundError):
            files.open(f"{directory}/missing/a", create=True)
        with pytest.raises(FileNotFoundError):
            files.list(f"{directory}/missing")
        with pytest.raises(FileNotFoundError):
            files.sync_directory(f"{directory}/missing")
        with pytest.raises(FileNotFoundError):
            files.lock(f"{directory}/missing/lock", "me")
        with pytest.raises(FileNotFoundError):
            files.rename(f"{directory}/a", f"{directory}/missing/a")
        assert files.list(directory) == ["a"]

    def test_a_read_is_short_only_at_the_end(self, place: Place) -> None:
        """Readers take a short read for the end of the file."""
        files, directory = place
        file = files.open(f"{directory}/a", create=True)
        file.write_at(0, [b"0123456789"])
        assert file.read_at(2, 5) == b"23456"
        assert file.read_at(8, 5) == b"89"
        assert file.read_at(10, 5) == b""
        assert file.read_at(1000, 5) == b""
        assert file.read_at(3, 0) == b""

    def test_a_write_lands_at_its_offset_and_nowhere_else(self, place: Place) -> None:
        """The log overwrites files that it has filled with zeros."""
        files, directory = place
        file = files.open(f"{directory}/a", create=True)
        file.write_at(0, [b"0123456789"])
        assert file.write_at(3, [b"ab", b"", b"c"]) == 3
        assert file.read_at(0, 100) == b"012abc6789"
        assert file.size() == 10

    def test_a_write_past_the_end_leaves_zeros_before_it(self, place: Place) -> None:
        """Zeros are how a scan knows that a frame was never written."""
        files, directory = place
        file = files.open(f"{directory}/a", create=True)
        file.write_at(0, [b"a"])
        file.write_at(5000, [b"b"])
        assert file.size() == 5001
        assert file.read_at(0, 6000) == b"a" + bytes(4999) + b"b"

    def test_writing_nothing_changes_nothing(self, place: Place) -> None:
        """Not even the size, wherever it points."""
        files, directory = place
        file = files.open(f"{directory}/a", create=True)
        assert file.write_at(100, []) == 0
        assert file.write_at(100, [b""]) == 0
        assert file.size() == 0

    def test_write_all_takes_more_buffers_than_one_call_does(self, place: Place) -> None:
        """A batch of small frames is thousands of buffers, and Linux takes 1,024 in a call."""
        files, directory = place
        file = files.open(f"{directory}/a", create=True)
        buffers = [b"%05d" % number for number in range(3000)]
        write_all(file, 7, buffers)
        assert file.read_at(7, 20_000) == b"".join(buffers)

    @pytest.mark.parametrize("mode", get_args(SyncMode))
    def test_parts_that_are_written_each_lie_one_behind_the_other(self, place: Place, mode: SyncMode) -> None:
        """Many or few, small or larger than what one call takes: a log is the batches in their order."""
        files, directory = place
        file = files.open(f"{directory}/a", create=True)
        held = bytearray()
        for sizes in ((5,), (4096, 4096), (1, 4095, 8192, 3), [700] * 50, (400_000,) * 4, (2_000_000, 9), ()):
            parts = [bytes([97 + number % 26]) * size for number, size in enumerate(sizes)]
            file.write_each(len(held), parts, mode)
            held += b"".join(parts)
            assert file.size() == len(held)
            assert file.read_at(0, len(held)) == held
        write_all(file, len(held), [b"the plain way"], mode)
        file.write_each(len(held) + 13, [b"and", b"each"], mode)
        assert file.read_at(len(held), 100) == b"the plain wayandeach"

    def test_write_each_is_refused_where_writes_are(self, place: Place) -> None:
        """To handles for reading, and to closed ones."""
        files, directory = place
        file = files.open(f"{directory}/a", create=True)
        file.write_each(0, [b"ke", b"pt"], "fdatasync")
        reader = files.open(f"{directory}/a")
        file.close()
        for refusing in (file, reader):
            with pytest.raises(OSError, match="Errno"):
                refusing.write_each(0, [b"lo", b"st"], "fdatasync")
        assert reader.read_at(0, 10) == b"kept"

    def test_truncate_cuts_and_extends_with_zeros(self, place: Place) -> None:
        """What was cut off must not come back when the file grows again."""
        files, directory = place
        file = files.open(f"{directory}/a", create=True)
        file.write_at(0, [b"0123456789"])
        file.truncate(4)
        assert file.size() == 4
        assert file.read_at(0, 100) == b"0123"
        file.truncate(8)
        assert file.size() == 8
        assert file.read_at(0, 100) == b"0123" + bytes(4)

    @pytest.mark.parametrize("mode", get_args(SyncMode))
    def test_sync_keeps_what_was_written(self, place: Place, mode: SyncMode) -> None:
        """Every mode is accepted, on handles for reading too: recovery syncs what it read."""
        files, directory = place
        file = files.open(f"{directory}/a", create=True)
        file.write_at(0, [b"kept"])
        file.sync(mode)
        files.open(f"{directory}/a").sync(mode)
        files.sync_directory(directory)
        assert file.read_at(0, 10) == b"kept"

    def test_all_handles_of_a_file_see_the_same_bytes(self, place: Place) -> None:
        """Readers follow the active file through handles of their own."""
        files, directory = place
        writer = files.open(f"{directory}/a", create=True)
        reader = files.open(f"{directory}/a")
        writer.write_at(0, [b"new"])
        assert reader.read_at(0, 10) == b"new"
        assert reader.size() == 3

    def test_a_handle_for_reading_refuses_to_write(self, place: Place) -> None:
        """Read-only tools must not be able to damage a log."""
        files, directory = place
        files.open(f"{directory}/a", create=True).write_at(0, [b"kept"])
        reader = files.open(f"{directory}/a")
        with pytest.raises(OSError, match="Errno"):
            reader.write_at(0, [b"lost"])
        with pytest.raises(OSError, match="Errno"):
            reader.truncate(0)
        assert reader.read_at(0, 10) == b"kept"

    def test_a_closed_handle_refuses_everything_but_close(self, place: Place) -> None:
        """A number of a closed file may belong to another one by now."""
        files, directory = place
        file = files.open(f"{directory}/a", create=True)
        file.close()
        file.close()
        with pytest.raises(OSError, match="Errno"):
            file.read_at(0, 1)
        with pytest.raises(OSError, match="Errno"):
            file.write_at(0, [b"lost"])
        with pytest.raises(OSError, match="Errno"):
            file.sync("fdatasync")
        with pytest.raises(OSError, match="Errno"):
            file.size()

    def test_rename_replaces_and_open_handles_go_on(self, place: Place) -> None:
        """The writer renames its file while readers, and it itself, have it open."""
        files, directory = place
        old = files.open(f"{directory}/old", create=True)
        new = files.open(f"{directory}/new", create=True)
        old.write_at(0, [b"from old"])
        new.write_at(0, [b"from new"])
        files.rename(f"{directory}/old", f"{directory}/new")
        assert files.list(directory) == ["new"]
        assert files.open(f"{directory}/new").read_at(0, 10) == b"from old"
        assert new.read_at(0, 10) == b"from new"
        old.write_at(0, [b"FROM"])
        assert files.open(f"{directory}/new").read_at(0, 10) == b"FROM old"

    def test_rename_does_not_replace_a_directory(self, place: Place) -> None:
        """The files in it would be gone."""
        files, directory = place
        files.make_directory(f"{directory}/x")
        files.open(f"{directory}/a", create=True)
        with pytest.raises(IsADirectoryError):
            files.rename(f"{directory}/a", f"{directory}/x")
        assert files.list(directory) == ["a", "x"]

    def test_a_link_is_a_second_name_of_one_file(self, place: Place) -> None:
        """A store writes under one name and shows the whole object under another."""
        files, directory = place
        file = files.open(f"{directory}/a", create=True)
        file.write_at(0, [b"one"])
        files.make_directory(f"{directory}/x")
        files.link(f"{directory}/a", f"{directory}/x/b")
        file.write_at(0, [b"two"])
        assert files.open(f"{directory}/x/b").read_at(0, 10) == b"two"
        files.remove(f"{directory}/a")
        assert files.list(f"{directory}/x") == ["b"]
        assert files.open(f"{directory}/x/b").read_at(0, 10) == b"two"

    def test_a_link_replaces_nothing(self, place: Place) -> None:
        """Who comes second learns it, and what is there stays."""
        files, directory = place
        files.open(f"{directory}/a", create=True)
        files.open(f"{directory}/b", create=True).write_at(0, [b"kept"])
        files.make_directory(f"{directory}/x")
        for taken in ("b", "x"):
            with pytest.raises(FileExistsError):
                files.link(f"{directory}/a", f"{directory}/{taken}")
        with pytest.raises(FileNotFoundError):
            files.link(f"{directory}/missing", f"{directory}/c")
        with pytest.raises(FileNotFoundError):
            files.link(f"{directory}/a", f"{directory}/missing/c")
        assert files.open(f"{directory}/b").read_at(0, 10) == b"kept"

    def test_a_missing_file_can_be_neither_renamed_nor_removed(self, place: Place) -> None:
        """And the target of the rename stays."""
        files, directory = place
        files.open(f"{directory}/a", create=True)
        with pytest.raises(FileNotFoundError):
            files.rename(f"{directory}/missing", f"{directory}/a")
        with pytest.raises(FileNotFoundError):
            files.remove(f"{directory}/missing")
        assert files.list(directory) == ["a"]

    def test_a_removed_file_stays_readable_for_those_who_have_it_open(self, place: Place) -> None:
        """Segments are purged under slow readers."""
        files, directory = place
        file = files.open(f"{directory}/a", create=True)
        file.write_at(0, [b"old"])
        files.remove(f"{directory}/a")
        assert files.list(directory) == []
        files.open(f"{directory}/a", create=True).write_at(0, [b"new"])
        assert file.read_at(0, 10) == b"old"

    def test_list_is_sorted_and_does_not_look_into_directories(self, place: Place) -> None:
        """Names of segments sort by their first seq; the list of segments is this list."""
        files, directory = place
        files.make_directory(f"{directory}/m")
        for name in ("b", "a10", "m/inside", "a9", "z"):
            files.open(f"{directory}/{name}", create=True)
        assert files.list(directory) == ["a10", "a9", "b", "m", "z"]
        assert files.list(f"{directory}/m") == ["inside"]

    def test_make_directory_makes_parents_and_can_be_repeated(self, place: Place) -> None:
        """Opening a log that is there already makes its directory again."""
        files, directory = place
        files.make_directory(f"{directory}/x/y")
        files.open(f"{directory}/x/y/a", create=True)
        files.make_directory(f"{directory}/x/y")
        assert files.list(f"{directory}/x/y") == ["a"]
        with pytest.raises(FileExistsError):
            files.make_directory(f"{directory}/x/y/a")

    def test_there_is_room_where_a_directory_is(self, place: Place) -> None:
        """Writes are refused before the disk is full, by what this says."""
        files, directory = place
        assert files.room(directory) > 0
        with pytest.raises(FileNotFoundError):
            files.room(f"{directory}/missing")

    def test_a_lock_excludes_others_until_it_is_closed(self, place: Place) -> None:
        """Two writers in one directory would destroy the log."""
        files, directory = place
        lock = files.lock(f"{directory}/lock", "the first")
        for _ in range(2):
            with pytest.raises(BlockingIOError):
                files.lock(f"{directory}/lock", "the second")
        lock.close()
        files.lock(f"{directory}/lock", "the third").close()

    def test_a_lock_names_its_owner(self, place: Place) -> None:
        """The error of the one who is refused says who has it; being refused changes nothing."""
        files, directory = place
        files.lock(f"{directory}/lock", "a long name").close()
        lock = files.lock(f"{directory}/lock", "short")
        with pytest.raises(BlockingIOError):
            files.lock(f"{directory}/lock", "another")
        assert files.open(f"{directory}/lock").read_at(0, 100) == b"short"
        lock.close()

    def test_a_lock_outlives_other_handles_of_its_file(self, place: Place) -> None:
        """Whoever looks up the owner closes the file again; with POSIX locks that would end the lock."""
        files, directory = place
        lock = files.lock(f"{directory}/lock", "me")
        files.open(f"{directory}/lock").close()
        with pytest.raises(BlockingIOError):
            files.lock(f"{directory}/lock", "another")
        lock.close()
