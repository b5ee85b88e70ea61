"""The page: self-contained, well-formed, escaped, and not blank in a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.lab.diagnosis import Diagnosis, diagnose
from slipstream.lab.prompts import KINDS, Prompt
from slipstream.lab.provenance import cpu_name, provenance
from slipstream.lab.report import check_writable, render, write_report
from tests.lab.fake import FakeEngine

EVIL = '<script>alert(1)</script> & "quotes" </pre> https://example.invalid {{ 7 * 7 }} \ud800'
VOID = {"meta", "link", "br", "img", "hr"}


def measure(engine: FakeEngine | None = None, text: str = "x") -> Diagnosis:
    prompts = [Prompt(kind, f"{kind} {text} {number}") for number in range(2) for kind in KINDS]
    return diagnose(
        engine or FakeEngine(), prompts, provenance=provenance(["slipstream"]), settings={}, max_new_tokens=32
    )


class Strict(HTMLParser):
    """Every element closed in order; collects what would be fetched, and the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.fetched.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    "engine",
    [
        FakeEngine(),
        FakeEngine(draft=None),
        FakeEngine(wrong="edit"),
        FakeEngine(interrupt_after=0),
        FakeEngine(interrupt_after=9),
        FakeEngine(gain=dict.fromkeys(KINDS, 1.0)),
    ],
)
def test_page_is_self_contained(engine: FakeEngine) -> None:
    engine.calls.clear()
    page = render(measure(engine))
    parser = Strict()
    parser.feed(page)
    parser.close()
    assert not parser.open
    assert "http" not in page
    assert "@import" not in page
    assert "url(" not in page.replace("url(#", "")
    assert all(target.startswith(("#", "data:")) for target in parser.fetched)
    assert not {"script", "iframe", "img"} & set(parser.seen)


def test_plots_have_ids_of_their_own() -> None:
    parser = Strict()
    parser.feed(render(measure()))
    assert parser.seen.count("svg") == 4
    clips = [one for one in parser.ids if one.startswith("p") and len(one) > 8]
    assert clips
    assert len(set(clips)) == len(clips)


def test_what_models_and_users_write_is_escaped() -> None:
    page = render(measure(text=EVIL))
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "{{ 7 * 7 }}" in page


def test_written_and_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert check_writable(folder) == []
    diagnosis = measure(text=EVIL)
    paths = write_report(diagnosis, folder)
    assert sorted(folder.iterdir()) == sorted(paths)
    assert check_writable(folder) == paths
    assert Diagnosis.from_json(json.loads(paths[0].read_text(encoding="utf-8"))).step_us == diagnosis.step_us


def test_unwritable_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for folder in (tmp_path / "file", tmp_path / "file" / "inner", Path("/proc/slipstream")):
        with pytest.raises(SlipstreamError, match="cannot write the report to"):
            check_writable(folder)


def test_cpu_name(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: Some CPU 3000\n", encoding="utf-8")
    assert cpu_name(path) == "Some CPU 3000"
    assert cpu_name(tmp_path / "none")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_browser_shows_it(tmp_path: Path) -> None:
    """A blank page compresses to a few kilobytes; this one, with its text and plots, does not."""
    _, page = write_report(measure(), tmp_path)
    shot = tmp_path / "shot.png"
    subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1180,1900",
         f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}", page.as_uri()],
        check=True, timeout=120, capture_output=True,
    )  # fmt: skip
    from matplotlib.image import imread

    pixels = imread(shot)[..., :3]
    assert pixels.shape[:2] == (1900, 1180)
    colours = {tuple(colour) for colour in (pixels[::7, ::7] * 255).astype(int).reshape(-1, 3)}
    assert len(colours) > 50
