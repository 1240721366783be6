"""The recipes for large targets: planned at their real sizes, and run on a scaled-down target of the same shape."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import adaflash
from adaflash.cli import main
from adaflash.configuration import find, read

ROOT = Path(adaflash.__file__).parents[1]
DOCS = (ROOT / "docs" / "recipes.md").read_text()
# Sizes as published; the tiny ones keep what makes a family what it is.
QWEN3_8B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "hidden_size": 4096,
    "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_CODER = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151_936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "max_position_embeddings": 262_144, "tie_word_embeddings": False,
}  # fmt: skip
RECIPES = {
    "recipe/qwen3-8b-8gpu": (QWEN3_8B, "qwen3", 8, 1, 8.19e9),
    "recipe/qwen3-coder-30b-a3b-2nodes": (QWEN3_CODER, "qwen3_moe", 8, 2, 30.5e9),
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
# Laid over a recipe: only sizes, and what a CPU cannot be.
SMALL = {
    "model": {"rollout": {"init_args": {"max_new_tokens": 20, "lanes": 2}}, "num_anchors": 4, "max_new_tokens": 6,
              "lanes": 2},
    "data": {"rollout_size": 2, "max_prompt_tokens": 460, "val_batch_size": 2, "val_prompts": 1},
    "trainer": {"accelerator": "cpu", "num_nodes": 1, "max_steps": 2, "val_check_interval": 4,
                "enable_progress_bar": False, "log_every_n_steps": 1},
    "gain": {"max_new_tokens": 4, "prompts_per_domain": 1, "requests_at_once": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_where_it_says(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, _, devices, nodes, weights = RECIPES[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [
        "-c",
        name,
        "-c",
        "data/shipped",
        "--target",
        str(tmp_path),
        "--devices",
        str(devices),
        "--memory",
        "80GiB",
    ]
    capsys.readouterr()
    assert main(["plan", *words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and (plan["devices"], plan["nodes"]) == (devices, nodes)
    assert plan["counts"]["drafter_tokens_per_update"] == 2**18  # 262 k, as in speculators' own study
    held = plan["parts"]["target weights"]["update"]
    assert held == pytest.approx(2 * weights, rel=0.01) if nodes == 1 else held < 2 * weights / 6


@pytest.mark.parametrize("name", RECIPES)
def test_two_steps_on_a_target_of_the_same_shape(name: str, tmp_path: Path, make_target: Callable[..., Path]) -> None:
    target = make_target(tmp_path, RECIPES[name][1], num_hidden_layers=10, tie_word_embeddings=False)
    run = tmp_path / "run"
    # In the file, since torchrun would take the flag --run for one of its own.
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({"run": str(run), **SMALL}))
    ranks = RECIPES[name][
        3
    ]  # two where there are two nodes: one process a recipe would test no launch, two each are slow
    launch = [sys.executable, *(TORCHRUN if ranks > 1 else []), "-m", "adaflash.cli"]
    words = ["fit", "-c", name, "-c", "data/shipped", "-c", "small.yaml", "--target", str(target)]
    words += ["--trainer.devices", str(ranks)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*launch, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (run / "checkpoints" / "last.ckpt").exists()
    header, *rows = (run / "metrics.csv").read_text().splitlines()
    assert "loss/ce" in header and "loss/rkl" in header and len(rows) >= 2


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_hold_the_papers_numbers(name: str) -> None:
    words = [read(path) for path in _files(name)]
    text = json.dumps(words)
    for said in ('"block_size": 16', '"num_layers": 5', '"rate": 1.3', '"weight": 0.8', '"weight": 0.2', '"reuse": 2'):
        assert said in text, said


def _files(name: str) -> list[Path]:
    from adaflash.configuration import with_includes

    return with_includes(find(name))


def test_the_docs_name_every_recipe_and_only_flags_that_exist() -> None:
    for name in RECIPES:
        assert name in DOCS
    assert "Qwen3.5-9B" in DOCS and "not yet" in DOCS
    for script in re.findall(r"docs/recipes/[\w.-]+\.sbatch", DOCS):
        assert subprocess.run(["bash", "-n", str(ROOT / script)]).returncode == 0
