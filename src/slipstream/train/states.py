"""The target's states over whole samples, computed as they are needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.engine.state import State
from slipstream.target.family import Target
from slipstream.target.rows import Rows

_ROWS = 1 << 16
"""Rows of one forward at most, padding included."""
_FORWARD_ROWS = {"cpu": 64, "cuda": 1 << 14}
"""What a forward costs beside its rows, in rows: on a GPU its launches, in eager torch (docs/log.md)."""


class OnlineStates:
    """Runs the target over samples, those of like length together."""

    def __init__(self, target: Target, taps: tuple[int, ...]) -> None:
        self._target, self._taps = target, taps
        self._state: State | None = None

    @torch.no_grad()
    def __call__(self, samples: Sequence[int], tokens: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """For each sample's tokens (int64 [T]): features [T, F] at the taps, and the final states [T, H].

        samples: their numbers, which do not matter here.
        """
        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
        found: dict[int, tuple[Tensor, Tensor]] = {}
        begin = 0
        worth = _FORWARD_ROWS[self._target.device.type]
        while begin < len(order):
            end, real = begin + 1, len(tokens[order[begin]])
            # A group ends where padding it to one more sample would cost more than another forward.
            while end < len(order):
                longest = len(tokens[order[end]])
                padded = (end + 1 - begin) * longest
                if padded > _ROWS or padded - real - longest > worth:
                    break
                end, real = end + 1, real + longest
            group = order[begin:end]
            features, hidden = self._run([tokens[i] for i in group])
            for row, i in enumerate(group):
                length = len(tokens[i])
                found[i] = (features[row, :length], hidden[row, :length])
            begin = end
        return [found[i] for i in range(len(tokens))]

    def _run(self, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        count, length, device = len(tokens), max(map(len, tokens)), self._target.device
        state = self._state
        if state is None or state.padding_slot < count or state.max_length < length:
            if (
                state is not None
                and max(count, state.padding_slot) * max(length, state.max_length) <= 2 * _ROWS
            ):
                allocated = max(count, state.padding_slot), max(length, state.max_length)
            else:  # many short samples and few long ones must not add up to many long ones
                allocated = count, length
            self._state = state = None  # the old one goes before the new one comes
            self._state = state = State.allocate(
                self._target.kv_layout(), *allocated, 0, self._target.dtype, device
            )
        padded = torch.nn.utils.rnn.pad_sequence(list(tokens), batch_first=True).to(device)
        slots = torch.arange(count, device=device)
        index = torch.arange(length, device=device).expand(count, -1)
        rows = Rows(
            tokens=padded,
            positions=index,
            kv_rows=state.table[slots[:, None], index],
            table=state.table,
            slots=slots,
            prefix=torch.zeros_like(slots),
            extent=length,
        )
        hidden, features = self._target.forward(rows, state.kv, self._taps)
        assert features is not None
        return features, hidden
