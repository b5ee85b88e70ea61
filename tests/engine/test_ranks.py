"""An engine of several processes: the real model, torchrun, and every way in which a rank can end."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import slipstream
from slipstream.engine import ranks
from slipstream.errors import ModelError, RankError, SlipstreamError
from slipstream.lab.prompts import load_prompts
from tests.target.tiny import write_model

FIXED = slipstream.SamplingParams(max_new_tokens=20, ignore_eos=True)
ENDLESS = slipstream.SamplingParams(max_new_tokens=200, ignore_eos=True)


@pytest.fixture(autouse=True)
def _own_place(monkeypatch, tmp_path_factory):
    """More ranks than cores may be started; their files lie where only this test's do, and must be gone after it."""
    monkeypatch.setenv("SLIPSTREAM_SHARE_CORES", "1")
    place = tmp_path_factory.mktemp("place")
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield
    gc.collect()
    assert list(place.iterdir()) == []
    assert list(Path("/dev/shm").glob("*slipstream*")) == []


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder, "llama")
    return str(folder)


def processes(engine) -> list[int]:
    return [process.pid for process in engine._group._ranks._processes.values()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pids, within_s=10):
    ends = time.monotonic() + within_s
    while any(map(is_running, pids)) and time.monotonic() < ends:
        time.sleep(0.05)
    return not any(map(is_running, pids))


def test_smollm2_on_two_ranks(smollm2):
    """The shipped prompts, one of each kind: token for token the text of one rank, plain and speculative."""
    chosen = {prompt.kind: prompt.prompt for prompt in load_prompts(None)}.values()
    expected = [each.token_ids for each in smollm2.generate_batch(list(chosen), FIXED, speculate=False)]
    engine = slipstream.Engine(dtype="float32", max_length=1024, tp=2)
    pids = processes(engine)
    assert engine.describe()["tp"] == 2
    for options in ({"speculate": False}, {"draft_tokens": 7}):
        got = engine.generate_batch(list(chosen), FIXED, **options)
        assert [each.token_ids for each in got] == expected
    costs = engine.step_costs((1, 8), rounds=1)
    assert costs.keys() == {1, 8}
    engine.close()
    assert wait_for_end(pids)
    with pytest.raises(RankError, match="closed"):
        engine.generate("Hello", FIXED)


def test_a_killed_rank_ends_the_run(tiny):
    """Within ten seconds, with one line that names it and where it was missed; no process or file is left."""
    engine = slipstream.Engine(tiny, dtype="float32", max_length=250, tp=3)
    assert engine.generate([1, 2, 3], FIXED).token_ids
    pids, killed = processes(engine), []

    def kill():
        killed.append(time.monotonic())
        os.kill(pids[0], signal.SIGKILL)

    threading.Timer(0.2, kill).start()
    with pytest.raises(RankError) as caught:  # noqa: PT012 - whichever step it happens in
        while True:
            engine.generate([1, 2, 3], ENDLESS)
    assert time.monotonic() - killed[0] < 10
    line = str(caught.value)
    assert "rank 1 was killed by SIGKILL" in line
    assert " of " in line.partition("waited for it in ")[2] or "broadcast" in line
    assert "\n" not in line
    assert wait_for_end(pids, 1)
    with pytest.raises(RankError, match="SIGKILL"):
        engine.generate([1, 2, 3], FIXED)


LEADER = """
import os, sys, threading, slipstream
if __name__ == "__main__":
    engine = slipstream.Engine(sys.argv[1], dtype="float32", max_length=250, tp=2)
    print(*[process.pid for process in engine._group._ranks._processes.values()], flush=True)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), 9)).start()
    while True:
        engine.generate([1, 2, 3], slipstream.SamplingParams(max_new_tokens=200, ignore_eos=True))
"""


def test_the_others_end_with_rank_0(tiny, tmp_path):
    (tmp_path / "leader.py").write_text(LEADER)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "leader.py"), tiny], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    assert wait_for_end([int(pid) for pid in done.stdout.split()])
    assert done.stderr.count("error: ") == 1
    assert "rank 0 has died" in done.stderr or "process that started the ranks has ended" in done.stderr


def test_an_engine_that_is_let_go_ends_its_ranks(tiny):
    engine = slipstream.Engine(tiny, dtype="float32", max_length=64, tp=2)
    pids = processes(engine)
    del engine
    gc.collect()
    assert wait_for_end(pids)


def test_an_interrupted_step_ends_the_ranks(tiny, monkeypatch):
    """Ctrl-C leaves the others in the middle of a step that this rank has left: the engine says so from then on."""
    engine = slipstream.Engine(tiny, dtype="float32", max_length=64, draft=None, tp=2)
    pids = processes(engine)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.model.target, "logits", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([1, 2, 3], FIXED)
    with pytest.raises(RankError, match="out of step"):
        engine.generate([1, 2, 3], FIXED)
    assert wait_for_end(pids)


def test_refusals(tiny, monkeypatch):
    """Each in one line, and no process stays."""
    with pytest.raises(
        ModelError, match=r"over 5 ranks \(4 attention heads\); these sizes work: 1, 2, 3, 4$"
    ):
        slipstream.Engine(tiny, dtype="float32", tp=5)
    with pytest.raises(SlipstreamError, match="tp is 0"):
        slipstream.Engine(tiny, dtype="float32", tp=0)
    monkeypatch.delenv("SLIPSTREAM_SHARE_CORES")
    with pytest.raises(SlipstreamError, match=f"machine with {ranks.cores()} cores"):
        slipstream.Engine(tiny, dtype="float32", tp=ranks.cores() + 1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SlipstreamError, match="torchrun started 3 ranks, but tp is 2"):
        slipstream.Engine(tiny, dtype="float32", tp=2)


def test_a_damaged_shard_is_refused(tmp_path):
    write_model(tmp_path, "llama", shard="40KB")
    damaged = sorted(tmp_path.glob("model-*.safetensors"))[1]
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(ModelError, match=damaged.name):
        slipstream.Engine(str(tmp_path), dtype="float32", tp=2)


def started_by_torchrun(commands):
    """One process a command, as torchrun would start them: (status, stdout, stderr) of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    size, running = str(len(commands)), []
    for rank, command in enumerate(commands):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "slipstream", *command],
                env=os.environ | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return [(*each.communicate(timeout=60), each.returncode)[::-1] for each in running]


def test_torchrun(tiny):
    """The same command in every process: rank 0 prints, the other one nothing."""
    prompt = "a b c d a b c"
    command = ["generate", prompt, "--model", tiny, "--raw", "--dtype", "float32", "--max-new-tokens", "20"]
    engine = slipstream.Engine(tiny, dtype="float32", draft=None)
    expected = engine.generate(prompt, slipstream.SamplingParams(max_new_tokens=20), raw=True).text
    first, second = started_by_torchrun([[*command, "--tp", "2"]] * 2)
    assert (first[0], first[2]) == (0, expected + "\n"), first
    assert second == (0, "", "")


def test_ranks_that_were_started_differently(tiny):
    command = ["generate", "a b c", "--model", tiny, "--raw", "--tp", "2", "--dtype"]
    first, second = started_by_torchrun([[*command, "float32"], [*command, "bfloat16"]])
    assert first[0] == second[0] == 1
    assert first[1].startswith("error: the ranks disagree about the settings")
    assert "bfloat16" in first[1]
    assert first[1].count("\n") == 1
    assert second[1:] == ("", "")
