"""The publisher: versions that read back, a link that always points at a whole one, a server that is told or is down."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import fitting
import pytest
import tiny
import torch

from adaflash.callbacks.average import DrafterAverage
from adaflash.callbacks.publisher import Publisher, point, prune
from adaflash.errors import UserError
from adaflash.export.own import load_drafter


def fit(folder: Path, steps: int, *callbacks: Any) -> Any:
    trainer = fitting.trainer(folder, steps, callbacks, accumulate_grad_batches=2)
    module = fitting.module(tiny.target())
    trainer.fit(module, datamodule=fitting.data(folder, tiny.prompts(8)))
    return module


def versions(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "published").iterdir())


def test_versions_and_the_link(tmp_path: Path) -> None:
    module = fit(tmp_path, 5, Publisher(every=2, keep=2, dtype="float32"))
    assert versions(tmp_path) == ["latest", "step-00000004", "step-00000005"]  # 2 has gone; 5 is the end of training
    latest = tmp_path / "published" / "latest"
    assert os.readlink(latest) == "step-00000005"
    drafter, head = load_drafter(latest, module.target)
    assert all(torch.equal(drafter.state_dict()[name], value) for name, value in module.drafter.state_dict().items())
    assert all(torch.equal(head[f"head.{name}"], value) for name, value in module.length.head.state_dict().items())
    manifest = json.loads((latest / "adaflash.json").read_text())
    assert manifest["training"]["steps"] == 5 and manifest["written_for"] == "sglang"


@pytest.mark.parametrize("turned", [False, True])
def test_the_average_is_published(tmp_path: Path, turned: bool) -> None:
    callbacks = [Publisher(every=3, dtype="float32"), DrafterAverage(0.5)]
    module = fit(tmp_path, 3, *(callbacks[::-1] if turned else callbacks))
    published, _ = load_drafter(tmp_path / "published" / "latest", module.target)
    average = module.drafter.state_dict()  # what the module holds once training has ended
    assert all(torch.equal(published.state_dict()[name], value) for name, value in average.items())


class Server(BaseHTTPRequestHandler):
    told: list[dict[str, Any]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.told.append(body)
        self.send_response(200 if len(self.told) == 1 else 500)
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


def test_the_server_is_told_and_its_failure_is_counted(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    publisher = Publisher(every=1, reload=f"http://127.0.0.1:{server.server_port}/reload")
    with pytest.warns(UserWarning, match="update 2: publishing failed .*500"):
        fit(tmp_path, 2, publisher)
    server.shutdown()
    server.server_close()
    assert publisher.failed == 1
    assert Server.told == [{"folder": str(tmp_path / "published" / f"step-0000000{n}"), "step": n} for n in (1, 2)]
    gone = Publisher(every=1, reload=publisher.reload, timeout=0.5)
    with pytest.warns(UserWarning, match="publishing failed"):
        fit(tmp_path, 1, gone)
    assert gone.failed == 1


def test_the_link_is_never_missing_and_never_dangles(tmp_path: Path) -> None:
    for number in range(1, 5):
        (tmp_path / f"step-{number}").mkdir()
    point(tmp_path / "latest", tmp_path / "step-1")
    prune(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-4"]
    point(tmp_path / "latest", tmp_path / "step-4")
    prune(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-4"]


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep": 0}, {"timeout": 0}, {"reload": "server:80"}])
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="Publisher"):
        Publisher(**wrong)
