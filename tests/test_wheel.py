"""What pip makes of the source, with a compiler and without, and what it serves again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lowwater

ROOT = Path(__file__).resolve().parent.parent
PURE = f"lowwater-{lowwater.__version__}-py3-none-any.whl"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler here"),
]


class Pip:
    """pip with a cache of its own, the network out of reach, and one source distribution to install from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.installed = folder / "installed"
        clone = folder / "lowwater-main"
        leave_out = shutil.ignore_patterns(
            ".*", "build", "*.egg-info", "*.so", "__pycache__", "tests", "bench"
        )
        shutil.copytree(ROOT, clone, symlinks=True, ignore=leave_out)
        script = "import sys, setuptools.build_meta as build; build.build_sdist(sys.argv[1])"
        run([sys.executable, "-c", script, str(folder / "index")], cwd=clone)

    def __call__(self, *arguments: str, compiler: bool = True) -> None:
        environment = dict(os.environ) if compiler else {**os.environ, "CC": "false"}
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        run([*command, "--cache-dir", str(self.folder / "cache"), *arguments], env=environment)

    def install(self, *, compiler: bool, source: str = "lowwater") -> bool:
        """Whether what was installed has its loops compiled."""
        shutil.rmtree(self.installed, ignore_errors=True)
        options = ("--no-index", "--no-deps", "--no-build-isolation", "--target", str(self.installed))
        self("install", *options, "--find-links", str(self.folder / "index"), source, compiler=compiler)
        code = "from lowwater.engine.format import fast; print(fast.IS_COMPILED, fast.WHY_NOT_COMPILED)"
        environment = {**os.environ, "PYTHONPATH": str(self.installed)}
        environment.pop("PURE_PYTHON", None)
        said = run([sys.executable, "-c", code], cwd=self.folder, env=environment).strip()
        assert said in ("True", "False it was built without a C compiler or Python's headers")
        return said == "True"

    def cached(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "cache" / "wheels").rglob("*.whl"))


def run(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def pip(tmp_path: Path) -> Pip:
    return Pip(tmp_path)


@pytest.mark.long
def test_a_wheel_without_loops_is_for_any_platform_and_pip_has_a_compiled_one_before_it(pip: Pip) -> None:
    """With one tag for both, the slower one would take the other's place in the cache, or in a folder of
    wheels, and be served to whoever has the compiler's."""
    assert not pip.install(compiler=False)
    assert pip.cached() == [PURE]
    assert "Root-Is-Purelib: true" in wheel_file(pip)
    (place,) = (pip.folder / "cache" / "wheels").rglob("*.whl")
    with zipfile.ZipFile(place) as wheel:
        assert {name.partition("/")[0] for name in wheel.namelist()} == {
            "lowwater",
            f"lowwater-{lowwater.__version__}.dist-info",
        }
    # As `setup.py` says, no tag has pip build again. This does.
    assert not pip.install(compiler=True)
    pip("cache", "remove", "lowwater")
    assert pip.install(compiler=True)
    assert "Root-Is-Purelib: false" in wheel_file(pip)
    (compiled,) = pip.cached()
    assert compiled.startswith(f"lowwater-{lowwater.__version__}-cp3{sys.version_info.minor}-")
    assert pip.install(compiler=False), "what is compiled is served, also where there is no compiler any more"

    # Both in one place, as after a build without a cache that somebody has kept.
    (place,) = (pip.folder / "cache" / "wheels").rglob("*.whl")
    pip(
        *("wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(place.parent)),
        *("--no-index", "--find-links", str(pip.folder / "index"), "lowwater"),
        compiler=False,
    )
    assert pip.cached() == sorted([compiled, PURE])
    assert pip.install(compiler=False)


@pytest.mark.long
def test_a_folder_is_built_each_time_whatever_there_was(pip: Pip) -> None:
    """So installing from a clone takes the compiler that came after the first try, and never the loops of
    other sources."""
    clone = str(pip.folder / "lowwater-main")
    assert not pip.install(compiler=False, source=clone)
    assert pip.install(compiler=True, source=clone)
    assert not pip.install(compiler=False, source=clone)


def wheel_file(pip: Pip) -> str:
    (found,) = pip.installed.glob("lowwater-*.dist-info/WHEEL")
    return found.read_text()
