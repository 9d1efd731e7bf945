"""What the frames of a log make of sessions: nothing else is needed to have them as of any seq.

Always true: who applies all frames of a log, in order, has the sessions that every replica has.
"""

from __future__ import annotations

from lowwater.engine.format import format
from lowwater.engine.format.entries import decode_body, decode_payload
from lowwater.engine.format.format import Flag, Kind
from lowwater.engine.format.request_id import request_of_word
from lowwater.engine.state.sessions import SESSION_KINDS, Sessions


def apply_session_frame(sessions: Sessions, seq: int, payload: bytes) -> None:
    """Any frame, also one that does nothing here, and one that was applied before, as redo does."""
    flags = payload[1] | payload[2] << 8
    if flags & Flag.SESSION:
        _take(sessions, seq, payload, flags)
    if payload[0] not in SESSION_KINDS or flags & Flag.REFUSED:
        return
    entry = decode_payload(seq, payload)
    body = decode_body(entry)
    if payload[0] == Kind.SESSION_KEEP:
        sessions.keep(seq, entry.time_us, body["session"])
    elif payload[0] == Kind.SESSION_CLOSE:
        sessions.close(body["session"])
    else:
        # Where redo opens one that is stored as closed, the entry that closed it follows.
        sessions.open(seq, entry.time_us, body["ttl_us"])


def _take(sessions: Sessions, seq: int, payload: bytes, flags: int) -> None:
    """A request of a session, whatever became of it."""
    extras, _ = format.decode_extras(flags, payload, format.FIXED_BYTES, len(payload))
    assert extras.session is not None
    code = format.U16.unpack(payload[-format.U16.size :])[0] if flags & Flag.REFUSED else 0
    time_us = format.FIXED.unpack_from(payload)[5]
    sessions.take(seq, time_us, request_of_word(extras.session, extras.request), code)
