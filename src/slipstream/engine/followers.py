"""Rank 0 decides, the other ranks follow: before it runs anything it tells them, and they run the same (design rule 4).

What it says is a row of whole numbers, one broadcast before each cycle; prompts and drafters follow theirs. Everything
that is decided from the text (what is drafted, what is accepted) each rank works out by itself, from the same bits. Now
and then, and whenever rank 0 has nothing more to do, the texts are compared.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum

import torch

from slipstream.collectives.interface import Collectives
from slipstream.draft.drafter import Drafter
from slipstream.engine.cycle import Outcome
from slipstream.engine.rank import Rank
from slipstream.engine.request import SamplingParams
from slipstream.engine.runner import Pending, Runner
from slipstream.errors import RankError, SlipstreamError

_CHECK_EVERY = 16
"""Cycles from one comparison of the texts to the next."""


class _Action(IntEnum):
    USE = 1
    BEGIN = 2
    REWIND = 3
    CYCLE = 4
    REST = 5
    CLOSE = 6


class _Refused(SlipstreamError):
    """No rank can use the drafter."""


_WORDS = 7
"""Of a message, besides one for each slot of a batch."""


class Leader(Runner):
    """Rank 0's runner: the ranks 1, 2, ... of its group, each of which is in `follow`, do as it does."""

    def __init__(self, control: Collectives, rank: Rank) -> None:
        """control: of tensors in the CPU's memory."""
        super().__init__(rank.model.target, rank.state)
        self.lag = rank.runner.lag
        self._control, self._rank, self._cycles = control, rank, 0

    def use(self, drafter: Drafter | None) -> None:
        """Attaches a drafter on every rank. SlipstreamError: none can; the old one stays."""
        try:
            made = pickle.dumps(drafter)
        except Exception as error:  # pickle raises what it likes
            raise _Refused(
                f"the drafter cannot be handed to the other ranks: {error}; it must be one that can be pickled"
            ) from None
        self._say(_Action.USE, len(made))
        self._control.broadcast(torch.frombuffer(bytearray(made), dtype=torch.uint8))
        _use(self._rank, drafter, self._control)

    def begin(
        self, drafter: Drafter | None, slot: int, prompt: Sequence[int], params: SamplingParams
    ) -> Outcome:
        choice = (_bits(params.temperature), params.top_k, _bits(params.top_p), params.seed)
        self._say(_Action.BEGIN, self._number(drafter), slot, len(prompt), *choice)
        self._control.broadcast(torch.tensor(prompt, dtype=torch.int64))
        return self._rank.runner.begin(drafter, slot, prompt, params)

    def rewind(self, slot: int, length: int) -> None:
        self._say(_Action.REWIND, slot, length)
        self._rank.runner.rewind(slot, length)

    def start(
        self, drafter: Drafter | None, slots: Sequence[int], size: int, extent: int, is_greedy: bool
    ) -> Pending:
        self._cycles += 1
        check = self.state.checksum(slots) if self._cycles % _CHECK_EVERY == 0 else 0
        shape = (self._number(drafter), size, extent, int(is_greedy), check, len(slots))
        self._say(_Action.CYCLE, *shape, *slots)
        return self._rank.runner.start(drafter, slots, size, extent, is_greedy)

    def rest(self) -> None:
        """There is nothing to do for now. Returns when the ranks have compared all texts: RankError if they differ."""
        self._say(_Action.REST, self.state.checksum(range(self.state.padding_slot)))
        self._control.barrier()

    def close(self) -> None:
        """This was all."""
        self._say(_Action.CLOSE)

    def _say(self, action: _Action, *words: int) -> None:
        message = [int(action), *words]
        room = _room(self._rank)
        self._control.broadcast(torch.tensor(message + [0] * (room - len(message)), dtype=torch.int64))

    def _number(self, drafter: Drafter | None) -> int:
        return [None, self._rank.drafter, self._rank.arbitrary].index(drafter)


@torch.inference_mode()
def follow(rank: Rank, control: Collectives) -> None:
    """Does as rank 0 says until it closes. Raises RankError where this rank's text is not rank 0's."""
    message, runner = torch.zeros(_room(rank), dtype=torch.int64), rank.runner
    while True:
        action, *words = control.broadcast(message).tolist()
        match action:
            case _Action.USE:
                made = control.broadcast(torch.zeros(words[0], dtype=torch.uint8))
                with suppress(_Refused):
                    _use(rank, pickle.loads(made.numpy().tobytes()), control)
            case _Action.BEGIN:
                number, slot, length, temperature, top_k, top_p, seed = words[:7]
                prompt = control.broadcast(torch.zeros(length, dtype=torch.int64)).tolist()
                params = SamplingParams(
                    temperature=_number_of(temperature), top_k=top_k, top_p=_number_of(top_p), seed=seed
                )
                runner.begin(_drafter(rank, number), slot, prompt, params)
            case _Action.REWIND:
                runner.rewind(words[0], words[1])
            case _Action.CYCLE:
                number, size, extent, is_greedy, check, count = words[:6]
                slots = words[6 : 6 + count]
                if check:
                    _compare(rank, control, slots, check)
                runner.start(_drafter(rank, number), slots, size, extent, bool(is_greedy))
            case _Action.REST:
                _compare(rank, control, range(rank.state.padding_slot), words[0])
                control.barrier()
            case _:
                return


def _use(rank: Rank, drafter: Drafter | None, control: Collectives) -> None:
    """On all ranks or none: _Refused where none can."""
    error = None
    try:
        rank.use(drafter)
    except SlipstreamError as refused:
        error = refused
    refusals = int(control.all_reduce(torch.tensor([float(error is not None)])))
    if error and refusals == control.size:
        raise _Refused(str(error)) from None
    if refusals:
        raise RankError(
            f"rank {control.rank} {'cannot' if error else 'alone can'} use the drafter: {error or ''}"
        )


def _compare(rank: Rank, control: Collectives, slots: Sequence[int], theirs: int) -> None:
    if rank.state.checksum(slots) != theirs:
        lengths = rank.state.text.length[list(slots)].tolist()
        raise RankError(
            f"rank {control.rank} does not hold the text that rank 0 holds (its slots {list(slots)} hold {lengths}"
            " tokens): the ranks' processors or libraries do not compute alike"
        )


def _drafter(rank: Rank, number: int) -> Drafter | None:
    return (None, rank.drafter, rank.arbitrary)[number]


def _room(rank: Rank) -> int:
    """Words of every message."""
    return _WORDS + rank.state.padding_slot


def _bits(value: float) -> int:
    """A float64 as a word."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _number_of(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
