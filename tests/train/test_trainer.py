"""Training learns, and is a function of its settings alone: accumulated, interrupted, and from states on disk."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file

from slipstream.draft.eagle3.checkpoint import load as load_drafter
from slipstream.errors import DataError
from slipstream.train.interrupts import Interrupts
from slipstream.train.log import Log
from slipstream.train.offline import OfflineStates, states_bytes, write_states
from slipstream.train.packing import updates
from slipstream.train.resume import STATE, DiskError, load_state, save_state, settings_of
from slipstream.train.samples import Samples
from slipstream.train.states import OnlineStates
from slipstream.train.trainer import Recipe, rate
from tests.train.training import (
    ALONE,
    RECIPE,
    TAPS,
    assert_same_bits,
    bits,
    changed,
    do,
    guessable,
    lengths_of,
    run_to,
    said_by,
    same_drafter,
    trainer_of,
)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return guessable(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(model):
    return model.target


@pytest.fixture(scope="module")
def samples(target):
    return said_by(target, lengths_of(24))


def test_what_can_be_guessed_is_learnt(target):
    samples = said_by(target, lengths_of(400))
    found = run_to(trainer_of(target, samples, changed(rows=8, epochs=4, lr=1e-2)))
    first, last = found[0], found[-1]
    assert last.number == last.of == len(found)
    assert max(first.accepted) < 0.2
    assert min(last.accepted) > 0.5
    assert last.loss < 0.7 * first.loss
    assert sum(each.tokens for each in found) <= 4 * len(samples.tokens)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_accumulated_forwards_are_one(target, samples, precision):
    """Two of four rows are one of eight: the same sums, in another order."""
    whole, parts = (
        trainer_of(target, samples, changed(rows=rows, accumulate=8 // rows, precision=precision))
        for rows in (8, 4)
    )
    [first], [second] = run_to(whole, 1), run_to(parts, 1)
    assert first.tokens == second.tokens
    tolerance = 1e-5 if precision == "float32" else 2e-2
    assert second.loss == pytest.approx(first.loss, rel=tolerance)
    assert second.norm == pytest.approx(first.norm, rel=tolerance)
    expected = bits(whole)
    for name, tensor in bits(parts).items():
        if not name.startswith("exp_avg "):
            continue
        wanted = expected[name]  # a tenth of the gradient
        torch.testing.assert_close(
            tensor, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()), msg=name
        )


@pytest.mark.parametrize("at", [0, 1, 3, 6])
def test_a_training_continues_bit_for_bit(target, samples, tmp_path, at):
    recipe = changed(epochs=2, warmup=0.3)
    whole = trainer_of(target, samples, recipe)
    assert whole.total > 6
    said = run_to(whole)
    before = trainer_of(target, samples, recipe)
    if at:
        run_to(before, at)
    assert before.done == at
    save_state(tmp_path, before, settings_of(before, data="a"))
    after = trainer_of(target, samples, recipe)
    assert load_state(tmp_path, after, settings_of(after, data="a"))
    assert_same_bits(bits(after), bits(before))
    assert run_to(after) == said[at:]
    assert_same_bits(bits(after), bits(whole))
    assert not list(tmp_path.glob(".*"))


def test_the_seed_decides(target, samples):
    runs = [trainer_of(target, samples, changed(seed=seed)) for seed in (0, 0, 1)]
    said = [run_to(each, 3) for each in runs]
    assert said[0] == said[1] != said[2]
    assert_same_bits(bits(runs[1]), bits(runs[0]))


def test_other_settings_do_not_continue(target, samples, tmp_path):
    first = trainer_of(target, samples)
    run_to(first, 1)
    save_state(tmp_path, first, settings_of(first, data="a", target="this"))
    for settings, data, words in (
        ({"lr": 1e-3, "steps": 2}, "a", "lr was 0.002 and is 0.001; steps was 3 and is 2"),
        ({}, "b", "data was 'a' and is 'b'"),
    ):
        other = trainer_of(target, samples, changed(**settings))
        with pytest.raises(DataError, match=r"other settings") as error:
            load_state(tmp_path, other, settings_of(other, data=data, target="this"))
        assert words in str(error.value)
        assert other.done == 0
    assert not load_state(tmp_path / "elsewhere", first, settings_of(first))


@pytest.mark.parametrize("kept", [0, 5, 300, -20])
def test_a_damaged_state_is_one_line(target, samples, tmp_path, kept):
    first = trainer_of(target, samples)
    save_state(tmp_path, first, settings_of(first))
    path = tmp_path / STATE
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"cannot be read: .*begin anew with --overwrite"):
        load_state(tmp_path, first, settings_of(first))


def test_a_state_that_cannot_be_written_leaves_the_one_before(target, samples, tmp_path, monkeypatch):
    trainer = trainer_of(target, samples)
    save_state(tmp_path, trainer, settings_of(trainer))
    before = (tmp_path / STATE).read_bytes()
    run_to(trainer, 1)

    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slipstream.train.resume.save_file", full_disk)
    with pytest.raises(DiskError, match=r"No space left on device.*; the state before is kept"):
        save_state(tmp_path, trainer, settings_of(trainer))
    assert (tmp_path / STATE).read_bytes() == before
    assert os.listdir(tmp_path) == [STATE]


def test_samples_of_one_token_and_updates_without_loss(target, samples, tmp_path):
    lengths = [1] * 40 + [2, 3, 4, 9]
    short = trainer_of(target, said_by(target, lengths), changed(row_length=9, rows=1))
    found = run_to(short)
    assert len(found) == short.total > 4
    assert all(update.loss >= 0 for update in found)
    silent = Samples(samples.tokens, torch.zeros_like(samples.mask), samples.starts)
    trainer = trainer_of(target, samples)
    trainer.samples = silent
    before = bits(trainer)
    with pytest.raises(DataError, match="update 1 has not one token that the loss is taken on"):
        run_to(trainer)
    assert_same_bits(bits(trainer), before)


def test_a_bad_update_keeps_those_before_it(model, tmp_path):
    """Rows of one sample each; the loss of one is missing, so that its update cannot be made."""
    samples = said_by(model.target, [32] * 12)
    recipe = changed(rows=1)
    order = [rows[0][0] for rows in updates(samples, 32, 1, recipe.seed, 1)]
    samples.mask[32 * order[5] : 32 * order[5] + 32] = False
    with pytest.raises(DataError, match="update 6 has not one token"):
        do(tmp_path / "out", model, samples, recipe, held_out=0)
    trainer = trainer_of(model.target, samples, recipe)
    run_to(trainer, 5)
    kept = load_file(tmp_path / "out" / STATE)
    for name, parameter in trainer.module.named_parameters():
        assert torch.equal(kept[f"weight.{name}"], parameter)


def test_a_gradient_that_is_not_finite_changes_nothing(target, samples):
    trainer = trainer_of(target, samples)
    with torch.no_grad():
        trainer.module.weight("fc.weight").mul_(float("inf"))
    before = bits(trainer)
    with pytest.raises(DataError, match="the gradient of update 1 is not finite"):
        run_to(trainer)
    for name, tensor in bits(trainer).items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)


def test_too_little_data_and_too_long_samples_are_refused(target, samples):
    with pytest.raises(DataError, match="does not fill one update of 4000 rows of 32 tokens"):
        trainer_of(target, samples, changed(rows=4000))
    with pytest.raises(DataError, match=r"a sample has \d+ tokens, rows have 16"):
        trainer_of(target, samples, changed(row_length=16))


@pytest.mark.parametrize(
    "settings",
    [
        *({name: 0} for name in ("steps", "row_length", "rows", "accumulate", "epochs", "decay", "clip")),
        {"lr": -1.0},
        {"lr": float("nan")},
        {"weight_decay": -1.0},
        {"warmup": 1.5},
        {"precision": "float16"},
    ],
)
def test_recipes_that_cannot_be(settings):
    with pytest.raises(DataError, match=next(iter(settings))):
        Recipe(**settings)


def test_the_rate_rises_and_falls():
    for total in (1, 2, 7, 50, 1000):
        for warmup in (0.0, 0.03, 0.5, 1.0):
            rates = [rate(update, total, warmup) for update in range(total)]
            assert all(0 < each <= 1 for each in rates)
            top = max(rates)
            assert top > 0.8 or total == 2
            peak = rates.index(top)
            assert rates[: peak + 1] == sorted(rates[: peak + 1])
            assert rates[peak:] == sorted(rates[peak:], reverse=True)


def described(target, samples):
    return {"target": "tiny", "data": str(len(samples))}


def write(folder, target, samples, **more):
    size = states_bytes(samples, 64, len(TAPS), target.dtype)
    done: list[int] = []
    write_states(
        folder,
        samples,
        OnlineStates(target, TAPS),
        size,
        described(target, samples),
        lambda number, of: done.append(number),
        **more,
    )
    return size, done


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_on_disk_train_the_same(tmp_path, monkeypatch, dtype):
    """Bit for bit, from one shard or from many, also from those of which some had to be computed again."""
    target = guessable(tmp_path / "model", dtype=dtype).target
    samples = said_by(target, lengths_of(40))
    online = trainer_of(target, samples)
    run_to(online)
    for shard_bytes in (1 << 30, 40_000 * target.dtype.itemsize // 2):
        monkeypatch.setattr("slipstream.train.offline._SHARD_BYTES", shard_bytes)
        folder = tmp_path / str(shard_bytes)
        write(folder, target, samples)
        offline = trainer_of(target, samples, states=OfflineStates(folder, samples, target.device))
        run_to(offline)
        assert_same_bits(bits(offline), bits(online))
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    before = [path.read_bytes() for path in shards]
    assert write(folder, target, samples)[1] == [len(samples)]  # nothing is left to do
    shards[1].unlink()
    shards[-1].unlink()
    with pytest.raises(DataError, match="is not whole"):
        OfflineStates(folder, samples, target.device)
    for rank in (0, 1):  # two ranks share the work
        write(folder, target, samples, rank=rank, ranks=2)
    assert [path.read_bytes() for path in shards] == before
    shards[0].write_bytes(before[0][:-5])
    with pytest.raises(DataError, match=f"{shards[0].name} is not whole"):
        OfflineStates(folder, samples, target.device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_size_is_known_before(tmp_path, dtype):
    target = guessable(tmp_path / "model", dtype=dtype).target
    samples = said_by(target, lengths_of(60))
    size, done = write(tmp_path / "states", target, samples)
    found = sum(path.stat().st_size for path in (tmp_path / "states").iterdir())
    assert found == pytest.approx(size, rel=0.02)
    assert done[-1] == len(samples)


def test_states_are_refused(target, samples, tmp_path, monkeypatch):
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**12, 0, 1000))
    with pytest.raises(DataError, match=r"the states need \d\.\d GB more, .* has 0\.0 GB free"):
        write(tmp_path / "small", target, samples)
    assert not list((tmp_path / "small").glob("*.safetensors"))
    monkeypatch.undo()
    write(tmp_path / "some", target, samples)
    fewer = samples.select(torch.arange(len(samples) - 1))
    with pytest.raises(DataError, match="holds the states of other samples"):
        write(tmp_path / "some", target, fewer)
    (tmp_path / "some" / "index.json").write_text('{"target"')
    with pytest.raises(DataError, match="cannot be read"):
        write(tmp_path / "some", target, samples)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot hold the states"):
        write(tmp_path / "file", target, samples)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slipstream.train.offline.save_file", full_disk)
    with pytest.raises(DataError, match="No space left on device; what was written before is kept"):
        write(tmp_path / "full", target, samples)


def test_a_job_from_states_is_the_same_job(model, tmp_path):
    samples = said_by(model.target, lengths_of(80))
    facts, _ = do(tmp_path / "online", model, samples)
    again, said = do(tmp_path / "offline", model, samples, states=tmp_path / "states")
    assert any("the target's states take 0.00 GB in" in line for line in said)
    assert same_drafter(load_drafter(tmp_path / "online"), load_drafter(tmp_path / "offline"))
    assert facts["evaluation"] == again["evaluation"]


def test_figures_are_in_tensorboard_and_in_a_file(model, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    samples = said_by(model.target, lengths_of(80))
    settings = {"eval_every": 4, "save_every": 3}
    do(tmp_path, model, samples, minutes=0.0, **settings)
    facts, said = do(tmp_path, model, samples, **settings)
    assert f"going on after update 1 of {facts['of']}" in said
    do(tmp_path, model, samples, **settings)  # once more, with nothing left to do
    lines = [json.loads(line) for line in (tmp_path / "updates.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["of"] == "train"]
    held_out = [line for line in lines if line["of"] == "held_out"]
    assert [line["update"] for line in trained] == list(range(1, facts["of"] + 1))
    assert [line["update"] for line in held_out] == [1, *range(4, facts["of"], 4), facts["of"]]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    for where, figures in (("train", trained), ("held_out", held_out)):
        for name in set(figures[0]) - {"update", "of"}:
            found = {event.step: event.value for event in board.Scalars(f"{where}/{name}")}
            assert found == pytest.approx({line["update"]: line[name] for line in figures}, rel=1e-5)
    assert {f"train/acceptance_{step}" for step in (1, 2, 3)} <= set(board.Tags()["scalars"])
    assert json.loads((tmp_path / "training.json").read_text())["updates"] == facts["of"]


def test_lines_of_updates_that_come_again_are_taken_out(target, samples, tmp_path):
    lines = [{"update": number, "of": "train", "loss": 1.0} for number in (1, 2, 3, 4)]
    path = tmp_path / "updates.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"update": 5, "o')
    trainer = trainer_of(target, samples)
    trainer.done = 2
    Log(tmp_path, ALONE, trainer).close()
    assert [json.loads(line)["update"] for line in path.read_text().splitlines()] == [1, 2]


def test_without_tensorboard_there_is_the_file(model, samples, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.summary.writer.record_writer", None)
    do(tmp_path, model, samples, held_out=0)
    assert not (tmp_path / "tensorboard").exists()
    assert (tmp_path / "updates.jsonl").read_text()


def test_an_interrupt_waits_for_its_update():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts(insisting=False) as interrupts:
        assert not interrupts.asked
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.asked
    assert signal.getsignal(signal.SIGTERM) is before
    with Interrupts(insisting=True):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_held_out_may_be_longer_than_all_that_is_trained_on(model, tmp_path):
    """Rotary tables reach as far as a row; evaluation does not fail at the end of a training."""
    samples = said_by(model.target, [9] * 60)
    recipe = changed(row_length=128, rows=1)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(recipe.seed))
    lengths = [9] * 60
    lengths[int(order[0])] = 120
    facts, _ = do(tmp_path, model, said_by(model.target, lengths), recipe)
    assert facts["evaluation"]["sums"]["seen"][0] > 90
    assert len(samples) == facts["samples"] + facts["held_out"]


def test_what_is_held_out_stays_the_same(model, samples, tmp_path):
    facts, _ = do(tmp_path, model, samples, held_out=1000)
    assert facts["held_out"] == len(samples) // 10
    assert dataclasses.asdict(RECIPE) == facts["recipe"]
    with pytest.raises(DataError, match=r"other settings .*data was"):
        do(tmp_path, model, samples, held_out=0)
