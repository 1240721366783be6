"""The package as a whole: links, imports, what the wheel holds, and the rules of the house."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import adaflash

ROOT = Path(__file__).parent.parent
LINES = 300
# In two parts, so that this file passes its own test.
REGISTRIES = [a + b for a, b in (("pypi", ".org"), ("pythonhosted", ".org"), ("npmjs", ".org"), ("deb.debian", ".org"))]


def tracked() -> list[Path]:
    """The files of the repository; everything but what git ignores where git or its folder is missing."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


@pytest.mark.parametrize("name", ["callbacks", "configs"])
def test_a_top_level_folder_is_linked_into_the_package(name: str) -> None:
    assert os.readlink(ROOT / "adaflash" / name) == f"../{name}"


def test_callbacks_have_one_name() -> None:
    assert importlib.import_module("adaflash.callbacks").__name__ == "adaflash.callbacks"
    command = [sys.executable, "-c", "import callbacks"]
    wrong = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "ImportError: import adaflash.callbacks, not callbacks" in wrong.stderr


def test_the_package_is_typed_and_its_version_has_one_source() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "adaflash.__version__"}
    assert adaflash.__version__
    assert (ROOT / "adaflash" / "py.typed").exists()


def test_importing_the_package_and_asking_for_help_is_quick() -> None:
    """No torch before it is needed: `adaflash fetch --help` answers at once."""
    heavy = "{'torch', 'transformers', 'lightning'} & set(sys.modules)"
    code = f"import sys, adaflash, adaflash.targets.fetch as f; f.main([]); assert not {heavy}, {heavy}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_constraints_satisfy_the_declared_ranges() -> None:
    from packaging.requirements import Requirement
    from packaging.version import Version

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = (
        project["dependencies"]
        + project["optional-dependencies"]["dev"]
        + project["optional-dependencies"]["quickstart"]
    )
    for requirement in map(Requirement, wanted):
        name = requirement.name.lower().replace("_", "-")
        if name not in ("adaflash", "setuptools"):  # setuptools builds, pip freeze does not list it
            assert requirement.specifier.contains(Version(pins[name])), f"{requirement} does not admit {pins[name]}"


def test_no_file_of_the_package_is_long() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for folder in ("adaflash", "callbacks")
        for path in (ROOT / folder).rglob("*.py")
        if (count := len(path.read_text().splitlines())) > LINES
    }
    assert not long, f"more than {LINES} lines: {long}"


def test_no_registry_is_named() -> None:
    """Whoever installs chooses the registry: no lock file or script may bring one along."""
    found = [str(path) for path in tracked() if any(host.encode() in path.read_bytes() for host in REGISTRIES)]
    assert not found


@pytest.mark.skipif(find_spec("setuptools") is None, reason="needs setuptools (adaflash[dev])")
def test_the_wheel_holds_callbacks_configs_and_prompts(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for path in tracked():  # folders that are links are no files: they are made below
        if path.relative_to(ROOT).parts[0] in ("adaflash", "callbacks", "configs") or path.parent == ROOT:
            place = tree / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    for name in ("callbacks", "configs"):
        (tree / "adaflash" / name).symlink_to(f"../{name}")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(tree)], check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    for folder, kinds in (("callbacks", "*.py"), ("configs", "**/*.yaml"), ("data/shipped", "**/*.jsonl")):
        wanted = {p.relative_to(tree).as_posix() for p in (tree / "adaflash" / folder).glob(kinds)}
        assert wanted
        assert wanted <= names
    assert {"adaflash/py.typed", "adaflash/cli.py", "adaflash/configs/base.yaml"} <= names
    assert not [name for name in names if name.startswith(("tests/", "callbacks/", "configs/"))]
    assert {name.rsplit("/")[-1] for name in names if "dist-info/licenses/" in name} == {"LICENSE", "NOTICE"}
