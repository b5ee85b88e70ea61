"""A whole training: what `slipstream drafter train` does, from data to a drafter on disk, kept at every step."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from slipstream.draft.eagle3.checkpoint import Checkpoint, save
from slipstream.draft.eagle3.shape import weight_names
from slipstream.errors import DataError
from slipstream.target.load import LoadedModel
from slipstream.train.acceptance import Acceptance
from slipstream.train.begin import Design, export, fine_tune, from_scratch
from slipstream.train.evaluate import teacher_forced
from slipstream.train.losses import States
from slipstream.train.offline import OfflineStates, states_bytes, write_states
from slipstream.train.ranks import Ranks, shard
from slipstream.train.resume import STATE, load_state, save_state, settings_of
from slipstream.train.samples import Samples
from slipstream.train.states import OnlineStates
from slipstream.train.trainer import Recipe, Trainer, Update, full

Say = Callable[[str], None]
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Job:
    """What is asked for."""

    out: Path
    recipe: Recipe
    design: Design = field(default_factory=Design)
    start: Checkpoint | None = None
    """A drafter to fine-tune; None begins from scratch."""
    held_out: int = 512
    """Samples that are not trained on, at most a tenth of all."""
    save_every: int = 200
    """Updates between two states to go on from."""
    eval_every: int = 0
    """Updates between two evaluations on what was held out; 0 evaluates at the end alone."""
    minutes: float | None = None
    """Ends, after this time, at the update that it is at."""
    weights: str = "bfloat16"
    """The number format in which the drafter is written."""
    states: Path | None = None
    """A folder for the target's states; None computes them as they are needed."""
    overwrite: bool = False


def run(
    job: Job,
    model: LoadedModel,
    samples: Samples,
    ranks: Ranks,
    say: Say,
    on_update: Callable[[Update, float], None],
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Trains, and returns the facts that are also written to training.json. on_update: is told the tokens a second too.

    Interrupted by Ctrl-C, by its minutes or by a full disk, what was trained so far is kept. Raises SlipstreamError.
    """
    say_first = say if ranks.is_first else _nothing
    _prepare(job, ranks)
    trained, held = _split(samples, job)
    target, device = model.target, model.target.device
    if job.start is None:
        module, coverage = from_scratch(job.design, target, trained, job.recipe.seed)
    else:
        module, coverage = fine_tune(job.start, target, trained)
    say_first(
        f"{len(module.ids)} draft tokens cover {coverage:.2%} of the answers"
        + ("" if coverage > 0.9 else "; what they miss can never be drafted")
    )
    shard(module, ranks)
    assert module.shape.taps is not None
    online = OnlineStates(target, module.shape.taps)
    states = _states(job, model, trained, online, module.shape.taps, ranks, say_first, progress)
    trainer = Trainer(module, target, trained, states, job.recipe)
    settings = settings_of(trainer, _digest(trained))
    if load_state(job.out, trainer, settings):
        say_first(f"going on after update {trainer.done} of {trainer.total}")
    _, end = trainer.done, trainer.total
    log = _Log(job, ranks, trainer)
    facts: dict[str, Any] = {
        "target": model.name,
        "samples": len(trained),
        "held_out": len(held),
        "tokens": len(trained.tokens),
        "loss_tokens": int(trained.mask.sum()),
        "coverage": coverage,
        "recipe": asdict(job.recipe),
        "ranks": ranks.count,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }

    def evaluated() -> Acceptance:
        return teacher_forced(
            module,
            target,
            held,
            online,
            steps=job.recipe.steps,
            row_length=job.recipe.row_length,
            rows=job.recipe.rows,
            precision=job.recipe.precision,
        )

    def after(update: Update) -> bool:
        speed = log.update(update)
        on_update(update, speed)
        if update.number % job.save_every == 0 and update.number < end:
            save_state(job.out, trainer, settings)
        if job.eval_every and update.number % job.eval_every == 0 and update.number < end and len(held):
            log.evaluation(update.number, evaluated())
        return not log.is_over()

    was_interrupted = False
    try:
        trainer.run(after)
    except KeyboardInterrupt:
        was_interrupted = True
        say_first(f"interrupted after update {trainer.done}; keeping what was trained")
    save_state(job.out, trainer, settings)
    facts |= {"updates": trainer.done, "of": trainer.total, "interrupted": was_interrupted, **log.facts()}
    if len(held) and not was_interrupted:
        found = evaluated()
        log.evaluation(trainer.done, found)
        facts |= {"accepted": found.conditional, "evaluation": found.as_dict()}
    log.close()
    _write(job, trainer, facts, ranks, say_first)
    return facts


def _prepare(job: Job, ranks: Ranks) -> None:
    if job.save_every < 1 or job.held_out < 0:
        raise DataError("save_every must be at least 1, and held_out not negative")
    if not ranks.is_first:
        return
    try:
        job.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{job.out} cannot be made: {error}") from None
    if job.overwrite:
        (job.out / STATE).unlink(missing_ok=True)
        (job.out / "updates.jsonl").unlink(missing_ok=True)
    elif (job.out / "config.json").exists() and not (job.out / STATE).exists():
        raise DataError(
            f"{job.out} holds a drafter that cannot be gone on with; give another folder, or --overwrite"
        )


def _split(samples: Samples, job: Job) -> tuple[Samples, Samples]:
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(job.recipe.seed))
    count = min(job.held_out, len(samples) // 10)
    return samples.select(order[count:].sort().values), samples.select(order[:count].sort().values)


def _states(
    job: Job,
    model: LoadedModel,
    samples: Samples,
    online: OnlineStates,
    taps: tuple[int, ...],
    ranks: Ranks,
    say: Say,
    progress: Callable[[str, int, int], None],
) -> States:
    if job.states is None:
        return online
    size = states_bytes(samples, model.shape.hidden_size, len(taps), model.dtype)
    say(f"the target's states take {size / 1e9:.2f} GB in {job.states}")
    described = {
        "target": model.name,
        "taps": list(taps),
        "data": _digest(samples),
        "dtype": str(model.dtype),
    }
    if ranks.is_first:
        write_states(
            job.states, samples, online, size, described, lambda done, of: progress("states", done, of)
        )
    if ranks.count > 1:
        torch.distributed.barrier()
    return OfflineStates(job.states, samples, model.target.device)


def _write(job: Job, trainer: Trainer, facts: dict[str, Any], ranks: Ranks, say: Say) -> None:
    names = [name for name in weight_names(trainer.module.shape) if name != "d2t"]
    weights: dict[str, Tensor] = {name: full(trainer.module.weight(name).detach()) for name in names}
    if "d2t" in trainer.module.tensors():
        weights["d2t"] = trainer.module.tensors()["d2t"]
    if not ranks.is_first:
        return
    checkpoint = export(trainer.module, weights, job.start, _DTYPES[job.weights])
    try:
        for path in save(job.out, checkpoint, target_layers=trainer.target.shape.layers):
            say(f"wrote {path}")
        (job.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{job.out} cannot be written ({error}); the state of the training is kept there"
        ) from None


def _digest(samples: Samples) -> str:
    digest = hashlib.sha256()
    for part in (samples.tokens, samples.mask, samples.starts):
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _nothing(line: str) -> None:
    """Ranks other than the first say nothing."""


class _Log:
    """The figures of a training, on disk as they come: updates.jsonl, and TensorBoard's where it is installed."""

    def __init__(self, job: Job, ranks: Ranks, trainer: Trainer) -> None:
        self._minutes, self._trainer, self._began = job.minutes, trainer, perf_counter()
        self._tokens, self._updates, self._last = 0, 0, perf_counter()
        self._file = (job.out / "updates.jsonl").open("a", encoding="utf-8") if ranks.is_first else None
        self._board: Any = None
        if ranks.is_first:
            with contextlib.suppress(ImportError):
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(job.out / "tensorboard"), purge_step=trainer.done + 1)

    def update(self, update: Update) -> float:
        now = perf_counter()
        elapsed_s, self._last = now - self._last, now
        self._tokens, self._updates = self._tokens + update.tokens, self._updates + 1
        speed = update.tokens / elapsed_s
        figures = {
            "loss": update.loss,
            "gradient_norm": update.norm,
            "lr": update.lr,
            "tokens_a_second": speed,
        }
        figures |= {f"acceptance_{i + 1}": rate for i, rate in enumerate(update.accepted)}
        self._put(update.number, "train", figures)
        return speed

    def evaluation(self, number: int, found: Acceptance) -> None:
        figures = {f"acceptance_{i + 1}": rate for i, rate in enumerate(found.conditional)}
        self._put(number, "held_out", figures | {"tokens_a_cycle": found.tokens_a_cycle})
        self._last = perf_counter()

    def _put(self, number: int, where: str, figures: dict[str, float]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"update": number, "of": where, **figures}) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in figures.items():
                self._board.add_scalar(f"{where}/{name}", value, number)

    def is_over(self) -> bool:
        """All ranks answer alike, by the first one's clock."""
        over = self._minutes is not None and perf_counter() - self._began > 60 * self._minutes
        if self._trainer.ranks > 1 and self._minutes is not None:
            flag = torch.tensor([float(over)], device=self._trainer.device)
            torch.distributed.broadcast(flag, 0)
            over = bool(flag.item())
        return over

    def facts(self) -> dict[str, Any]:
        elapsed_s = perf_counter() - self._began
        is_cuda = self._trainer.device.type == "cuda"
        return {
            "trained_s": elapsed_s,
            "tokens_a_second": self._tokens / elapsed_s,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if is_cuda else _peak_rss_gb(),
        }

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _peak_rss_gb() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
