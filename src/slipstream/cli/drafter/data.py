"""`slipstream drafter data`: the training data of a drafter, written by the model that it is for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.console import progress_bar, say
from slipstream.cli.options import ALL_REDUCE_HELP, TP_HELP, Dtype
from slipstream.errors import DataError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.lab.diagnosis import Progress
    from slipstream.train.data_file import DataFile
    from slipstream.train.writing import Batch, Tally, Wishes

_COUNT = 1000


def data(
    out: Annotated[Path, typer.Option(help="The file to write: one conversation a line.")],
    model: Annotated[
        str, typer.Option(help="The model that the drafter is for: a name, a folder, a .gguf file or an id.")
    ] = "smollm2-135m",
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Answer the conversations of this .jsonl file; without it, the model asks too."
        ),
    ] = None,
    conversations: Annotated[
        int | None,
        typer.Option(min=1, help=f"How many; default: all of --from, else {_COUNT} or what --minutes allow."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of the answers that are not greedy.")] = 0.8,
    greedy_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of conversations that are answered greedily.")
    ] = 0.8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 512,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="With --from: the longest conversation; default: 2048 tokens.")
    ] = None,
    user_tokens: Annotated[
        int, typer.Option(min=2, help="Without --from: the longest user's turn, in tokens.")
    ] = 96,
    free_share: Annotated[
        float,
        typer.Option(min=0, max=1, help="Without --from: share of user's turns without given first words."),
    ] = 0.2,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Conversations at once; default: 32; on a GPU 1024, with --from 64."),
    ] = None,
    keep_loops: Annotated[
        bool, typer.Option("--keep-loops", help="Keep answers that repeat themselves.")
    ] = False,
    seed: Annotated[int, typer.Option(help="The same seed writes the same file.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="Number format of the computation.")] = Dtype.AUTO,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="End in time for that many, with what is done.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew if the file is there.")] = False,
    tp: Annotated[int, typer.Option(min=1, help=f"With --from: {TP_HELP[0].lower()}{TP_HELP[1:]}")] = 1,
    all_reduce: Annotated[str, typer.Option(help=ALL_REDUCE_HELP)] = "auto",
) -> None:
    """Write training data with the model itself.

    A drafter learns to guess what its model says, so the model must have said it. With --from, it answers every turn of
    given conversations anew ("conversations" or "messages", or a "prompt", one JSON object a line). Without, it writes
    both sides. The same command continues a file that was interrupted.
    """
    from slipstream.collectives.meeting import under_torchrun
    from slipstream.engine.request import SamplingParams
    from slipstream.train.data_file import DataFile
    from slipstream.train.writing import Tally, Wishes, write

    SamplingParams(max_new_tokens, temperature, seed=seed)  # refuses what is out of range
    wishes = Wishes(
        temperature, greedy_share, max_new_tokens, user_tokens, free_share, keep_loops=keep_loops, seed=seed
    )
    until_s = None if minutes is None else perf_counter() + 60 * minutes
    check_device(device)
    if tp > 1 and (not source or under_torchrun()):
        raise SlipstreamError("--tp is for --from, and starts its ranks itself")
    if source and source.resolve() == out.resolve():
        raise DataError(f"{out} is what --from reads; write another file")
    batch = batch or (32 if device == "cpu" else 64 if source else 1024)
    settings: dict[str, Any] = {
        "asks": "--from" if source else "the model",
        "model": model,
        "dtype": str(dtype),
    }
    settings |= asdict(wishes)
    settings |= {"max_length": max_length, "sha256": _sha256(source)} if source else {"batch": batch}
    with DataFile(out, settings, overwrite=overwrite) as file:
        before, tally, is_whole = file.lines, Tally(), True
        loads = Loads(model, dtype.value, device, max_length, tp, all_reduce)
        with progress_bar() as bar:
            show = _Shown(bar, minutes, file.last_index + 1)
            if source:
                batches = _answers(loads, source, conversations, wishes, batch, file, show)
            else:
                batches = _inventions(loads, conversations, minutes, wishes, batch, file, show)
            start = perf_counter()
            try:
                write(file, batches, until_s, tally, show.tally)
            except KeyboardInterrupt:
                is_whole = False
    print(_summary(out, before, tally, perf_counter() - start, wishes))
    if not is_whole:
        say("interrupted; the same command continues")
        raise typer.Exit(130)


@dataclass(frozen=True)
class Loads:
    """Which model, and how it is loaded."""

    model: str
    dtype: str
    device: str
    max_length: int | None
    tp: int
    all_reduce: str


class _Shown:
    """What a run shows while it works: conversations, or where their number is open, minutes."""

    def __init__(self, bar: Progress, minutes: float | None, before: int) -> None:
        self._bar, self._minutes, self._before = bar, minutes, before
        self._start = perf_counter()
        self.total: int | None = None

    def tally(self, tally: Tally) -> None:
        """After a batch."""
        self.conversations(self._before + tally.conversations)

    def conversations(self, done: float) -> None:
        """Within a batch."""
        if self.total:
            self._bar("writing conversations", min(int(done), self.total), self.total)
        elif self._minutes:
            total = max(1, round(60 * self._minutes))
            self._bar("writing (seconds)", min(total, int(perf_counter() - self._start)), total)


def _answers(
    loads: Loads,
    source: Path,
    conversations: int | None,
    wishes: Wishes,
    batch: int,
    file: DataFile,
    show: _Shown,
) -> Iterator[Batch]:
    from slipstream.train.regenerate import read_talks, regenerate

    talks = read_talks(source)[:conversations]
    show.total = len(talks)
    import slipstream

    engine = slipstream.Engine(
        loads.model,
        draft=None,  # a full batch has no idle arithmetic that guesses could use
        dtype=loads.dtype,
        max_length=loads.max_length,
        max_batch=batch,
        device=loads.device,
        tp=loads.tp,
        all_reduce=loads.all_reduce,
    )
    return regenerate(engine, talks, wishes, batch, begin=max(0, file.last_index), skip=file.last_count)


def _inventions(
    loads: Loads,
    conversations: int | None,
    minutes: float | None,
    wishes: Wishes,
    batch: int,
    file: DataFile,
    show: _Shown,
) -> Iterator[Batch]:
    from slipstream.target.load import load
    from slipstream.train.invent import TEMPLATE_ROOM, invent

    show.total = conversations or (None if minutes else _COUNT)
    positions = wishes.user_tokens + wishes.max_new_tokens + TEMPLATE_ROOM
    model = load(loads.model, dtype=loads.dtype, device=loads.device, positions=positions)
    begin = file.last_index + 1
    return invent(
        model, wishes, batch, loads.device, begin=begin, count=show.total, progress=show.conversations
    )


def check_device(device: str) -> None:
    import torch

    if device not in ("cpu", "cuda") and not device.startswith("cuda:"):
        raise SlipstreamError(f"--device is {device!r}; it must be cpu or cuda")
    if device != "cpu" and not torch.cuda.is_available():
        raise SlipstreamError(f"--device {device}: torch finds no GPU that it can use here")


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _summary(out: Path, before: int, tally: Tally, elapsed_s: float, wishes: Wishes) -> str:
    """What was done, in a few lines; counts of zero are not worth one."""
    lines = [
        f"{out}: {before + tally.lines:,} conversations, {before:,} of them from before.",
        f"{tally.answer_tokens:,} answer tokens in {elapsed_s:.0f} s, {tally.answer_tokens / elapsed_s:.0f} a second.",
    ]
    notes = {
        "Answers left out because they repeat themselves": tally.loops,
        "Answers left out because a side said nothing": tally.empty,
        "Conversations ended because the next answer would not fit": tally.too_long,
        "Conversations ended because the chat template refused a turn": tally.refused,
        f"Answers cut at {wishes.max_new_tokens} tokens, and kept": tally.cut,
    }
    return "\n".join([*lines, *(f"{what}: {count:,}." for what, count in notes.items() if count)])
