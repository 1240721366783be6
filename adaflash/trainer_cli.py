"""fit, validate, test and predict: LightningCLI with our model, our data and readable errors."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from adaflash.callbacks.acceptance import AcceptanceMonitor
from adaflash.callbacks.gain_table import GainTable
from adaflash.callbacks.nan_guard import NaNGuard
from adaflash.callbacks.provenance_file import ProvenanceFile
from adaflash.checkpoint import WholeCheckpoints, resolve
from adaflash.configuration import PACKAGED
from adaflash.data.prompts import PromptDataModule
from adaflash.errors import UserError
from adaflash.module import AdaFlashModule
from adaflash.parallel.failing import FailTogether
from adaflash.parallel.strategy import check_strategy
from adaflash.parser import Parser, shortened
from adaflash.provenance import provenance
from adaflash.run_folder import ClearFolder, loggers, room_for, writable
from adaflash.saving import LastCheckpoint
from adaflash.stopping import Stopped
from adaflash.trainer_flags import check_callbacks, check_flags

BASE = PACKAGED / "base.yaml"
OWN_KEYS = {"acceptance": AcceptanceMonitor, "gain": GainTable, "nan_guard": NaNGuard, "last": LastCheckpoint}
_PLAIN_YAML = jsonargparse.get_loader("yaml")


def run(words: list[str]) -> int:
    """Run one of LightningCLI's commands; returns the exit status. What goes wrong is raised."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in record.getMessage()
    )
    warnings.filterwarnings("ignore", message=".*exists and is not empty.*")  # `loggers` has set aside what is kept
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # between Lightning and torch, nothing of ours
    sys.argv = ["adaflash", *words]
    try:
        TrainerCLI()
    except Stopped as stopped:
        rank_zero_only(print)(f"adaflash {words[0]}: {stopped}", file=sys.stderr)
        return stopped.status
    except MisconfigurationException as error:
        raise UserError(f"Lightning refuses these settings: {error}") from error
    except RuntimeError as error:
        if "Error(s) in loading state_dict" not in str(error):
            raise
        raise UserError(f"the checkpoint does not fit this config: {error}") from error
    except SystemExit as left:
        if isinstance(left.__context__, KeyboardInterrupt):  # Lightning turns a Ctrl-C into `exit(1)`
            raise KeyboardInterrupt from None
        raise
    return 0


class TrainerCLI(LightningCLI):
    """The model and the data are fixed classes; everything inside them is a line of YAML."""

    def __init__(self, args: list[str] | None = None, run: bool = True) -> None:
        self._replaced: list[Path] = []  # what `--overwrite` takes away once the new run is ready to begin
        jsonargparse.set_loader("yaml", _load_yaml, exceptions=(yaml.YAMLError,))
        base = {"default_config_files": [str(BASE)]}
        defaults = dict.fromkeys(self.subcommands(), base) if run else base
        super().__init__(
            AdaFlashModule,
            PromptDataModule,
            args=args,
            run=run,
            parser_class=Parser,
            auto_configure_optimizers=False,
            seed_everything_default=42,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"inference_mode": False, "callbacks": [ProvenanceFile()]},
            parser_kwargs={"allow_abbrev": False, "default_env": True, "env_prefix": "ADAFLASH", **defaults},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """One name for the target, one folder for the run, and the callbacks that no overlay can drop."""
        parser.add_argument(
            "--target", type=str, default="", help="Fetched name, local directory or Hub id of the target."
        )
        parser.add_argument(
            "--run", type=str, default="runs/adaflash", help="Folder of this run: logs and checkpoints."
        )
        parser.add_argument("--overwrite", type=bool, default=False, help="Replace what the run folder holds.")
        parser.link_arguments("target", "model.target")
        parser.link_arguments("target", "data.target")
        parser.link_arguments("run", "trainer.default_root_dir")
        parser.add_lightning_class_args(AcceptanceMonitor, "acceptance")
        parser.add_lightning_class_args(GainTable, "gain")
        parser.add_lightning_class_args(NaNGuard, "nan_guard")
        parser.add_lightning_class_args(LastCheckpoint, "last")
        parser.add_lightning_class_args(ModelCheckpoint, "best")

    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning would merge the checkpoint's hyper-parameters over the command line (LIGHTNING 2.4)."""

    def before_instantiate_classes(self) -> None:
        """Stop a run that would mix with another before anything is loaded."""
        config = self._settings
        if not config.target:
            raise UserError("no target: add --target NAME (a fetched name, a local directory or a Hub id)")
        if self.subcommand:
            writable(Path(config.run))
        if config.get("ckpt_path"):
            folder = Path(config.last.dirpath or Path(config.run) / "checkpoints")
            config.ckpt_path = resolve(config.ckpt_path, folder) or None
            if not config.ckpt_path:
                rank_zero_info(f"{folder} holds no checkpoint yet: the run begins with update 1")
        elif self.subcommand == "fit":
            self._replaced = room_for(Path(config.run), config.overwrite)

    def instantiate_classes(self) -> None:
        """Build trainer, model and data; a value that a class refuses is the user's to mend."""
        try:
            super().instantiate_classes()
        except UserError:
            raise
        except MisconfigurationException as error:
            raise UserError(f"trainer: {error}") from error
        except (ValueError, TypeError) as error:
            raise UserError(shortened(str(error))) from error
        config = self._settings.clone()
        config.pop("config", None)
        text = self._parser(self.subcommand).dump(config, skip_link_targets=False)
        self.model.provenance = provenance(text, config.seed_everything)

    @property
    def _settings(self) -> Any:
        """The parsed config of the command, or of the whole when only building."""
        return self.config[self.subcommand] if self.subcommand else self.config

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Trainer:
        check_strategy(config.get("strategy"))
        check_flags(config)
        given = config.get("callbacks") or []
        check_callbacks(given, OWN_KEYS)
        bars = [each for each in given if isinstance(each, ProgressBar)]
        none = config.get("enable_progress_bar") is False
        spare: list[Any] = bars if none else bars[:-1]  # Lightning takes one bar, or none
        if config.get("logger") is False:
            spare += [each for each in given if isinstance(each, LearningRateMonitor)]  # it refuses to be without
        config["callbacks"] = [each for each in given if each not in spare]
        if config.get("logger") in (None, True):
            config["logger"] = loggers(config["default_root_dir"], self.subcommand or "fit")
        signals = [each.signals for each in callbacks if isinstance(each, LastCheckpoint)]
        config["callbacks"] = [
            *signals,
            FailTogether(),
            ClearFolder(self._replaced),
            *config["callbacks"],
        ]  # they must listen before anyone else works
        plugins = config.get("plugins") or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        if not any(isinstance(each, CheckpointIO) for each in plugins):
            config["plugins"] = [*plugins, WholeCheckpoints()]
        return super()._instantiate_trainer(config, callbacks)


def _load_yaml(text: str) -> Any:
    """YAML as jsonargparse reads it, less the `include` list, which has been expanded on the command line already."""
    content = _PLAIN_YAML(text)
    if isinstance(content, dict):
        content.pop("include", None)
    return content
