"""The package as users get it: a quick import, and a wheel that plans without the checkout."""

from __future__ import annotations

import json
import site
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import autopar

ROOT = Path(__file__).parent.parent
SMALL = "gpt:layers=2,hidden=64,heads=2,vocab=128,seq=32"


def test_surface_is_there() -> None:
    """Every public name resolves, and functions stay functions when modules of their names are imported."""
    import autopar.plan

    assert {name for name in autopar.__all__ if isinstance(getattr(autopar, name), ModuleType)} == set()
    assert callable(autopar.plan)
    assert set(autopar.__all__) == set(dir(autopar))


def test_unknown_names_are_refused() -> None:
    """A name that isn't offered is an AttributeError that lists those that are."""
    with pytest.raises(AttributeError, match=r"no attribute 'plann'; it offers .*plan"):
        autopar.plann  # noqa: B018 - reading it is the test


def test_import_is_quick() -> None:
    """`import autopar` loads neither torch nor pydantic."""
    check = "import sys, autopar; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    return next(folder.glob("*.whl"))


def test_wheel_holds_one_import_name_and_the_profiles(wheel: Path) -> None:
    """Beside its metadata the wheel has the package only; every shipped profile is inside it."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"autopar"}
    shipped = {path.relative_to(ROOT / "profiles") for path in (ROOT / "profiles").glob("*/*.toml")}
    assert {Path(name).relative_to("autopar/_profiles") for name in names if "_profiles/" in name} >= shipped


def test_wheel_plans_in_a_bare_environment(wheel: Path, tmp_path: Path) -> None:
    """Installed alone (dependencies borrowed from this environment) the command plans, far from the checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    borrowed = next((tmp_path / "bare" / "lib").glob("python*")) / "site-packages" / "borrowed.pth"
    borrowed.write_text("\n".join(site.getsitepackages()) + "\n")
    asked = ["plan", SMALL, "--cluster", "2xa100-80gb", "--global-batch", "8", "--json"]
    done = subprocess.run(
        [str(python.with_name("autopar")), *asked], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["feasible"] is True
