"""fit, validate, test and predict: LightningCLI with our model, our data and readable errors."""

from __future__ import annotations

import logging
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from adaflash.callbacks.acceptance import AcceptanceMonitor
from adaflash.callbacks.gain_table import GainTable
from adaflash.configuration import PACKAGED, nearest
from adaflash.data.prompts import PromptDataModule
from adaflash.errors import UserError
from adaflash.module import AdaFlashModule

BASE = PACKAGED / "base.yaml"
_PLAIN_YAML = jsonargparse.get_loader("yaml")


def run(words: list[str]) -> int:
    """Run one of LightningCLI's commands; returns the exit status."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda record: "Tip:" not in record.getMessage())
    sys.argv = ["adaflash", *words]
    cli = TrainerCLI()
    return int(getattr(cli.trainer, "exit_status", 0))


class Parser(LightningArgumentParser):
    """One short message instead of a page of usage, with the nearest valid key for a misspelt one."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        """Print what is wrong and exit with 2."""
        parser = getattr(ex, "subcommand_parser", None) or self
        prog = parser.prog.replace(" [options]", "")
        sys.stderr.write(f"{prog}: error: {message.strip()}\n{_hint(message, parser)}")
        sys.exit(2)


def _hint(message: str, parser: Any) -> str:
    known = sorted({action.dest for action in parser._actions if action.dest not in ("help", "==SUPPRESS==")})
    words = re.findall(r"(?:option '|unrecognized arguments: --|[Kk]ey \"|[Kk]ey ')([\w.]+)", message)
    near = [found for word in words if word not in known and (found := nearest(word, known))]
    did_you_mean = f"Did you mean '{near[-1]}'?\n" if near else ""
    return f"{did_you_mean}See --help, --print_config, or --model.drafter.help CLASS for what a class takes.\n"


class TrainerCLI(LightningCLI):
    """The model and the data are fixed classes; everything inside them is a line of YAML."""

    def __init__(self, args: list[str] | None = None, run: bool = True) -> None:
        jsonargparse.set_loader("yaml", _load_yaml, exceptions=(yaml.YAMLError,))
        defaults = {name: {"default_config_files": [str(BASE)]} for name in self.subcommands()}
        super().__init__(
            AdaFlashModule,
            PromptDataModule,
            args=args,
            run=run,
            parser_class=Parser,
            auto_configure_optimizers=False,
            seed_everything_default=42,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"inference_mode": False},
            parser_kwargs={"allow_abbrev": False, "default_env": True, "env_prefix": "ADAFLASH", **defaults},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """One name for the target, one folder for the run, and the callbacks that no overlay can drop."""
        parser.add_argument("--target", type=str, default="", help="Fetched name, local directory or Hub id of the target.")
        parser.add_argument("--run", type=str, default="runs/adaflash", help="Folder of this run: logs and checkpoints.")
        parser.add_argument("--overwrite", type=bool, default=False, help="Replace what the run folder holds.")
        parser.link_arguments("target", "model.target")
        parser.link_arguments("target", "data.target")
        parser.link_arguments("run", "trainer.default_root_dir")
        parser.add_lightning_class_args(AcceptanceMonitor, "acceptance")
        parser.add_lightning_class_args(GainTable, "gain")
        parser.add_lightning_class_args(ModelCheckpoint, "last")
        parser.add_lightning_class_args(ModelCheckpoint, "best")

    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning would merge the checkpoint's hyper-parameters over the command line (LIGHTNING 2.4)."""

    def before_instantiate_classes(self) -> None:
        """Stop a run that would mix with another before anything is loaded."""
        config = self.config[self.subcommand]
        if not config.target:
            raise UserError("no target: add --target NAME (a fetched name, a local directory or a Hub id)")
        if self.subcommand == "fit" and not config.ckpt_path:
            make_room(Path(config.run), config.overwrite)

    def instantiate_classes(self) -> None:
        """Build trainer, model and data; a value that a class refuses is the user's to mend."""
        try:
            super().instantiate_classes()
        except UserError:
            raise
        except (ValueError, TypeError) as error:
            raise UserError(str(error)) from error
        self.model.provenance = provenance(self)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Trainer:
        if config.get("logger") in (None, True):
            config["logger"] = loggers(config["default_root_dir"])
        return super()._instantiate_trainer(config, callbacks)


def _load_yaml(text: str) -> Any:
    """YAML as jsonargparse reads it, less the `include` list, which has been expanded on the command line already."""
    content = _PLAIN_YAML(text)
    if isinstance(content, dict):
        content.pop("include", None)
    return content


def loggers(folder: str) -> list[Any]:
    """TensorBoard and CSV, both straight into the run folder."""
    return [TensorBoardLogger(folder, name="", version=""), CSVLogger(folder, name="", version="")]


def make_room(folder: Path, overwrite: bool) -> None:
    """Refuse to start a second run in a folder, or clear what the first one left.

    Raises:
        UserError: the folder holds a run and `overwrite` was not asked for.
    """
    if not (folder / "checkpoints").is_dir() and not (folder / "metrics.csv").is_file():
        return
    if not overwrite:
        raise UserError(
            f"{folder} already holds a run. Add --ckpt_path last to go on with it, --run FOLDER for another, or "
            "--overwrite true to replace it"
        )
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for pattern in ("events.out.tfevents.*", "*.csv", "*.png", "gain.json", "config.yaml"):
        for path in folder.glob(pattern):
            path.unlink()


def provenance(cli: TrainerCLI) -> dict[str, Any]:
    """What a checkpoint says of its origin; plain values only, so that safe loading works."""
    from importlib.metadata import version

    import adaflash

    names = ("torch", "lightning", "transformers", "jsonargparse")
    config = cli.config[cli.subcommand].clone()
    config.pop("config", None)
    text = cli._subcommand_parsers[cli.subcommand].dump(config, skip_link_targets=False, skip_none=False)
    versions = {"adaflash": adaflash.__version__, **{name: version(name) for name in names}}
    return {"config": text, "command": " ".join(sys.argv), "versions": versions}
