"""The small objects of an archive: whose it is, who claims to write, what counts, and the catalogue as of an
entry.

Always true:
  - each is canonical CBOR, a map whose `lowwater` says what it is, and whose `version` is checked before
    anything else is looked at: what is not known is newer, never corrupt;
  - each is known by a hash: that in its name, or its own, where the name has none;
  - a manifest is a function of the log: whoever publishes it writes the same bytes under the same name.

`docs/ARCHIVE.md` has the tables for people; a test ties the two. This module knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import cbor2

from lowwater.engine.format import format
from lowwater.engine.format.blocks import hash_of
from lowwater.engine.log.chain import CLUSTER_ID_BYTES
from lowwater.engine.state.catalogue import Catalogue, ListHead
from lowwater.errors import Corrupt, NewerVersion, NotLowwater
from lowwater.tiering.names import HASH_DIGITS, Type, epoch_name, manifest_name, parse, place_of

VERSION = 1
NONCE_BYTES = 16

FIELDS = {
    "archive": ("lowwater", "version", "cluster_id", "parent", "hash"),
    "epoch": (
        "lowwater", "version", "cluster_id", "epoch", "parent_epoch", "parent_manifest", "nonce", "owner",
    ),
    "state": ("lowwater", "version", "cluster_id", "number", "epoch", "claim", "manifest", "hash"),
    "manifest": (
        "lowwater", "version", "cluster_id", "epoch", "seq", "hwm", "segments", "checkpoints", "forks",
    ),
}  # fmt: skip

# What is there where it says something.
OPTIONAL = {"archive": {"parent"}}

HINT = "`lowwater scrub` says what else is damaged: restore this object from another copy of the archive"


def _encode(what: str, body: dict[str, Any]) -> bytes:
    body = {"lowwater": what, "version": VERSION, **body}
    assert _has_fields(what, body)
    data: bytes = cbor2.dumps(body, canonical=True)
    return data


def _encode_hashed(what: str, body: dict[str, Any]) -> bytes:
    """With the hash of all other fields."""
    hashed = {"lowwater": what, "version": VERSION, **body}
    return _encode(what, {**body, "hash": hash_of(cbor2.dumps(hashed, canonical=True))})


def _has_fields(what: str, body: dict[str, Any]) -> bool:
    return set(FIELDS[what]) - OPTIONAL.get(what, set()) <= body.keys() <= set(FIELDS[what])


def _decode(what: str, data: bytes) -> dict[str, Any]:
    try:
        body = cbor2.loads(data)
    except Exception as error:  # cbor2 raises whatever its decoding of hostile bytes runs into
        raise Corrupt(f"this {what} is not CBOR", hint=HINT) from error
    if not isinstance(body, dict) or body.get("lowwater") != what:
        raise NotLowwater(f"there is no {what} here", hint="check the name")
    version = body.get("version")
    if type(version) is int and version > VERSION:
        raise NewerVersion(f"this {what} has version {version}; this Lowwater reads up to {VERSION}")
    if version != VERSION or not _has_fields(what, body):
        raise Corrupt(f"this {what} has not the fields that it should have", hint=HINT)
    return body


def _number(body: dict[str, Any], name: str, least: int = 0) -> int:
    value = body[name]
    if type(value) is not int or not least <= value <= format.SEQ_MAX:
        raise Corrupt(f"{name} is no number in range", hint=HINT)
    return value


def _bytes(body: dict[str, Any], name: str, size: int) -> bytes:
    value = body[name]
    if type(value) is not bytes or len(value) != size:
        raise Corrupt(f"{name} has not {size} bytes", hint=HINT)
    return value


# ---------------------------------------------------------------------------- cluster.cbor


class Parent(NamedTuple):
    """The archive that a clone was made of, which has the clone's history up to the entry `seq`. `options` of
    its store say where it is, and hold no secret."""

    uri: str
    options: Mapping[str, str]
    cluster_id: bytes
    seq: int


class Cluster(NamedTuple):
    """Whose an archive is."""

    cluster_id: bytes
    parent: Parent | None = None


def encode_cluster(cluster_id: bytes, parent: Parent | None = None) -> bytes:
    body: dict[str, Any] = {"cluster_id": cluster_id}
    if parent is not None:
        body["parent"] = {**parent._asdict(), "options": dict(parent.options)}
    return _encode_hashed("archive", body)


def decode_cluster(data: bytes) -> Cluster:
    body = _decode("archive", data)
    cluster = Cluster(_bytes(body, "cluster_id", CLUSTER_ID_BYTES), _parent_of(body))
    if encode_cluster(*cluster) != data:
        raise Corrupt("the hash of this archive's cluster id does not match", hint=HINT)
    return cluster


def _parent_of(body: dict[str, Any]) -> Parent | None:
    if "parent" not in body:
        return None
    try:
        fields = body["parent"]
        parent = Parent(**fields)
        texts = [parent.uri, *parent.options, *parent.options.values()]
        if any(type(text) is not str for text in texts):
            raise ValueError("no text")
    except (TypeError, ValueError, AttributeError) as error:
        raise Corrupt("what this archive says of its parent cannot be read", hint=HINT) from error
    _bytes(fields, "cluster_id", CLUSTER_ID_BYTES)
    _number(fields, "seq")
    return parent


# ---------------------------------------------------------------------------- epochs


class EpochClaim(NamedTuple):
    """Who is going to write in an epoch: it follows a manifest of its parent's, zeros for none. `nonce` makes
    it another object than any other claim; `owner` is for people."""

    cluster_id: bytes
    epoch: int
    parent_epoch: int
    parent_manifest: bytes
    nonce: bytes
    owner: str

    def encode(self) -> bytes:
        return _encode("epoch", self._asdict())

    @property
    def name(self) -> str:
        return epoch_name(self.epoch, hash_of(self.encode()))


def decode_epoch(data: bytes) -> EpochClaim:
    body = _decode("epoch", data)
    owner = body["owner"]
    if type(owner) is not str:
        raise Corrupt("owner is no text", hint=HINT)
    return EpochClaim(
        _bytes(body, "cluster_id", CLUSTER_ID_BYTES),
        _number(body, "epoch", 1),
        _number(body, "parent_epoch", 1),
        _bytes(body, "parent_manifest", 32),
        _bytes(body, "nonce", NONCE_BYTES),
        owner,
    )


# ---------------------------------------------------------------------------- states


class ArchiveState(NamedTuple):
    """What an archive has come to: the highest epoch that was claimed, the name of its claim, and that of the
    newest manifest that counts; empty where there is none."""

    cluster_id: bytes
    number: int
    epoch: int
    claim: str
    manifest: str

    def encode(self) -> bytes:
        return _encode_hashed("state", self._asdict())

    @property
    def place(self) -> tuple[int, int]:
        """Return the epoch and the entry of the manifest."""
        return place_of(self.manifest)


def decode_state(data: bytes) -> ArchiveState:
    body = _decode("state", data)
    state = ArchiveState(
        _bytes(body, "cluster_id", CLUSTER_ID_BYTES),
        _number(body, "number", 1),
        _number(body, "epoch", 1),
        _name(body, "claim", "epoch"),
        _name(body, "manifest", "manifest"),
    )
    if state.encode() != data:
        raise Corrupt("the hash of this state does not match", hint=HINT)
    return state


def _name(body: dict[str, Any], field: str, kind: Type) -> str:
    value = body[field]
    found = parse(value) if type(value) is str else None
    if value != "" and (found is None or found.type != kind):
        raise Corrupt(f"{field} names no {kind}", hint=HINT)
    return str(value)


# ---------------------------------------------------------------------------- manifests


class Manifest(NamedTuple):
    """The catalogue as of the entry that caused it: the heads of its lists."""

    cluster_id: bytes
    epoch: int
    seq: int
    hwm: int
    heads: dict[str, ListHead]

    def encode(self) -> bytes:
        lists = {name: head.to_body() for name, head in self.heads.items()}
        fields = {"cluster_id": self.cluster_id, "epoch": self.epoch, "seq": self.seq, "hwm": self.hwm}
        return _encode("manifest", {**fields, **lists})

    @property
    def hash(self) -> bytes:
        return hash_of(self.encode())

    @property
    def name(self) -> str:
        return manifest_name(self.epoch, self.seq, self.hash)

    def body(self) -> dict[str, Any]:
        return {name: head.to_body() for name, head in self.heads.items()}


def manifest_of(catalogue: Catalogue, cluster_id: bytes, seq: int) -> Manifest:
    """The manifest of the entry `seq`, now or later: what came after it is not in it."""
    return Manifest(cluster_id, catalogue.epoch_at(seq), seq, catalogue.hwm_at(seq), catalogue.heads(seq))


def decode_manifest(data: bytes) -> Manifest:
    body = _decode("manifest", data)
    heads = {}
    for name in ("segments", "checkpoints", "forks"):
        heads[name] = ListHead.from_body(body[name])
    return Manifest(
        _bytes(body, "cluster_id", CLUSTER_ID_BYTES),
        _number(body, "epoch", 1),
        _number(body, "seq", 1),
        _number(body, "hwm"),
        heads,
    )


def require_hash(data: bytes, expected: str, what: str) -> None:
    """Raise Corrupt unless these bytes are what a name says. `expected` is the beginning of their hash."""
    digits = hash_of(data).hex()
    assert len(expected) >= HASH_DIGITS
    if digits[: len(expected)] != expected:
        raise Corrupt(f"the hash of this {what} does not match its name", hint=HINT)
