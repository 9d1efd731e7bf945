"""engine/database/listing.py: pages of keys and prefixes, held to what S3 says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import lowwater
from lowwater.engine.database.database import Database
from lowwater.engine.format.records import Page
from lowwater.errors import Conflict

Listed = tuple[list[str], list[str]]
ListPage = Callable[..., Page]

_numbers = count()


@st.composite
def listings(draw: st.DrawFn) -> tuple[list[str], list[str], str, str | None, str | None, int]:
    """Keys before and after a change, and what to list. Few characters: so texts overlap in every way."""
    alphabet = draw(st.sampled_from(["a/", "a/b", "/", "-/", "aü/", "/\U0010ffff", "0/\0", "ab"]))
    texts = st.text(alphabet, max_size=5)
    keys = st.lists(st.text(alphabet, min_size=1, max_size=6), max_size=12, unique=True)
    delimiter = draw(st.none() | st.text(alphabet, max_size=3))
    return draw(keys), draw(keys), draw(texts), delimiter, draw(st.none() | texts), draw(st.integers(1, 5))


def listed_by_s3(
    keys: list[str], prefix: str, delimiter: str | None, start_after: str | None = None
) -> Listed:
    """Keys above `start_after`; of those with the delimiter in what follows the prefix, what ends with it."""
    objects: list[str] = []
    prefixes: list[str] = []
    for key in sorted(keys):
        if not key.startswith(prefix) or (start_after is not None and key <= start_after):
            continue
        before, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        if not found:
            objects.append(key)
        elif prefix + before + found not in [*prefixes[-1:], start_after]:
            prefixes.append(prefix + before + found)
    return objects, prefixes


def all_pages(
    list_page: ListPage, prefix: str, delimiter: str | None, start_after: str | None, limit: int
) -> Listed:
    objects: list[str] = []
    prefixes: list[str] = []
    while True:
        page = list_page(prefix, delimiter, start_after, limit)
        count_of_page = len(page.objects) + len(page.prefixes)
        assert count_of_page == limit if page.next is not None else count_of_page <= limit
        objects += [each.key for each in page.objects]
        prefixes += page.prefixes
        if page.next is None:
            return objects, prefixes
        assert start_after is None or page.next > start_after
        start_after = page.next


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with lowwater.open(tmp_path_factory.mktemp("listing") / "data") as opened:
        yield opened


# A delimiter that overlaps the prefix: "a//" holds none after it, and yet ends with one.
@example((["a//", "a//b", "a//c"], [], "a/", "//", None, 1))
@example((["aaa", "aaaa", "aaaab"], ["aaa"], "a", "aa", None, 1))
@given(listings())
def test_listings_are_those_of_s3(
    db: Database, case: tuple[list[str], list[str], str, str | None, str | None, int]
) -> None:
    """Whoever goes from page to page meets each key once, now, as of a seq, and inside a transaction, where
    what it has written itself counts too."""
    before, after, prefix, delimiter, start_after, limit = case
    bucket = f"bucket-{next(_numbers)}"
    db.create_bucket(bucket)
    if before:
        db.put_many(bucket, [(key, b"v") for key in before])
    seq = db.snapshot(bucket)

    def at_seq(*args: object) -> Page:
        return db.list(bucket, *args, at=seq)  # type: ignore[arg-type]

    def check(list_page: ListPage, keys: list[str]) -> None:
        expected = listed_by_s3(keys, prefix, delimiter, start_after)
        assert all_pages(list_page, prefix, delimiter, start_after, limit) == expected
        assert all_pages(list_page, prefix, delimiter, start_after, 1000) == expected

    def now(*args: object) -> Page:
        return db.list(bucket, *args)  # type: ignore[arg-type]

    check(now, before)
    with db.transaction() as txn:
        for key in set(before) - set(after):
            txn.delete(bucket, key)
        for key in after:
            txn.put(bucket, key, b"w")
        check(lambda *args: txn.list(bucket, *args), after)
        check(now, before)
    check(now, after)
    check(at_seq, before)
    db.drop_snapshot(bucket)


def test_a_listing_in_a_transaction_counts_as_read(db: Database) -> None:
    """Else two that each see no key of a prefix would both write one."""
    bucket = f"bucket-{next(_numbers)}"
    db.create_bucket(bucket)
    txn = db.transaction("serializable")
    assert txn.list(bucket, "room/").objects == []
    txn.put(bucket, "mine", b"1")
    db.put(bucket, "room/1", b"2")
    with pytest.raises(Conflict):
        txn.commit()
