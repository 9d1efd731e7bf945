"""A directory without a database, where the archive has the history of one.

Always true: who is refused finds nothing made; who has it restored gets what `lowwater.restore` makes, which
goes on where it was stopped, and never writes anything over.
"""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Literal, get_args
from urllib.parse import urlencode

from lowwater.engine.database.opening import Settings
from lowwater.engine.database.origin import RESTORING, Origin, read_origin
from lowwater.engine.log.recover import has_begun
from lowwater.engine.seams.real import RealFiles
from lowwater.errors import AlreadyExists, DatabaseMissing, InvalidConfig
from lowwater.logging import get_logger
from lowwater.recovery.arguments import ConfigSource, place_options
from lowwater.tiering.beginning import ArchivePlace, places_of

if TYPE_CHECKING:
    from lowwater.config import Config, TierConfig

OnMissing = Literal["refuse", "restore"]

_logger = get_logger("recovery")


def require_known(on_missing: object) -> None:
    if on_missing not in get_args(OnMissing):
        raise InvalidConfig(f"on_missing is {on_missing!r:.80}", hint="give refuse or restore")


def half_restored(settings: Settings, config: TierConfig, tier: str | None) -> Origin | None:
    """What a restore has begun here. Raises where there is no database, and nothing to restore one from."""
    begun = read_origin(RealFiles(), settings.path, RESTORING)
    named = tier or config.store_uri()
    if begun is None and named is None and not has_begun(RealFiles(), settings.log_path):
        raise InvalidConfig(
            "there is no database here, and no archive is named that it could be restored from",
            path=settings.path,
            hint="give tier=, or set tier.uri in the configuration",
        )
    return begun


def restore_here(settings: Settings, uri: str, config: Config) -> Origin:
    """Restore the newest state of an archive, or go on with that: what was made."""
    from lowwater.recovery.restore import restore

    try:
        done = restore(uri, settings.path, config=config)
    except AlreadyExists:
        # Two processes may do this at once, and the other one be faster.
        origin = read_origin(RealFiles(), settings.path)
        if origin is None:
            raise
        return origin
    _logger.warning(
        "there was no database here, and it was restored from its archive",
        path=done.path,
        uri=done.uri,
        seq=done.seq,
        missing=done.missing,
    )
    origin = read_origin(RealFiles(), settings.path)
    assert origin is not None, "a restore ends with that record"
    return origin


def is_first(error: DatabaseMissing, tier: str | None, config: TierConfig) -> bool:
    """Whether the history is in the store that the log is read from, and not in a copy of that alone."""
    return error.path == places_of(tier, config)[0].place.uri


def explain(
    error: DatabaseMissing,
    settings: Settings,
    tier: str | None,
    config: TierConfig,
    source: ConfigSource | Config,
) -> None:
    """Set the error's hint to what the user has to type."""
    from lowwater.recovery.restore import in_the_way

    where = next(each for each in places_of(tier, config) if each.place.uri == error.path)
    path = settings.path
    found = in_the_way(RealFiles(), path)
    if found is not None:
        error.hint = (
            f"restore it into a new directory, {_command(where, 'NEW', config, source)}: there is {found} in "
            f"{path}, and nothing is ever written over"
        )
        return
    error.hint = f"{_command(where, path, config, source)} makes it again of what was shipped"
    if is_first(error, tier, config):
        error.hint += f', and so does lowwater.open({path!r}, ..., on_missing="restore")'
    else:
        error.hint += (
            ": then open it with this store as its tier, since the first one of the tier has nothing"
        )
    error.hint += ". Make sure that nobody else writes there. A new database needs a prefix of its own"


def _command(where: ArchivePlace, to: str, config: TierConfig, source: ConfigSource | Config) -> str:
    """The command line that restores, without secrets."""
    uri = where.place.uri
    options = place_options(where.place.options)
    is_file = isinstance(source, str | os.PathLike)
    # What the command line reads as well has the options, and the credentials, for this very URI.
    is_known = where.named is None and uri == config.store_uri() and (is_file or source is None)
    if options and not is_known:
        uri += f"?{urlencode(options, safe=':/')}"
    words = ["lowwater"]
    if isinstance(source, str | os.PathLike):
        words += ["--config", os.fspath(source)]
    return f"`{shlex.join([*words, 'restore', uri, to])}`"
