"""No waiting of the host for the device inside a cycle."""

from __future__ import annotations

from slipstream.lab.case import Case
from slipstream.lab.optimisations.base import Feasible, Optimisation, cpu_only


def feasible(case: Case) -> Feasible:
    """Where the host was seen to matter."""
    if (stop := cpu_only(case)) is not None:
        return stop
    if not case.fast.host_us:
        return Feasible(
            "untested", "no trace says what the host costs a cycle; read one with slipstream trace"
        )
    return Feasible("yes", f"the host was seen to take {case.fast.host_us / 1e3:.1f} ms a cycle")


OPTIMISATION = Optimisation(
    name="host_syncs",
    title="Removing host syncs from the cycle",
    effort="patch",
    gain="The device idles while the host reads accepted lengths, samples or sets up the next step.",
    feasible=feasible,
    change=lambda case: case.speculative(host_us=0.0),
    how={
        "slipstream": "lengths and tokens stay on the GPU; the host may read them one cycle late",
        "sglang": "leave the overlap scheduler on (no --disable-overlap-schedule); an attention backend that needs "
        "lengths on the CPU, and n-gram drafting, bring a sync back (decide_needs_cpu_seq_lens)",
        "vllm": "--async-scheduling; n-gram drafting on the GPU instead of the CPU",
    },
    risks=("A host that runs a cycle behind writes a few tokens beyond a stop: they must be cut.",),
    measure="slipstream trace: host syncs a cycle and what the device waits for; "
    "torch.cuda.set_sync_debug_mode('error') "
    "finds them.",
    sources=(
        "sglang#26171: EAGLE-3 about 1.0 x on Blackwell because of a sync",
        "SGLang 0.5.23, managers/overlap_utils.py",
    ),
)
