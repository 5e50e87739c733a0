"""`PenaltySlots`: which sequence has which row of the device's count table, and what that row lacks.

The table counts the tokens of sequences with penalties. The device adds what it samples, so tokens that
the host has not seen yet are counted too; the host sends a history only where the row does not go on:

    sampled last at output position p - 1, now at p     nothing to send
    new, forked, resumed in another slot, rewound       its tokens so far: a `CountLoad`

Owned by the batch builder. Invariant: there are as many slots as a step has rows, and the one used
longest ago is given away, so a sequence whose last token only the device knows keeps its slot.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxserve.schedule.batch import CountLoad
from jaxserve.schedule.sequence import Sequence


class _Place(NamedTuple):
    """Where a sequence is counted, and the output position that was sampled there last."""

    slot: int
    last_position: int


class PenaltySlots:
    """The slots of one engine.

    Args:
        num_slots: as many as a step has rows at most.
    """

    def __init__(self, num_slots: int):
        self._num_slots = num_slots
        self.forget()

    def forget(self) -> None:
        """The table holds nothing any more."""
        self._places: dict[Sequence, _Place] = {}  # the one used longest ago first
        self._free = list(range(self._num_slots))[::-1]

    def place(
        self, rows: Iterable[tuple[Sequence, int]], num_steps: int
    ) -> tuple[list[int], list[CountLoad]]:
        """A slot for every row of a step with penalties.

        Args:
            rows: sequences and the output positions that the step samples first.
            num_steps: tokens that the step samples for each.

        Returns:
            (the slot of each row, what has to be loaded before the step).
        """
        rows = list(rows)
        before = {seq: self._places.pop(seq) for seq, _ in rows if seq in self._places}
        slots, loads = [], []
        for seq, position in rows:
            place = before.get(seq)
            if place is None and not self._free:
                self._free.append(self._places.pop(next(iter(self._places))).slot)
            slot = self._free.pop() if place is None else place.slot
            if place is None or place.last_position != position - 1:
                loads.append(_history(slot, seq, position))
            self._places[seq] = _Place(slot, position + num_steps - 1)
            slots.append(slot)
        return slots, loads


def _history(slot: int, seq: Sequence, num_output_tokens: int) -> CountLoad:
    """The prompt of a sequence and its first output tokens, all of them known."""
    prompt = np.unique(np.asarray(seq.prompt_token_ids, np.int32))
    first = seq.num_prompt_tokens
    output, counts = np.unique(
        np.asarray(seq.token_ids[first : first + num_output_tokens], np.int32), return_counts=True
    )
    assert not len(output) or output[0] >= 0, "a token to be counted is only known to the device"
    amounts = np.concatenate([np.ones(len(prompt), np.int32), 2 * counts.astype(np.int32)])
    return CountLoad(slot, np.concatenate([prompt, output]), amounts)
