"""Makes the math prompts: `python -m adaflash.data.shipped.make`. The code and chat prompts are written by hand.

Training and evaluation use different templates, so no problem of one can be a re-numbered problem of the other.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from adaflash.data.shipped.templates import EVAL, TRAIN, Template

HERE = Path(__file__).parent
ENDING = "Think it through step by step and finish with the result on a line of its own."


def problems(templates: Sequence[Template], count: int, seed: int) -> Iterator[str]:
    """`count` different problems, templates in turn."""
    rng, seen = random.Random(seed), set[str]()
    while len(seen) < count:
        text = templates[len(seen) % len(templates)](rng)
        if text not in seen:
            seen.add(text)
            yield text


def rows(templates: Sequence[Template], count: int, seed: int, split: str) -> Iterator[dict[str, object]]:
    """Rows as they stand in the files."""
    for number, text in enumerate(problems(templates, count, seed)):
        content = f"{text} {ENDING}"
        yield {
            "id": f"shipped-math-{split}-{number:03d}",
            "domain": "math",
            "messages": [{"role": "user", "content": content}],
        }


def text_of(split: str) -> str:
    """Content of {split}/math.jsonl."""
    templates, count, seed = {"train": (TRAIN, 200, 11), "eval": (EVAL, 32, 12)}[split]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(templates, count, seed, split))


if __name__ == "__main__":
    for name in ("train", "eval"):
        (HERE / name / "math.jsonl").write_text(text_of(name), encoding="utf-8")
