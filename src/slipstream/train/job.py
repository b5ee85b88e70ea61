"""A whole training: what `slipstream drafter train` does, from data to a drafter on disk, kept at every step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
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
from slipstream.train.interrupts import Interrupts
from slipstream.train.log import UPDATES, Log
from slipstream.train.losses import States
from slipstream.train.offline import OfflineStates, states_bytes, write_states
from slipstream.train.ranks import Ranks, any_of, settle, shard
from slipstream.train.resume import STATE, DiskError, load_state, save_state, settings_of, writing
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

    Interrupted by Ctrl-C, by its minutes, by a full disk or by bad data, what was trained so far is kept. Raises
    SlipstreamError.
    """
    say_first = say if ranks.is_first else _nothing
    _prepare(job, ranks)
    trained, held = _split(samples, job)
    target, device = model.target, model.target.device
    positions = job.recipe.row_length + job.recipe.steps
    if job.start is None:
        module, coverage = from_scratch(job.design, target, trained, job.recipe.seed, positions)
    else:
        module, coverage = fine_tune(job.start, target, trained, positions)
    say_first(
        f"{len(module.ids)} draft tokens cover {coverage:.2%} of the answers"
        + ("" if coverage > 0.9 else "; what they miss can never be drafted")
    )
    shard(module, ranks)
    assert module.shape.taps is not None
    online = OnlineStates(target, module.shape.taps)
    states = _states(job, model, trained, online, module.shape.taps, ranks, say_first, progress)
    trainer = Trainer(module, target, trained, states, job.recipe)
    settings = settings_of(
        trainer,
        data=_digest(trained.tokens, trained.mask, trained.starts),
        target=f"{model.name} in {str(model.dtype).removeprefix('torch.')}",
        start=_digest(*job.start.tensors.values()) if job.start else "random",
    )
    if load_state(job.out, trainer, settings):
        say_first(f"going on after update {trainer.done} of {trainer.total}")
    log = Log(job.out, ranks, trainer)
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
        found = teacher_forced(
            module,
            target,
            held,
            online,
            steps=job.recipe.steps,
            row_length=job.recipe.row_length,
            rows=job.recipe.rows,
            precision=job.recipe.precision,
        )
        settle(module)
        return found

    was_interrupted = False

    def after(update: Update) -> bool:
        nonlocal was_interrupted
        on_update(update, log.update(update))
        is_last = update.number == trainer.total
        if update.number % job.save_every == 0 and not is_last:
            save_state(job.out, trainer, settings)
        if job.eval_every and update.number % job.eval_every == 0 and not is_last and len(held):
            log.evaluation(update.number, evaluated())
        is_late = job.minutes is not None and log.elapsed_s > 60 * job.minutes
        was_interrupted, is_late = any_of((interrupts.asked and not is_last, is_late), ranks)
        return not (was_interrupted or is_late)

    with Interrupts(insisting=ranks.count == 1) as interrupts:
        try:
            trainer.run(after)
        except DiskError:
            raise
        except DataError:  # an update that cannot be made; those before it are whole
            save_state(job.out, trainer, settings)
            raise
        save_state(job.out, trainer, settings)
        if was_interrupted:
            say_first(f"interrupted after update {trainer.done} of {trainer.total}; the same command goes on")
        _write(job, trainer, ranks, say_first)
    facts |= {"updates": trainer.done, "of": trainer.total, "interrupted": was_interrupted, **log.facts()}
    if len(held) and not was_interrupted:
        found = evaluated()
        log.evaluation(trainer.done, found)
        facts |= {"accepted": found.conditional, "evaluation": found.as_dict()}
    log.close()
    if ranks.is_first:
        path = job.out / "training.json"
        with writing(path, "the drafter itself is written"):
            path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
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
        (job.out / UPDATES).unlink(missing_ok=True)
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
        "data": _digest(samples.tokens, samples.starts),
        "dtype": str(model.dtype),
    }
    write_states(
        job.states,
        samples,
        online,
        size,
        described,
        (lambda done, of: progress("states", done, of)) if ranks.is_first else lambda done, of: None,
        ranks.rank,
        ranks.count,
    )
    if ranks.count > 1:
        torch.distributed.barrier()
    return OfflineStates(job.states, samples, model.target.device)


def _write(job: Job, trainer: Trainer, ranks: Ranks, say: Say) -> None:
    names = [name for name in weight_names(trainer.module.shape) if name != "d2t"]
    weights: dict[str, Tensor] = {name: full(trainer.module.weight(name).detach()) for name in names}
    if "d2t" in trainer.module.tensors():
        weights["d2t"] = trainer.module.tensors()["d2t"]
    if not ranks.is_first:
        return
    checkpoint = export(trainer.module, weights, job.start, _DTYPES[job.weights])
    with writing(job.out / "config.json", "the state of the training is kept there"):
        for path in save(job.out, checkpoint, target_layers=trainer.target.shape.layers):
            say(f"wrote {path}")


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _nothing(line: str) -> None:
    """Ranks other than the first say nothing."""
