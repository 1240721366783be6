"""The house of DESIGN section 7: imports point one way, rooms are short, plugins are annotated and documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback

import adaflash
import adaflash.callbacks
from adaflash.data.base import PromptSource
from adaflash.drafters.base import Drafter
from adaflash.length.base import LengthPolicy
from adaflash.losses import LossTerm, PositionWeight
from adaflash.rollouts.base import RolloutSource

ROOT = Path(adaflash.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if "callbacks" not in path.relative_to(ROOT).parts)
PLUGINS = sorted((ROOT / "callbacks").glob("*.py"))
KINDS = (LossTerm, PositionWeight, LengthPolicy, RolloutSource, Drafter, PromptSource, Callback)

# room -> what it may never import, at run time (imports for type checkers are no dependencies)
FORBIDDEN = {
    "types": ["*"],
    "blocks": ["*", "!types"],
    "errors": ["*"],
    "vocabulary": ["*", "!errors"],
    "losses": ["*", "!errors", "!vocabulary"],
    "length": [
        "*",
        "!types",
        "!errors",
        "!blocks",
        "!losses",
        "!export",
    ],  # export: late, for a checkpoint named in YAML
    "targets": ["drafters", "length", "decoding", "rollouts", "module", "cli", "data", "losses", "step", "bench"],
    "drafters": ["length", "decoding", "rollouts", "module", "cli", "data", "losses", "step", "bench"],
    "decoding": ["rollouts", "module", "cli", "data", "losses", "step", "bench"],
    "rollouts": ["module", "cli", "data", "losses", "step", "bench"],
    "data": ["decoding", "rollouts", "module", "cli", "losses", "step", "drafters", "length", "bench"],
    "step": ["decoding", "rollouts", "module", "cli", "data", "drafters", "length", "targets", "bench"],
    "lesson": ["*", "!types", "!blocks"],
    "objective": ["*", "!lesson", "!step", "!types", "!losses", "!length", "!vocabulary"],
    "window": ["*"],
    "optim": ["*", "!errors"],
    "parallel": ["module", "cli", "data", "losses", "step", "rollouts", "length", "decoding", "bench"],
    "module": ["cli", "data", "bench", "export"],
}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Rooms of adaflash that a file imports, but for those only type checkers read."""
    tree = ast.parse(path.read_text())
    hidden = {id(node) for part in ast.walk(tree) if _only_for_types(part) for node in ast.walk(part)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= (
                {f"{node.module}.{alias.name}" for alias in node.names}
                if node.module == "adaflash"
                else {node.module or ""}
            )
    return {name.split(".")[1] if "." in name else "adaflash" for name in names if name.split(".")[0] == "adaflash"}


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def refused(who: str, whom: str) -> bool:
    rules = FORBIDDEN.get(who, [])
    return whom != who and f"!{whom}" not in rules and ("*" in rules or whom in rules)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    found = imports(path)
    assert "callbacks" not in found or room(path) in ("cli", "trainer_cli"), "callbacks import adaflash, never back"
    assert not {whom for whom in found if refused(room(path), whom)}, room(path)


def test_the_rules_name_rooms_that_exist() -> None:
    rooms = {room(path) for path in FILES}
    assert set(FORBIDDEN) <= rooms
    named = {rule.strip("!") for rules in FORBIDDEN.values() for rule in rules} - {"*", "export"}
    assert named <= rooms
    assert any("types" in imports(path) for path in FILES)  # the reader of imports reads


def test_losses_import_torch_only() -> None:
    allowed = {
        "__future__",
        "torch",
        "adaflash",
        "abc",
        "collections",
        "concurrent",
        "contextlib",
        "dataclasses",
        "functools",
        "math",
        "typing",
    }
    for path in FILES:
        if room(path) == "losses":
            nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, (ast.Import, ast.ImportFrom))]
            tops = {
                name.split(".")[0]
                for n in nodes
                for name in ([n.module or ""] if isinstance(n, ast.ImportFrom) else [a.name for a in n.names])
            }
            assert tops <= allowed, path


@pytest.mark.parametrize("path", [*FILES, *PLUGINS], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_room_is_longer_than_three_hundred_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300


def test_callbacks_are_one_folder_with_one_name() -> None:
    assert (ROOT / "callbacks").is_symlink()
    assert adaflash.callbacks.__name__ == "adaflash.callbacks"
    for path in PLUGINS:
        if path.stem != "__init__":
            assert (
                importlib.import_module(f"adaflash.callbacks.{path.stem}").__name__ == f"adaflash.callbacks.{path.stem}"
            )


def plugins() -> list[type]:
    """Every class of ours that a YAML may name, found by importing the whole package."""
    for found in pkgutil.walk_packages([str(ROOT)], "adaflash."):
        if (
            not found.name.startswith(("adaflash.configs", "adaflash.data.shipped."))
            and found.name != "adaflash.__main__"
        ):
            importlib.import_module(found.name)
    known: set[type] = set()
    todo: list[type] = [*KINDS]
    while todo:
        kind = todo.pop()
        known.add(kind)
        todo += [sub for sub in kind.__subclasses__() if sub not in known]
    return sorted(
        (k for k in known if k.__module__.startswith("adaflash.")), key=lambda k: (k.__module__, k.__qualname__)
    )


PUBLIC = [kind for kind in plugins() if not kind.__name__.startswith("_")]


def test_the_walk_finds_plugins_of_every_kind() -> None:
    for kind in KINDS:
        assert any(issubclass(found, kind) and found is not kind for found in PUBLIC), kind


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
def test_plugins_are_annotated_and_documented(kind: type) -> None:
    """Lightning turns an untyped required parameter into a silent None (LIGHTNING section 2.3)."""
    assert kind.__doc__, "no docstring"
    if "__init__" not in vars(kind):
        return
    parameters = [p for name, p in inspect.signature(kind.__init__).parameters.items() if name != "self"]
    missing = [
        p.name
        for p in parameters
        if p.annotation is inspect.Parameter.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    assert not missing, missing
    told = (kind.__doc__ or "") + (kind.__init__.__doc__ or "")
    assert not [p.name for p in parameters if f"{p.name}:" not in told and p.kind is not p.VAR_KEYWORD]
