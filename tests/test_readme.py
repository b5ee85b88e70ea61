"""What the README shows is run: its Python, and its commands as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("slipstream")]


@pytest.mark.parametrize("code", blocks("python"))
def test_python(code: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tokens a cycle" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tmp_path: Path) -> None:
    (tmp_path / "my-prompts.jsonl").write_text('{"kind": "edit", "prompt": "Repeat this: a b c d a b c d"}\n')
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(shlex.split(command), cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_make_targets_and_links_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in [*re.findall(r"`make ([\w-]+)`", README), "demo"]:
        assert f"\n{target}:" in makefile, target
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
