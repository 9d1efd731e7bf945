"""Cutting appended entries into pieces: runs of frames that lie in one segment and fit into one batch.

Always true:
  - `cut` changes nothing: it returns the pieces and the chain after them, or raises before anything happened;
  - pieces depend on the chain and the entries; how entries were batched changes where pieces end, never
    a byte of a segment;
  - a group is never divided.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from lowwater.engine.format import format
from lowwater.engine.format.entries import Entry, decode_payload
from lowwater.engine.format.fast import put_frames
from lowwater.engine.format.format import FRAME_BYTES, Flag, Kind, SegmentHeader
from lowwater.engine.log.chain import FIRST_CONTROL_KIND, IDLE_KINDS, Chain, enter, leave
from lowwater.errors import Corrupt, InvalidEntry

_pack_u64 = format.U64.pack


class Piece:
    """A run of frames, ready to be written at `offset` of its segment."""

    __slots__ = (
        "completes", "data", "ends_segment", "frame_count", "frames", "has_news", "offset", "owner",
        "positions", "seq_before", "seq_first", "seq_last", "starts_segment", "time_us",
    )  # fmt: skip

    def __init__(
        self,
        data: bytes,
        *,
        offset: int,
        positions: array[int],
        seq_before: int,
        seq_first: int,
        seq_last: int,
        time_us: int,
        starts_segment: Chain | None,
        ends_segment: bool,
        frames: list[bytes] | None = None,
    ) -> None:
        self.data = data
        # Each frame by itself, where somebody keeps them.
        self.frames = frames
        self.offset = offset
        self.positions = positions
        self.frame_count = len(positions)
        self.seq_before = seq_before
        self.seq_first = seq_first
        self.seq_last = seq_last
        self.time_us = time_us
        # The chain as the segment's header tells it, when this piece is the first of its segment.
        self.starts_segment = starts_segment
        self.ends_segment = ends_segment
        # Whose append this is a piece of, and whether it is the last piece of it.
        self.owner: Any = None
        self.completes = False
        self.has_news = True


def frames_of(pieces: Sequence[Piece]) -> list[bytes]:
    """Each frame of the pieces."""
    if len(pieces) == 1 and (found := pieces[0].frames) is not None:
        return found
    frames: list[bytes] = []
    for piece in pieces:
        if piece.frames is not None:
            frames += piece.frames
            continue
        data, offset = piece.data, piece.offset
        starts = [position - offset for position in piece.positions]
        frames += [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
    return frames


def places_of(pieces: Sequence[Piece], chain_before: Chain) -> Iterator[tuple[int, int]]:
    """Yield the first seq of its segment and its offset for each frame of the pieces. The pieces follow
    `chain_before`."""
    segment_first = chain_before.seq_first
    for piece in pieces:
        if piece.starts_segment is not None:
            segment_first = piece.seq_first
        for position in piece.positions:
            yield segment_first, position


def raise_times(payloads: Sequence[bytes], time_us: int) -> Sequence[bytes]:
    """The payloads with each time raised to the one before it where it is lower."""
    raised = []
    for payload in payloads:
        own_time_us = int.from_bytes(payload[format.TIME_SLICE], "little")
        if own_time_us < time_us:
            payload = payload[:9] + _pack_u64(time_us) + payload[17:]
        else:
            time_us = own_time_us
        raised.append(payload)
    return raised


def cut(
    chain: Chain,
    seqs: Sequence[int],
    payloads: Sequence[bytes],
    sizes: list[int],
    *,
    batch_bytes_max: int,
    alike: bool = False,
) -> tuple[list[Piece], Chain]:
    """The pieces of `payloads`, whose lengths are `sizes` and whose seqs are known to rise, and the chain
    after them. Those that are `alike` are puts of one time without flags, and each frame will be wanted."""
    if len(payloads) == 1:
        alone = cut_alone(chain, seqs[0], payloads[0], batch_bytes_max)
        if alone is not None:
            return [alone[0]], alone[1]
    frames_bytes = sum(sizes) + FRAME_BYTES * len(sizes)
    plain = True
    # Everything before `origin`: most payloads of a batch have it in common.
    heads = {payload[:17] for payload in (payloads[:1] if alike else payloads)}
    times = {head[format.TIME_SLICE] for head in heads}
    if len(times) > 1 or int.from_bytes(next(iter(times)), "little") < chain.time_us:
        payloads = raise_times(payloads, chain.time_us)
    for head in heads:
        kind, flags = head[0], head[1] | head[2] << 8
        if format.KIND_NAMES[kind] is None or flags & ~format.FLAGS_KNOWN:
            raise InvalidEntry(f"entries of kind {kind} with flags {flags:#x} do not exist")
        if kind == Kind.APPEND and not flags & (Flag.STREAM_OFFSET | Flag.REFUSED):
            raise InvalidEntry("a message needs its offset in its stream")
        if kind >= FIRST_CONTROL_KIND or flags & Flag.GROUP:
            plain = False
    if (
        plain
        and chain.body_bytes
        and frames_bytes <= batch_bytes_max
        and chain.body_bytes + frames_bytes < chain.settings.segment_bytes
    ):
        return _cut_one(chain, seqs, payloads, sizes, by_frame=alike)
    return _cut_each(chain, seqs, payloads, sizes, batch_bytes_max)


def cut_alone(chain: Chain, seq: int, payload: bytes, batch_bytes_max: int) -> tuple[Piece, Chain] | None:
    """What `cut` gives for an entry that neither begins nor ends anything, and keeps its time; None for all
    others."""
    seq_before, time_before_us, cluster_id, epoch, settings, offset, seq_first, creation = chain
    time_us = int.from_bytes(payload[format.TIME_SLICE], "little")
    size = len(payload)
    body_bytes = offset + FRAME_BYTES + size
    if (
        payload[:3] not in _MERE_KINDS
        or time_us < time_before_us
        or not offset
        or FRAME_BYTES + size > batch_bytes_max
        or body_bytes >= settings.segment_bytes
    ):
        return None
    data = format.encode_frames((seq,), (payload,), (size,))
    piece = Piece(
        data,
        offset=offset,
        positions=array("I", (offset,)),
        seq_before=seq_before,
        seq_first=seq,
        seq_last=seq,
        time_us=time_us,
        starts_segment=None,
        ends_segment=False,
    )
    # The same as _replace, which is ten times as slow.
    return piece, Chain(seq, time_us, cluster_id, epoch, settings, body_bytes, seq_first, creation)


def cut_puts(
    chain: Chain,
    pairs: list[tuple[str, bytes]],
    prefix: bytes,
    time_us: int,
    *,
    batch_bytes_max: int,
    entry_bytes_max: int,
) -> tuple[Piece, Chain, list[bytes]] | None:
    """What encoding and cutting puts of these pairs gives, and their keys in pages, in one go; None where
    there is something unusual about them, or they begin or end anything."""
    seq_before, offset = chain.seq_last, chain.body_bytes
    if not offset or seq_before == format.SEQ_MAX:
        return None
    bytes_max = min(batch_bytes_max, chain.settings.segment_bytes - offset - 1)
    made = put_frames(pairs, prefix, seq_before + 1, time_us, offset, bytes_max, entry_bytes_max)
    if made is None:
        return None
    keys, frames, data, places = made
    seq_last = seq_before + len(keys)
    piece, after = _in_midst(chain, data, frames, array("I", places), seq_before + 1, seq_last, time_us)
    return piece, after, keys


_MERE_KINDS = frozenset(bytes((kind, 0, 0)) for kind in (Kind.PUT, Kind.DELETE))


def _cut_one(
    chain: Chain, seqs: Sequence[int], payloads: Sequence[bytes], sizes: list[int], *, by_frame: bool = False
) -> tuple[list[Piece], Chain]:
    """The common case: entries that neither begin nor end anything."""
    frames = format.encode_each_frame(seqs, payloads, sizes) if by_frame else None
    data = b"".join(frames) if frames is not None else format.encode_frames(seqs, payloads, sizes)
    positions = _positions(chain.body_bytes, sizes)
    positions.pop()
    time_us = int.from_bytes(payloads[-1][format.TIME_SLICE], "little")
    piece, after = _in_midst(chain, data, frames, positions, seqs[0], seqs[-1], time_us)
    return [piece], after


def _in_midst(
    chain: Chain,
    data: bytes,
    frames: list[bytes] | None,
    positions: array[int],
    seq_first: int,
    seq_last: int,
    time_us: int,
) -> tuple[Piece, Chain]:
    """A piece that neither begins nor ends its segment, and the chain after it."""
    piece = Piece(
        data,
        offset=chain.body_bytes,
        positions=positions,
        seq_before=chain.seq_last,
        seq_first=seq_first,
        seq_last=seq_last,
        time_us=time_us,
        starts_segment=None,
        ends_segment=False,
        frames=frames,
    )
    # The same as _replace, which is ten times as slow.
    after = Chain(
        seq_last,
        time_us,
        chain.cluster_id,
        chain.epoch,
        chain.settings,
        chain.body_bytes + len(data),
        chain.seq_first,
        chain.creation,
    )
    return piece, after


def _positions(offset: int, sizes: list[int]) -> array[int]:
    """Where frames with payloads of these sizes begin, and where the last of them ends."""
    # From a list, because an array grows by single items from anything else.
    return array("I", [*accumulate(map(FRAME_BYTES.__add__, sizes), initial=offset)])


def _cut_each(
    chain: Chain, seqs: Sequence[int], payloads: Sequence[bytes], sizes: list[int], batch_bytes_max: int
) -> tuple[list[Piece], Chain]:
    pieces: list[Piece] = []
    run_start = 0
    before_run = chain
    starts_segment: Chain | None = None
    walk = GroupWalk()

    def end_run(stop: int, after: Chain, ends_segment: bool) -> None:
        nonlocal run_start, before_run, starts_segment
        offset = before_run.body_bytes or format.HEADER_BYTES
        run_sizes = sizes[run_start:stop]
        positions = _positions(offset, run_sizes)
        positions.pop()
        pieces.append(
            Piece(
                format.encode_frames(seqs[run_start:stop], payloads[run_start:stop], run_sizes),
                offset=offset,
                positions=positions,
                seq_before=before_run.seq_last,
                seq_first=seqs[run_start],
                seq_last=seqs[stop - 1],
                time_us=after.time_us,
                starts_segment=starts_segment,
                ends_segment=ends_segment,
            )
        )
        pieces[-1].has_news = any(payload[0] not in IDLE_KINDS for payload in payloads[run_start:stop])
        run_start, before_run, starts_segment = stop, after, None

    run_bytes = group_start_bytes = 0
    for index, (seq, payload) in enumerate(zip(seqs, payloads, strict=True)):
        frame_bytes = FRAME_BYTES + sizes[index]
        group_started = walk.in_group
        # A group gets a piece of its own, or the two together might not fit into a batch.
        full = payload[1] & Flag.GROUP or run_bytes + frame_bytes > batch_bytes_max
        if full and index > run_start and not group_started:
            end_run(index, chain, ends_segment=False)
            run_bytes = 0
        chain, entered, ends_segment = step(chain, seq, payload, frame_bytes, walk)
        if entered is not None:
            starts_segment = entered
        run_bytes += frame_bytes
        group_start_bytes = group_start_bytes + frame_bytes if group_started else frame_bytes
        if group_start_bytes > format.BATCH_BYTES_MAX:
            raise InvalidEntry(
                f"this group has more than {format.BATCH_BYTES_MAX:,} bytes",
                hint="a group is written at once: divide it",
            )
        if ends_segment:
            end_run(index + 1, chain, ends_segment=True)
            run_bytes = 0
    if walk.in_group:
        raise InvalidEntry("a group is not complete", hint="append all entries of a group in one call")
    if run_start < len(payloads):
        end_run(len(payloads), chain, ends_segment=False)
    return pieces, chain


class GroupWalk:
    """Follows groups from frame to frame: `in_group` is true between a group's first frame and its last."""

    __slots__ = ("seq_last",)

    def __init__(self) -> None:
        self.seq_last = 0

    @property
    def in_group(self) -> bool:
        return self.seq_last != 0

    def enter(self, seq: int, kind: int, flags: int, payload: bytes) -> None:
        """Count a frame in. Raises InvalidEntry where it breaks the group that it is in."""
        if not flags & Flag.GROUP:
            if self.seq_last:
                raise InvalidEntry("a group is interrupted by another entry", seq=seq)
            return
        offset = format.FIXED_BYTES + (16 if flags & Flag.TXN else 0)
        group_seq_last = int.from_bytes(payload[offset : offset + 8], "little")
        if kind >= FIRST_CONTROL_KIND:
            raise InvalidEntry("a control entry cannot be part of a group", seq=seq)
        if self.seq_last not in (0, group_seq_last) or seq > group_seq_last:
            raise InvalidEntry("a group's last seq does not fit its entries", seq=seq)
        self.seq_last = 0 if seq == group_seq_last else group_seq_last


def step(
    chain: Chain,
    seq: int,
    payload: bytes,
    frame_bytes: int,
    walk: GroupWalk,
    header: SegmentHeader | None = None,
) -> tuple[Chain, Chain | None, bool]:
    """One frame into the chain: (chain after it, the chain for the header if it begins a segment, whether
    it ends its segment). Writer, recovery and check all decide by this; who reads gives the header."""
    kind = payload[0]
    flags = payload[1] | payload[2] << 8
    walk.enter(seq, kind, flags, payload)
    entry: Entry | None = None
    if kind in _DECODED_KINDS and not flags & Flag.REFUSED:
        entry = decode_payload(seq, payload)
    if chain.is_empty or kind >= FIRST_CONTROL_KIND:
        chain = enter(chain, kind, flags, entry, header)
    entered = None
    if not chain.body_bytes:
        entered = chain
        chain = chain._replace(body_bytes=format.HEADER_BYTES, seq_first=seq)
    time_us = int.from_bytes(payload[format.TIME_SLICE], "little")
    if time_us < chain.time_us:
        raise Corrupt("the time of an entry lies before that of the entry before it", seq=seq)
    chain = chain._replace(seq_last=seq, time_us=time_us, body_bytes=chain.body_bytes + frame_bytes)
    chain, ends_segment = leave(chain, kind, flags, entry, in_group=walk.in_group)
    return chain, entered, ends_segment


_DECODED_KINDS = frozenset({Kind.CREATE, Kind.FORK, Kind.SETTINGS})
