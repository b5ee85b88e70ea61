"""What an engine reaches of its machine's ceilings, fitted to a few measured steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from math import log
from pathlib import Path
from typing import Protocol

from slipstream.errors import SlipstreamError
from slipstream.knobs import cache_dir
from slipstream.lab.predict import Settings, Shares, predict
from slipstream.machine.machine import Machine
from slipstream.target.shape import ModelShape

Steps = Mapping[tuple[int, int], float]
"""Microseconds of a cycle with one request and no drafting, by rows and context."""

CALIBRATION_ROWS, CALIBRATION_CONTEXTS = (1, 8, 32), (64, 2000)
"""What a calibration measures: each of the shares decides at least one of the corners."""

LOWEST, HIGHEST = 0.05, 4.0
"""Of every share: beyond that the ceilings are wrong, or the steps do not tell two shares apart."""


def fit(machine: Machine, shape: ModelShape, settings: Settings, steps: Steps) -> Shares:
    """The shares with the least squared error, relative, over the measured steps; at least one.

    settings: how the steps were run; rows and context come from the steps. A pattern search: the times are smooth
    and fall with every share, and four numbers need no more.
    """
    if not steps:
        raise ValueError("shares cannot be fitted to nothing")
    best, step = Shares(), 2.0
    error = _error(machine, shape, settings, steps, best)
    while step > 1.002:
        before = error
        for name in (field.name for field in fields(Shares)):
            for factor in (step, 1 / step):
                value = min(max(getattr(best, name) * factor, LOWEST), HIGHEST)
                tried = replace(best, **{name: value})
                found = _error(machine, shape, settings, steps, tried)
                if found < error:
                    best, error = tried, found
        if error > 0.999 * before:
            step **= 0.5
    return best


def predicted_us(
    machine: Machine, shape: ModelShape, settings: Settings, rows: int, context: int, shares: Shares
) -> float:
    """Microseconds of a cycle of so many rows, as the engine's own step costs are measured."""
    asked = replace(settings.plain(), drafted=rows - 1, context=context)
    return predict(machine, shape, asked, shares).total_us


def _error(machine: Machine, shape: ModelShape, settings: Settings, steps: Steps, shares: Shares) -> float:
    total = 0.0
    for (rows, context), us in steps.items():
        total += log(predicted_us(machine, shape, settings, rows, context, shares) / us) ** 2
    return total


class Stepped(Protocol):
    """What a calibration needs of an engine; `slipstream.Engine` has it."""

    def step_costs(self, rows: Sequence[int], *, context: int) -> dict[int, float]: ...


def measure(
    engine: Stepped, progress: Callable[[str, int, int], None] = lambda what, done, total: None
) -> Steps:
    """Times the steps of a calibration."""
    steps: dict[tuple[int, int], float] = {}
    for done, context in enumerate(CALIBRATION_CONTEXTS):
        progress(f"steps at {context} tokens of context", done, len(CALIBRATION_CONTEXTS))
        found = engine.step_costs(CALIBRATION_ROWS, context=context)
        steps |= {(rows, context): us for rows, us in found.items()}
    progress("done", len(CALIBRATION_CONTEXTS), len(CALIBRATION_CONTEXTS))
    return steps


def path_for(machine: Machine) -> Path:
    """Where the shares of a machine are kept, in the cache folder."""
    return cache_dir() / f"shares-{machine.fingerprint}.json"


def save(machine: Machine, shares: Shares) -> Path:
    """Keeps them for later predictions; where. Raises SlipstreamError."""
    path = path_for(machine)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(shares)) + "\n", encoding="utf-8")
    except OSError as error:
        raise SlipstreamError(f"cannot write {path}: {error.strerror}") from None
    return path


def load(machine: Machine) -> Shares | None:
    """What was kept; None where nothing was. Raises SlipstreamError for a file that is not one."""
    path = path_for(machine)
    if not path.exists():
        return None
    try:
        return Shares(**{name: float(value) for name, value in json.loads(path.read_text("utf-8")).items()})
    except (OSError, ValueError, TypeError, AttributeError):
        raise SlipstreamError(
            f"{path} is damaged: remove it, or run slipstream predict --calibrate"
        ) from None
