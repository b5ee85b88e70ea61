"""What a reading means, in a few sentences for a person in trouble."""

from __future__ import annotations

from slipstream.lab.traces.reading import Reading, StepKind

NOTICEABLE = 0.1
"""A share of the cycle below which a cost is not worth a sentence."""


def sentences(reading: Reading) -> list[str]:
    """The most important first."""
    cost = reading.cost
    wall = cost.wall_us or cost.total_us
    waiting = host_wait_us(reading)
    talking = sum(part.us for part in cost.collectives())
    result = [_whole(reading, wall, waiting)]
    findings = [(talking, _communication(reading, wall)), (waiting, _waiting(reading, waiting))]
    result += [text for us, text in sorted(findings, reverse=True) if us > NOTICEABLE * wall and text]
    graphs = _graphs(reading)
    if graphs:
        result.append(graphs)
    return result


def host_wait_us(reading: Reading) -> float:
    """Microseconds a cycle in which the GPU had nothing to do because the host had not launched it."""
    return sum(part.us for part in reading.cost.parts if part.name in ("launch", "host_sync"))


def _whole(reading: Reading, wall: float, waiting: float) -> str:
    cost = reading.cost
    name = next(iter(reading.costs))
    between = sum(part.us for part in cost.parts if part.name == "between_kernels")
    busy = cost.total_us - waiting - between
    return (
        f"A cycle ({name}, mean of {cost.cycles}) takes {_ms(wall)}: the GPU is busy for {_ms(busy)}, waits "
        f"{_ms(waiting)} ({waiting / wall:.0%}) for the host, and spends {_ms(between)} between "
        "kernels that were queued already."
    )


def _communication(reading: Reading, wall: float) -> str:
    parts = reading.cost.collectives()
    if not parts:
        return ""
    exposed = sum(part.us for part in parts)
    hidden = sum(part.traffic.overlapped_us for part in parts if part.traffic)
    count = sum(part.count or 0 for part in parts)
    kinds = sorted({part.name.replace("_", "-") for part in parts})
    what = f"{kinds[0]}s" if len(kinds) == 1 else f"collectives ({', '.join(kinds)})"
    text = (
        f"{count:.0f} {what} a cycle take {_ms(exposed + hidden)}, of which {_ms(exposed)} ({exposed / wall:.0%} of "
        "the cycle) are not hidden behind computing"
    )
    wire = [part.traffic.wire_us for part in parts if part.traffic and part.traffic.wire_us is not None]
    if len(wire) < len(parts):
        return f"{text}; with one rank traced, waiting for slower ranks is part of it."
    skew = sum(part.traffic.skew_us or 0.0 for part in parts if part.traffic)
    worse = (
        "the ranks arrive at different times, so a faster all-reduce alone would save only the wire time"
        if skew > sum(wire)
        else "the transfer itself is what costs"
    )
    return f"{text}: {_ms(sum(wire))} on the wire and {_ms(skew)} waiting for the slowest rank; {worse}."


def _waiting(reading: Reading, waiting: float) -> str:
    after = sum(part.us for part in reading.cost.parts if part.name == "host_sync")
    launches = f"the host makes {reading.launches:.0f} launches a cycle"
    first = reading.waits[0] if reading.waits else None
    if first and after > 0.2 * waiting:
        where = f" in {first.where}" if first.where else ""
        one_by_one = (
            f"; after that {launches}, and for {_ms(waiting - after)} the GPU waits for one after the other"
            if waiting - after > 0.2 * waiting
            else ""
        )
        return (
            f"The GPU waits because the host waits for the GPU: `{first.call}`{where} stops it until the results are "
            f"there, and {_ms(after)} pass from then to the next kernel{one_by_one}."
        )
    stops = (
        f"no call of it waits longer than {_us(reading.longest_wait_us)}"
        if reading.longest_wait_us
        else "it waits for nothing"
    )
    return (
        f"The GPU waits because the host is too slow, not because it is stopped ({stops}): {launches}, and the GPU is "
        f"done before the next one comes. Phases that wait most: {_waiting_most(reading)}."
    )


def _waiting_most(reading: Reading) -> str:
    of: dict[str, float] = {}
    for part in reading.cost.parts:
        if part.name in ("launch", "host_sync"):
            phase = {"commit": "extend", "host": "between cycles"}.get(part.phase, part.phase)
            of[phase] = of.get(phase, 0.0) + part.us
    most = sorted(of.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{phase} {_ms(us)}" for phase, us in most)


def _graphs(reading: Reading) -> str:
    """Steps of the target that did not run as one graph, beside others that did."""
    mains = [kind for kind in reading.kinds if kind.phase in ("verify", "decode")]
    whole = [kind for kind in mains if 1 <= kind.graphs < 2 and kind.graph_kernels > 0.5 * kind.kernels]
    pieces = [kind for kind in mains if kind not in whole]
    if not pieces:
        return ""
    names = ", ".join(f"{_name(kind)} {_ms(kind.total_us)}" for kind in pieces)
    how = _how(pieces[0])
    if not whole:
        return f"No {pieces[0].phase} step ran as one CUDA graph ({how}): {names}."
    best = min(whole, key=lambda kind: kind.total_us)
    return (
        f"Steps that do not run as one CUDA graph ({how}) cost more: {names}, against {_ms(best.total_us)} of "
        f"{_name(best)}, which does."
    )


def _name(kind: StepKind) -> str:
    return kind.phase if kind.rows is None else f"{kind.phase} with {kind.rows} row{'s' * (kind.rows != 1)}"


def _how(kind: StepKind) -> str:
    if not kind.graphs:
        return f"{kind.kernels:.0f} kernels launched one by one"
    return (
        f"{kind.graphs:.0f} pieces of graphs and {kind.kernels - kind.graph_kernels:.0f} kernels beside them"
    )


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f} ms"


def _us(us: float) -> str:
    return f"{us:.0f} us" if us < 1000 else _ms(us)
