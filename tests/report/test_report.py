"""`adaflash report`: its numbers are the folder's, nothing breaks out of the page, and odd folders behave."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import pstdev

import folders
import pytest

from adaflash.cli import main
from adaflash.report import style, summary
from adaflash.report.command import write
from adaflash.report.draw import inline
from adaflash.report.reading import read_run, read_runs
from adaflash.report.training import acceptance

FIGURES = ("tau", "acceptance", "lengths", "calibration", "throughput", "cost", "losses")


class Page(HTMLParser):
    """Tags, ids and text of a page; fails on a tag that is closed in the wrong place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.whole(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture(scope="module")
def html(run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    output = tmp_path_factory.mktemp("out") / "report.html"
    write([run], output, f"title {folders.EVIL}")
    assert [path.name for path in output.parent.iterdir()] == ["report.html"]  # no half-written file stays
    return output.read_text()


def test_every_figure_has_pictures_a_text_for_each_and_a_table(html: str) -> None:
    page = Page(html)
    pictures = [each for each in page.all("svg") if each.get("role") == "img"]
    assert len(page.all("figure")) == len(FIGURES) and len(pictures) == 3 + 3 + 3 + 4 + 2 + 1 + 1
    assert all(len(each["aria-label"] or "") > 20 for each in pictures)
    assert {each.get("id") for each in page.all("section")} == {"summary", *FIGURES, "drafts", "provenance"}
    assert len(page.all("table")) == 1 + len(FIGURES) + 1
    hidden = [each for each in page.all("svg") if each.get("role") != "img"]
    assert all(each.get("aria-hidden") == "true" for each in hidden)


def test_ids_occur_once_and_links_inside_the_page_lead_somewhere(html: str) -> None:
    page = Page(html)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:href="#|url\(#)([^")]+)', html)
    assert used and set(used) <= set(ids)


def test_nothing_leaves_the_page_and_nothing_runs_in_it(html: str) -> None:
    page = Page(html)
    assert not page.all("script") and "<script" not in html
    assert page.text.count("<script>alert('x')</script>") >= 3  # heading, prompt, candidate: shown, not run
    for name in ("src", "href", "xlink:href"):
        links = [attributes[name] or "" for _, attributes in page.tags if name in attributes]
        assert all(link.startswith(("#", "data:")) for link in links)
    policy = next(each["content"] for each in page.all("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith("default-src 'none'")


def test_colours_come_from_the_page(html: str) -> None:
    drawn = re.findall(r'<svg role="img".*?</svg>', html, re.DOTALL)
    assert drawn and not re.findall(r"#[0-9a-fA-F]{6}\b", " ".join(drawn))
    assert "var(--s0)" in drawn[0] and "--s0: #" in html


def test_numbers_are_those_of_the_folder(run: Path, html: str) -> None:
    """By hand: chat commits 100 + 42, math 100 + 133 tokens in 100 rounds each."""
    row = dict(zip(summary.COLUMNS, summary.summary([read_run(run, "mine")]).rows[0], strict=True))
    assert row["tau before → now"] == f"1.00 → {(142 + 233) / 200:.2f}" and row["updates"] == "200"
    assert row["domain spread"] == f"{pstdev([1.42, 2.33]):.3f}"
    rates = [100 / 200, 52 / 100, 23 / 52]
    assert row["position spread"] == f"{pstdev(rates):.3f}"
    assert (
        row["speed ratio [95\u00a0%]"] == "1.20 [1.10, 1.30]" and row["verdict"] == "gain" and row["same text"] == "6/6"
    )
    assert row["mean L, plain steps"] == "3.00, 9%"
    assert row["active policy"] == "SurvivalLength(threshold=0.3)" and row["loss"] == "0.2 rkl"
    text = Page(html).text
    for part in (
        "1.20×",
        "Drafting pays here.",
        "abc123",
        ["torch", "2.13"][1],
        "0.4 / 2",
        "✓ accepted",
        "mine: every drafted round verified the whole block",
        "␣own",
        "⏎",
    ):
        assert part in text, part
    table = acceptance([read_run(run, "mine")]).table.rows
    assert ("mine", "math", "200", "2", "0.600", "70") in table and ("mine", "all", "200", "3", "0.442", "52") in table


def test_calibration_adds_up_positions_and_domains(run: Path) -> None:
    from adaflash.report.lengths import calibration

    rows = [row for row in calibration([read_run(run, "mine")]).table.rows if row[1] == "all"]
    assert rows == [
        ("mine", "all", "0.2–0.3", "600", "0.250", "0.300"),
        ("mine", "all", "0.7–0.8", "120", "0.750", "0.600"),
    ]


def test_a_run_that_was_killed_half_way(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows cut short, a damaged file, no gain: what is there is shown, what is missing is said."""
    killed = tmp_path / "killed"
    killed.mkdir()
    folders.validations(killed, {0: {"a": (0, 0, 0)}, 50: {"a": (40, 20, 5)}})
    content = (killed / "acceptance.csv").read_text()
    (killed / "acceptance.csv").write_text(content + content.splitlines()[-1][:30])
    (killed / "metrics.csv").write_text("step,loss/ce\n5,2.5\n6,")
    (killed / "gain.json").write_text('{"policy": "Adap')
    (killed / "drafts.jsonl").write_text('{"step": 50, "dom')
    (killed / "bench.jsonl").write_text('{"format": 1, "key"')
    assert main(["report", str(killed), str(run), "-o", str(tmp_path / "page.html")]) == 0
    text = Page((tmp_path / "page.html").read_text()).text
    assert "gain.json cannot be read (JSONDecodeError" in text and "No gain was measured" in text
    assert "No checkpoint tells where this run comes from" in text and "1.65" in text
    assert "killed: No gain was measured" in capsys.readouterr().err


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.yaml").write_text("model: {drafter: {class_path: adaflash.drafters.dflash.DFlash}}\n")
    assert main(["report", str(begun), "-o", str(tmp_path / "page.html")]) == 0
    page = Page((tmp_path / "page.html").read_text())
    assert "No validation was recorded: the run was stopped before its first one" in page.text
    assert not page.all("figure") and "not measured" in page.text


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ((), "holds no run of `adaflash fit`: there is none of config.yaml, acceptance.csv"),
        (("metrics.csv", "hparams.yaml"), "holds no run of `adaflash fit`"),
        (("config.yaml",), "holds no run of `adaflash fit`"),
        (("inner/acceptance.csv",), "Did you mean"),
        (None, "no such folder"),
    ],
)
def test_a_foreign_folder(
    tmp_path: Path, run: Path, files: tuple[str, ...] | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "foreign"
    for name in files or ():
        (foreign / name).parent.mkdir(parents=True, exist_ok=True)
        (foreign / name).write_text("step,loss\n1,2\n")
    if files == ():
        foreign.mkdir()
    assert main(["report", str(run), str(foreign), "-o", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert why in error and "foreign" in error and not (tmp_path / "page.html").exists()


def test_the_output_must_have_a_folder(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_one_folder_twice_is_one_run(run: Path) -> None:
    runs = read_runs([run, run.parent / "." / "mine"])
    assert [each.name for each in runs] == ["mine"] and "more than once" in runs[0].notes[0]


def test_runs_of_other_targets_are_not_compared_blindly(run: Path, tmp_path: Path) -> None:
    other = folders.whole(tmp_path / "else" / "mine", target="qwen3-8b", better=10)
    runs = read_runs([run, other])
    names = [each.name for each in runs]
    assert names[0].endswith("/mine") and len(set(names)) == 2
    [warning] = summary.warnings(runs)
    assert "different targets" in warning and "qwen3-8b" in warning and "smollm2-135m" in warning
    assert not summary.warnings([runs[0]])


def test_metrics_of_a_resumed_run_are_joined_and_the_later_ones_win(tmp_path: Path) -> None:
    folders.validations(tmp_path, {0: {"a": (0, 0, 0)}})
    (tmp_path / "metrics.1.csv").write_text("step,loss/ce\n1,9\n2,8\n")
    (tmp_path / "metrics.2.csv").write_text("step,loss/ce\n2,7\n3,nan\n")
    (tmp_path / "metrics.csv").write_text("loss/ce,step\n6,4\n")
    assert read_run(tmp_path, "x").metrics["loss/ce"] == {1: 9, 2: 7, 4: 6}


def test_bench_rows_of_an_older_checkpoint_are_left_out(tmp_path: Path) -> None:
    rows = folders.Rows(tmp_path / "bench.jsonl")
    for digest, ratio in (("old", 3.0), ("new", 1.0), ("new", 2.0)):
        row = folders.bench_row("full", 1, ratio)
        rows.append({**row, "key": {**row["key"], "checkpoint": digest}})
    assert [row["ratio"] for row in read_run(tmp_path, "x").bench] == [2.0]


def test_a_label_cannot_leave_its_attribute() -> None:
    made = inline('<?xml?><svg width="9pt" viewBox="0 0 10 10"><metadata>x</metadata></svg>', 'a" onload="b')
    assert made.startswith('<svg role="img" aria-label="a&#34; onload=&#34;b" style=') and "metadata" not in made


def luminance(color: str) -> list[float]:
    """Linear red, green, blue."""
    values = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def contrast(one: str, other: str) -> float:
    """WCAG's ratio."""
    light, dark = sorted(
        (sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), luminance(c), strict=True)) for c in (one, other)),
        reverse=True,
    )
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_every_colour_can_be_read_on_its_ground(mode: int) -> None:
    ground = style.COLORS["surface"][mode]
    for name in ("ink", "muted", *style.SERIES):
        assert contrast(style.COLORS[name][mode], ground) >= 4.5, name


# Machado, Oliveira and Fernandes 2009, severity 1
DICHROMATS = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


@pytest.mark.parametrize("kind", DICHROMATS)
@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_the_first_colours_stay_apart_for_the_colour_blind(kind: str, mode: int) -> None:
    """Of the first three series; the others differ in mark and dash too."""
    seen = {}
    for name in style.SERIES[:3]:
        linear = luminance(style.COLORS[name][mode])
        seen[name] = [
            max(sum(w * v for w, v in zip(row, linear, strict=True)), 0.0) ** (1 / 2.2) for row in DICHROMATS[kind]
        ]
    pairs = [(a, b) for a in seen for b in seen if a < b]
    for a, b in pairs:
        assert sum((x - y) ** 2 for x, y in zip(seen[a], seen[b], strict=True)) ** 0.5 > 0.15, (a, b)


def test_looks_differ_in_two_ways() -> None:
    looks = [style.look(number) for number in range(12)]
    for i, one in enumerate(looks):
        for other in looks[:i]:
            assert sum(a != b for a, b in zip(vars(one).values(), vars(other).values(), strict=True)) >= 2
