"""Feeds texts to tool parsers in pieces, for the tests of this folder."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxserve.server.tools.parser import ContentDelta, make_parser


@dataclass
class Reply:
    """What the deltas of one text add up to."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # (name, arguments)
    num_argument_deltas: int = 0


def read(name: str, pieces: list[str], *, live: bool = False, **options) -> Reply:
    """Parses a text in pieces; what every stream must keep is asserted here."""
    numbers = itertools.count()
    parser = make_parser(name, live=live, new_id=lambda: f"call_{next(numbers)}", **options)
    reply = Reply()
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            assert delta.text
            reply.content += delta.text
            continue
        assert delta.index in (len(reply.calls) - 1, len(reply.calls)), "one call after the other"
        is_first = delta.index == len(reply.calls)
        assert (delta.id is not None) == (delta.name is not None) == is_first
        if is_first:
            assert delta.id == f"call_{delta.index}"
            reply.calls.append((str(delta.name), ""))
        assert is_first or delta.arguments
        name_of_call, arguments = reply.calls[-1]
        reply.calls[-1] = (name_of_call, arguments + delta.arguments)
        reply.num_argument_deltas += 1
    return reply


def cuts(text: str) -> Iterator[list[str]]:
    """A text as it may come: whole, in pieces of 1, 2, 3 and 7 characters, and in pieces at random."""
    yield [text]
    for size in (1, 2, 3, 7):
        yield [text[i : i + size] for i in range(0, len(text), size)]
    for seed in range(20):
        rng = random.Random(seed)
        places = sorted(rng.sample(range(len(text) + 1), k=min(len(text) + 1, 1 + seed)))
        yield [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
