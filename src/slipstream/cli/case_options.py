"""The options that describe a case: which machine, which model, how it is run."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slipstream.lab.predict import Shares
    from slipstream.machine.machine import Machine

MachineName = Annotated[
    str | None, typer.Option("--machine", help="A described machine or a .toml file; default: this machine.")
]
Shape = Annotated[str, typer.Option(help="The model: a name (slipstream shape lists them) or a config.json.")]
Rows = Annotated[
    int, typer.Option(min=1, help="Rows of the verify step: 1 + drafted tokens (1: plain only).")
]
Depth = Annotated[
    int | None, typer.Option(min=1, help="Depth of the draft, where it is a tree; default: a chain.")
]
Context = Annotated[int, typer.Option(min=1, help="Tokens that each row sees.")]
Batch = Annotated[int, typer.Option(min=1, help="Requests that run at once.")]
Tp = Annotated[int, typer.Option(min=1, help="Ranks that share the model (tensor parallelism).")]
Backend = Annotated[
    str | None,
    typer.Option("--all-reduce", help="What carries the all-reduces; default: nccl, on CPUs gloo."),
]
Setting = Annotated[
    str | None, typer.Option(help="Which of the machine's all-reduce curves; default: the first.")
]
Eager = Annotated[
    bool,
    typer.Option("--eager-verify", help="The verify step runs without a CUDA graph, plain decoding with."),
]
Acceptance = Annotated[
    float | None, typer.Option(min=0, max=1, help="Acceptance a position; default: 0.6 is assumed.")
]
DraftMs = Annotated[
    float | None, typer.Option(min=0, help="What drafting costs in a cycle; default: predicted.")
]
StoredWeights = Annotated[
    str | None, typer.Option("--weights", help="float32, bfloat16, int8 or int4; default: as the checkpoint.")
]
Dtype = Annotated[str, typer.Option(help="Of activations and KV: bfloat16 or float32.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of a rank, on a CPU.")]


class Drafter(StrEnum):
    """What drafts."""

    NGRAM = "ngram"
    EAGLE3 = "eagle3"


def find_machine(name: str | None) -> Machine:
    """This machine, or a described one."""
    from slipstream.machine.machine import Machine

    return Machine.here() if name is None else Machine.load(name)


def find_shares(machine: Machine, described: bool) -> Shares | None:
    """What slipstream predict --calibrate kept for this machine; a described one has the defaults."""
    from slipstream.lab import shares

    return None if described else shares.load(machine)
