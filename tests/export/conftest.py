"""A tiny target in a folder, and environments of other projects (opt-in)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from exporting import save_target

from adaflash.targets.hf import HFTarget


@pytest.fixture
def folder_target(tmp_path: Path) -> HFTarget:
    """A target that lies in a folder, so that others can load it too."""
    return HFTarget.load(save_target(tmp_path / "target"))


@pytest.fixture(scope="session")
def speculators() -> str:
    """Python of an environment with vLLM's `speculators`, made at the first use (about ten minutes, 2.6 GB)."""
    peers = os.environ.get("ADAFLASH_PEERS", "")
    if not peers:
        pytest.skip("set ADAFLASH_PEERS=FOLDER to let `speculators` read our export (it gets an environment there)")
    home = Path(peers).expanduser() / "speculators"
    python = home / "bin" / "python"
    if not (home / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        # The CPU build of torch first: speculators alone would draw in the one for CUDA.
        subprocess.run([str(python), "-m", "pip", "install", "-q", "torch==2.13.0"], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "speculators==0.9.0"], check=True)
        # Its torchvision is built for CUDA, fails to load beside that torch, and is not needed here.
        subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio"], check=True)
        (home / ".ready").touch()
    return str(python)
