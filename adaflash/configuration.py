"""Where configs are found, and how one names others.

`--config experiment/adaflash` is looked for in the working directory, then in the package. A config may begin with
`include: [loss/adaflash, rollout/live]`: those are laid under it, in order.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from adaflash.errors import UserError

PACKAGED = Path(__file__).parent / "configs"


def expand(argv: Sequence[str]) -> list[str]:
    """The command line with every `--config NAME` replaced by the files it stands for."""
    result: list[str] = []
    rest = iter(argv)
    for word in rest:
        if word in ("-c", "--config"):
            result += [part for path in with_includes(find(next(rest, ""))) for part in ("--config", str(path))]
        elif word.startswith("--config="):
            result += [f"--config={path}" for path in with_includes(find(word.removeprefix("--config=")))]
        else:
            result.append(word)
    return result


def find(name: str, beside: Path | None = None) -> Path:
    """The file a config name stands for.

    Raises:
        UserError: no such config; names the nearest ones.
    """
    for folder in (beside, Path.cwd(), PACKAGED):
        for candidate in (name, f"{name}.yaml"):
            if name and folder is not None and (folder / candidate).is_file():
                return folder / candidate
    known = sorted(shipped())
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise UserError(f"--config {name}: no such file, here or in the package. {hint}Shipped configs: {', '.join(known)}")


def shipped() -> Iterator[str]:
    """Names of the configs in the package, as `--config` takes them."""
    for path in PACKAGED.rglob("*.yaml"):
        yield path.relative_to(PACKAGED).with_suffix("").as_posix()


def with_includes(path: Path, above: tuple[Path, ...] = ()) -> list[Path]:
    """The file preceded by what it includes, depth first, each file once."""
    if path in above:
        raise UserError(f"{path}: includes itself by way of {' -> '.join(str(p) for p in above)}")
    files: list[Path] = []
    content = read(path)
    for name in content.get("include", []):
        files += [each for each in with_includes(find(name, path.parent), (*above, path)) if each not in files]
    return [*files, path] if content else files  # all of it commented out: nothing to lay anywhere


def read(path: Path) -> dict[str, Any]:
    """A config as a mapping.

    Raises:
        UserError: not YAML, not a mapping, or a key that stands twice; names file and line.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), OnceLoader)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text in UTF-8 ({error.reason} at byte {error.start})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(content, dict | None):
        raise UserError(
            f"{path}: a config is a mapping of keys such as `model:` and `data:`, not a {type(content).__name__}"
        )
    for section in ("model", "data", "trainer"):
        if not isinstance(value := (content or {}).get(section), dict | None):
            raise UserError(f"{path}: `{section}` is a mapping of its settings, not a {type(value).__name__}")
    include = (content or {}).get("include", [])
    if not isinstance(include, list) or not all(isinstance(name, str) for name in include):
        raise UserError(f"{path}: `include` is a list of config names, such as [loss/adaflash, rollout/live]")
    return content or {}


class OnceLoader(yaml.SafeLoader):
    """YAML whose keys stand once: of two `model:` blocks the first would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping, or a YAMLError with the line of the second one."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                problem = f"the key {key.value!r} stands here for the second time; the first would be lost"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def nearest(word: str, known: Sequence[str]) -> str:
    """The valid key nearest to a misspelt one, or nothing."""
    same_place = [key for key in known if key.rpartition(".")[0] == word.rpartition(".")[0]]
    for pool in (same_place, list(known)):
        near = difflib.get_close_matches(word, pool, n=1, cutoff=0.6)
        if near:
            return near[0]
    return ""
