"""`adaflash export` and `adaflash import`: a complete folder that a server loads as it is, and how to serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from adaflash.errors import UserError
from adaflash.export.formats import FORMATS, scales_embedding
from adaflash.export.manifest import write_manifest
from adaflash.export.own import Dtype, head_tensors, rounded, write_drafter
from adaflash.export.pairing import target_name
from adaflash.export.probe import make_probe, save_probe
from adaflash.export.sidecar import FOLDER
from adaflash.export.source import Source, open_source
from adaflash.export.weights import new_folder

To = Literal["hf", "sglang", "vllm", "adaflash"]
# Families of ours whose model in sglang 0.5.23 hands its hidden states to a DFlash drafter.
SGLANG_TARGETS = ("llama", "mistral", "qwen3", "qwen3_moe", "gpt_oss")


def export(
    checkpoint: str, to: To, output: str, target: str = "", dtype: Dtype = "bfloat16", force: bool = False
) -> None:
    """Write a trained drafter for a server: config, weights, adaflash.json and a probe; print how to serve it.

    Args:
        checkpoint: A checkpoint of `adaflash fit`, the folder of a run (its best checkpoint, else its last), or a drafter's
            folder of any known format.
        to: hf (transformers' own DFlash generator), sglang (also z-lab and SpecForge), vllm (speculators), or adaflash (as
            sglang, and with a limited vocabulary: to go on training, here or elsewhere).
        output: Folder to write; it appears when it is complete.
        target: Where the target is now; needed for a drafter's folder, a run knows its own.
        dtype: Number format of the weights.
        force: Replace the folder if it exists.
    """
    folder = Path(output).expanduser()
    if folder.exists() and not force:  # before anything is loaded
        raise UserError(f"--output {folder} exists; give another folder, or --force to replace it")
    source = open_source(checkpoint, target)
    FORMATS[to].check(source.drafter)
    export_drafter(source, to, folder, dtype, force)
    print(said(source, to, folder, dtype))


def import_drafter(drafter: str, target: str, output: str, dtype: Dtype = "bfloat16", force: bool = False) -> None:
    """Check somebody's drafter against a target and write it in adaflash's own format (that of z-lab and SGLang).

    Args:
        drafter: Folder or Hub id of z-lab, SGLang, SpecForge, vLLM speculators, TorchSpec or AdaFlash.
        target: Fetched name, folder or Hub id of the model it was trained for.
        output: Folder to write; `--model.drafter.init_args.checkpoint FOLDER` goes on training from it.
        dtype: Number format of the weights.
        force: Replace the folder if it exists.
    """
    export(drafter, "adaflash", output, target, dtype, force)


def export_drafter(source: Source, to: To, folder: Path, dtype: Dtype = "bfloat16", force: bool = False) -> None:
    """Everything that belongs into the folder, written beside it and moved into place at the end.

    Raises:
        UserError: the folder exists, or what was written reads back otherwise.
    """
    drafter, length, target = source.drafter, source.length, source.target
    with new_folder(folder, force) as work:
        tensors = write_drafter(drafter, length, target, work, dtype, FORMATS[to])
        write_manifest(work, drafter, length, target, source.origin, to, dtype)
        save_probe(work, make_probe(rounded(drafter, target, tensors), target))


def said(source: Source, to: To, folder: Path, dtype: str) -> str:
    """What was written, what to mind, and how to serve it."""
    drafter, size = source.drafter, f"{drafter_bytes(folder) / 1e6:.1f} MB"
    lines = [
        f"{folder}: DFlash drafter for {target_name(source.target)}, written for {to}, read back and compared",
        f"  block of {drafter.block_size} (the anchor and {drafter.block_size - 1} candidates), {dtype}, {size}; "
        f"context layers {' '.join(map(str, drafter.context_layers))}; mask token {drafter.mask_id} ({drafter.mask_source})",
        *(f"  note: {note}" for note in notes(source, to, folder)),
        "go on with it:" if to == "adaflash" else "serve it:",
        FORMATS[to].serve(folder.absolute(), target_name(source.target), drafter.block_size),
    ]
    return "\n".join(lines)


def notes(source: Source, to: To, folder: Path) -> list[str]:
    """What a server will not do by itself."""
    found, family = [], source.target.config.model_type
    if to == "sglang" and head_tensors(source.length):
        found.append(
            "the length head lies inside (thresh_head_two_model); sglang 0.5.23 ignores it, the AdaFlash authors' build "
            "uses it with --dflash-dynamic-verify-len and --max-running-requests above 48"
        )
    if (folder / FOLDER).is_dir():
        found.append(f"the length policy lies in {FOLDER}/; this server does not read it and drafts full blocks")
    if to == "sglang" and family not in SGLANG_TARGETS:
        found.append(f"sglang 0.5.23 has no DFlash hook in its {family} model; it serves {', '.join(SGLANG_TARGETS)}")
    if scales_embedding(source.target):
        how = "a scaled copy of the embedding is written" if to == "vllm" else "the server must scale what it lends"
        found.append(f"{family} scales its embedding: {how}, or the drafter sees rows it does not know")
    return found


def drafter_bytes(folder: Path) -> int:
    """Size of the weights on disk."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
