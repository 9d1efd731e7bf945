"""A Spark session in which the archive can be read, with the settings that were measured to be right.

Always true:
  - what the caller configures stands, and so does what `spark-submit` was given;
  - what Spark has to find in the environment is there while it starts, and no longer;
  - executors run this process's Lowwater, also on other machines, whatever is installed there; those of a
    server of Spark Connect run what is installed for the server's Python.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import py_compile
import shutil
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lowwater.errors import InvalidConfig, NotFound
from lowwater.spark.java import java_home
from lowwater.spark.tasks import is_remote

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_QUIET = Path(__file__).parent / "log4j2.properties"

_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"

# All of these are measured, or keep a short session short and silent.
SETTINGS = {
    # A reader that takes filters may do so only with this.
    _PUSHDOWN: "true",
    # A new Python worker costs a second of a core.
    "spark.python.worker.reuse": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    # Throughput counts here, and no pause is too long.
    "spark.driver.defaultJavaOptions": f'-XX:+UseParallelGC "-Dlog4j2.configurationFile=file:{_QUIET}"',
    "spark.executor.defaultJavaOptions": "-XX:+UseParallelGC",
    # By default a worker's heap is given back to the system after each batch, and faulted in for the next one
    # page by page, which takes as long as to decompress it.
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": str(2**28),
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": str(2**26),
    # Arrow's own allocator gives it back whatever these say: a state took half as long again in Python.
    "spark.executorEnv.ARROW_DEFAULT_MEMORY_POOL": "system",
    "spark.driver.memory": "2g",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    # Days and hours are those of the log, wherever this runs.
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
# For a driver whose executors are on the same machine, whatever the machine's name resolves to.
LOCAL_SETTINGS = {"spark.driver.host": "localhost", "spark.driver.bindAddress": "127.0.0.1"}

# What the client of Spark Connect needs, and PySpark does not bring.
CLIENT = "'grpcio' 'grpcio-status' 'googleapis-common-protos' 'pandas<3'"
_STOP = "stop() that one first: there is one in a process"

_starting = threading.Lock()


def session(
    *,
    master: str | None = None,
    remote: str | None = None,
    config: Mapping[str, object] | None = None,
    app_name: str = "lowwater",
) -> SparkSession:
    """Return a Spark session with `spark.read.format("lowwater")`: the running one, or a new one.

    `master` is Spark's: `local[2]`, `spark://host:7077`, `yarn` …; left out, it is what `spark-submit` says,
    or all cores of this machine. `remote` asks for Spark Connect: of the server at `sc://host:15002`, or, as
    `local[2]`, of one that is started in this process. What `config` says wins over all settings of ours."""
    from pyspark.sql import SparkSession

    if master is not None and remote is not None:
        raise InvalidConfig(
            "master and remote are both given", hint="give remote for Spark Connect, master for all else"
        )
    chosen = {key: _text(value) for key, value in (config or {}).items()}
    with _starting:
        running = _running()
        if running is not None:
            _agree(running, master, remote)
            _change(running, {_PUSHDOWN: "true", **chosen})
            return _with_lowwater(running)
        if remote is not None:
            return _with_lowwater(_connected(remote, chosen, app_name))
        submitted = "PYSPARK_GATEWAY_PORT" in os.environ
        if not submitted:
            master = master or "local[*]"
        builder = SparkSession.builder.appName(app_name)
        if master:
            builder = builder.master(master)
        for key, value in {**_without_submitted(_settings(master), submitted), **chosen}.items():
            builder = builder.config(key, value)
        with _environment({} if submitted else _surroundings(master)):
            return _with_lowwater(builder.getOrCreate())


def _connected(remote: str, chosen: Mapping[str, str], app_name: str) -> SparkSession:
    """A session of Spark Connect."""
    from pyspark.sql import SparkSession

    try:
        import pyspark.sql.connect.session  # noqa: F401 — says which of its packages is missing
    except (ImportError, SystemExit) as error:  # it exits where `python -c` runs
        missing = "" if isinstance(error, SystemExit) else f": {error}"
        raise NotFound(
            f"Spark Connect's client needs what is not installed{missing}", hint=f"pip install {CLIENT}"
        ) from error
    builder = SparkSession.builder.remote(remote)
    if _is_local(remote):
        # The server is a session of the other kind, and needs what those need. It takes its settings from
        # here: those of a builder would be set again in the client's session, with a warning for each.
        settings = json.dumps({"spark.app.name": app_name, **_settings(remote), **chosen})
        given = {"PYSPARK_REMOTE_INIT_CONF_LEN": "1", "PYSPARK_REMOTE_INIT_CONF_0": settings}
        with _environment({**_surroundings(remote), **given}):
            return builder.getOrCreate()
    _address(remote)
    found = builder.getOrCreate()
    _change(found, {_PUSHDOWN: "true", **chosen})
    return found


def _settings(master: str | None) -> dict[str, str]:
    return {**SETTINGS, **(LOCAL_SETTINGS if master and master.startswith("local") else {})}


def _running() -> SparkSession | None:
    """The session of this thread, or that of the process: there is one in a process, and another thread has
    none of its own."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    found = SparkSession.getActiveSession()
    if found is None and SparkContext._active_spark_context is not None:
        found = SparkSession.builder.getOrCreate()
    if found is None and "SPARK_CONNECT_MODE_ENABLED" in os.environ:
        from pyspark.sql.connect.session import SparkSession as RemoteSession

        found = cast("SparkSession | None", RemoteSession._get_default_session())
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _change(running: SparkSession, settings: Mapping[str, str]) -> None:
    """What is fixed when a session starts may be asked for again, as whoever runs a notebook's cell twice
    does, but not changed."""
    fixed = running.conf if is_remote(running) else running.sparkContext.getConf()
    for key, value in settings.items():
        if running.conf.isModifiable(key):
            running.conf.set(key, value)
        elif fixed.get(key, None) != value:
            raise InvalidConfig(
                f"{key} is fixed when a session starts, and one is running",
                hint="have its server start with it" if is_remote(running) and _server_of(running) else _STOP,
            )


def _agree(running: SparkSession, master: str | None, remote: str | None) -> None:
    if is_remote(running):
        now = f"remote {_server_of(running) or running.conf.get('spark.master')}"
        wanted = remote and f"remote {_address(remote)}"
    else:
        now = f"master {running.sparkContext.master}"
        wanted = remote and f"remote {_shown(remote)}"
    wanted = wanted or (master and f"master {master}")
    if wanted and wanted != now:
        raise InvalidConfig(f"a session is running with {now}, not {wanted}", hint=_STOP)


def _server_of(running: SparkSession) -> str | None:
    """The address of the server, which is None where it runs in this process."""
    client: Any = running.client
    return None if "SPARK_LOCAL_REMOTE" in os.environ else str(client._builder.endpoint)


def _shown(remote: str) -> str:
    """The parameters that follow may be secrets."""
    return remote.partition(";")[0].removesuffix("/")


def _is_local(remote: str) -> bool:
    """Whether Spark Connect's server is started in this process."""
    return remote == "local" or remote.startswith(("local[", "local-cluster["))


def _address(remote: str) -> str:
    from pyspark.sql.connect.client import DefaultChannelBuilder

    if _is_local(remote):
        return _shown(remote)
    try:
        builder: Any = DefaultChannelBuilder(remote)
    except ValueError:  # its text has the parameters, too
        raise InvalidConfig(
            f"{_shown(remote)} is no remote", hint="it is sc://host:15002, or local[2]"
        ) from None
    return str(builder.endpoint)


def _without_submitted(settings: Mapping[str, str], submitted: bool) -> dict[str, str]:
    """What `spark-submit` was given goes above ours, and options of the JVM come too late there."""
    if not submitted:
        return dict(settings)
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    given = SparkConf()
    return {key: value for key, value in settings.items() if not given.contains(key)}


def _surroundings(master: str | None) -> dict[str, str]:
    """What Spark's launcher, and the JVM after it, find out from the environment."""
    found = {"JAVA_HOME": str(java_home())}
    # Spark's own default is whatever `python3` is on PATH.
    found["PYSPARK_PYTHON"] = os.environ.get("PYSPARK_PYTHON", sys.executable)
    if master and master.startswith("local-cluster") and "SPARK_HOME" not in os.environ:
        found["SPARK_HOME"] = _spark_home_aside()
    return found


def _spark_home_aside() -> str:
    """The workers of a local cluster write below SPARK_HOME, where the installed package is."""
    import pyspark

    home = _kept_folder()
    for path in Path(pyspark.__file__).parent.iterdir():
        if path.name != "work":
            (home / path.name).symlink_to(path)
    return str(home)


def _kept_folder() -> Path:
    """A folder that is removed when this process ends: executors come for what is in it at any time."""
    folder = Path(tempfile.mkdtemp(prefix="lowwater-spark-"))
    atexit.register(_remove, folder)
    return folder


def _remove(folder: Path) -> None:
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        # Its workers would go on writing there.
        running.stop()
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _with_lowwater(spark: SparkSession) -> SparkSession:
    from lowwater.spark.source import LowwaterSource

    if not is_remote(spark):
        context = spark.sparkContext
        master = context.master or ""
        # Executors elsewhere get the package before anything of it is named: a source is sent by its name.
        if not master.startswith("local[") and master != "local":
            context.addPyFile(str(package_zip(_kept_folder())))
    spark.dataSource.register(LowwaterSource)
    return spark


def package_zip(folder: Path) -> Path:
    """This very Lowwater as one file that Python imports from, compiled: each new worker reads it."""
    package = Path(__file__).parents[1]
    version = metadata.version("lowwater")
    name_and_version = f"lowwater-{version}"
    path = folder / f"{name_and_version}.zip"
    compiled = folder / "module.pyc"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as packed:
        for parent, folders, files in os.walk(package, followlinks=True):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(files):
                file = Path(parent, name)
                inside = str(Path("lowwater") / file.relative_to(package))
                packed.write(file, inside)
                if name.endswith(".py"):
                    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
                    py_compile.compile(str(file), str(compiled), inside, doraise=True, invalidation_mode=mode)
                    packed.write(compiled, f"{inside}c")
        # `lowwater.__version__` asks for it.
        about = f"Metadata-Version: 2.1\nName: lowwater\nVersion: {version}\n"
        packed.writestr(f"{name_and_version}.dist-info/METADATA", about)
    return path
