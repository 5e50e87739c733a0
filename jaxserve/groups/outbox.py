"""`Outbox`: what the groups have released and nobody has been given yet.

Groups write to `ready` themselves, in the statement that also records their progress, so that no
interrupt can come between. Read and emptied by the engine when a call hands out.
"""

from collections.abc import Iterable, Iterator
from operator import attrgetter

from jaxserve.groups.group import Group
from jaxserve.request import CompletionOutput, RequestOutput, merge_completions

News = tuple[Group, list[CompletionOutput]]


class Outbox:
    """Starts empty; empty again whenever a step has handed out.

    `ready` maps each group that released something in this step to what it released, a choice at most
    once. Such a list is never changed: it may be handed out as it is. A longer one takes its place.
    """

    def __init__(self) -> None:
        self.ready: dict[Group, list[CompletionOutput]] = {}
        self._kept: list[News] = []

    def __bool__(self) -> bool:
        return bool(self._kept or self.ready)

    def has(self, request_id: str) -> bool:
        """Whether something of this request lies here."""
        return any(group.request.id == request_id for group, _ in self._news())

    def owner(self, request_id: str) -> Group | None:
        """The group of this request, if something of it lies here."""
        return next((group for group, _ in self._news() if group.request.id == request_id), None)

    def keep(self) -> None:
        """Puts aside what a step that was cut short has released, for the next one to hand out."""
        self._kept, self.ready = [*self._news()], {}

    def gather(self, group: Group | None = None, index: int | None = None) -> list[RequestOutput]:
        """What there is to hand out, joined by request and choice; nothing is removed.

        Args:
            group: of this request only.
            index: of this choice only.
        """
        if group is None and index is None and not self._kept:
            return self._gather_all()
        found: dict[Group, dict[int, list[CompletionOutput]]] = {}
        others: set[Group] = set()
        for owner, completions in self._news():
            for one in completions:
                if (group is None or owner is group) and (index is None or one.index == index):
                    found.setdefault(owner, {}).setdefault(one.index, []).append(one)
                else:
                    others.add(owner)
        return [
            owner.output(
                [merge_completions(pieces[i]) for i in sorted(pieces)],
                finished=owner.has_ended and owner not in others,
            )
            for owner, pieces in found.items()
        ]

    def _gather_all(self) -> list[RequestOutput]:
        """The same where nothing was kept: every choice has at most one piece, nothing to join."""
        return [
            group.output(
                pieces if len(pieces) == 1 else sorted(pieces, key=_by_index),
                finished=group.has_ended,
            )
            for group, pieces in self.ready.items()
        ]

    def remove(self, group: Group | None = None, index: int | None = None) -> None:
        """Forgets what `gather` with the same arguments returns."""
        left: list[News] = []
        if group is not None or index is not None:
            for owner, completions in self._news():
                if group is None or owner is group:
                    completions = [
                        one for one in completions if index is not None and one.index != index
                    ]
                if completions:
                    left.append((owner, completions))
        # Nothing comes after it: an interrupt there would find everything gone and nothing handed out.
        self._kept, self.ready = left, {}

    def check_invariants(self) -> None:
        """Raises AssertionError when an output was left behind: between two steps only that of a
        request for no tokens may lie here, or what a step that was cut short had released.
        """
        for group, completions in self.ready.items():
            assert group.has_ended, f"request {group.request.id!r} was not handed out"
            assert completions

    def _news(self) -> Iterator[News]:
        yield from self._kept
        yield from self.ready.items()


_by_index = attrgetter("index")


def count_tokens(outputs: Iterable[RequestOutput]) -> int:
    """Ids in all of them."""
    return sum([len(one.token_ids) for output in outputs for one in output.outputs])
