"""What `Engine.fork` asks of the engine: the request of a branch, and the grammar that it goes on with."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Several
from typing import NamedTuple, cast

from jaxserve.constraints.constraint import Grammar
from jaxserve.errors import InvalidRequestError, shown
from jaxserve.field_checks import plain, require, require_within
from jaxserve.groups.group import Group
from jaxserve.groups.make import Grammars
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule.sequence import Sequence


class Branch(NamedTuple):
    """What is to be queued, and where it branches off: from `parent`, after `num_shared` of its tokens."""

    request: Request
    grammar: Grammars
    parent: Sequence
    num_shared: int


def branch_off(
    group: Group | None,
    request_id: object,
    new_id: str,
    *,
    index: int,
    num_tokens: int | None,
    append_token_ids: Several[int],
    sampling_params: SamplingParams | None,
    hold: bool,
    grammar: Grammars,
) -> Branch:
    """A branch of a request, checked.

    Args:
        group: of the request; None where there is none by that name.
        request_id, new_id, index, num_tokens, append_token_ids, sampling_params, hold, grammar: as in
            `Engine.fork`.

    Raises:
        InvalidRequestError: there is nothing to fork by that name; the new request is at fault.
    """
    if group is None:
        raise InvalidRequestError(
            f"request {shown(request_id)} is neither in flight nor held", param="id"
        )
    parent, known = group.branch_point(index)
    request, num_shared = branch_request(
        group.request, new_id, known, num_tokens, append_token_ids, sampling_params, hold
    )
    if sampling_params is None and grammar is None:
        grammar = branch_grammar(parent, request, num_shared)
    return Branch(request, grammar, parent, num_shared)


def branch_request(
    old: Request,
    new_id: str,
    known: Several[int],
    num_tokens: int | None,
    append_token_ids: Several[int],
    sampling_params: SamplingParams | None,
    hold: bool,
) -> tuple[Request, int]:
    """The request of a branch, checked, and how many tokens it shares.

    Args:
        old: what it branches off from.
        new_id: its id.
        known: the tokens of that so far, prompt included.
        num_tokens, append_token_ids, sampling_params, hold: as in `Engine.fork`.

    Raises:
        InvalidRequestError: one of them is at fault.
    """
    num_shared: int = len(known) if num_tokens is None else plain(num_tokens)
    require_within("num_tokens", num_shared, 1, len(known))
    is_list = not isinstance(append_token_ids, str | bytes | dict)
    require(
        is_list and isinstance(append_token_ids, Iterable),
        "append_token_ids",
        append_token_ids,
        "a list of token ids",
    )
    request = Request(
        id=new_id,
        prompt_token_ids=[*known[:num_shared], *append_token_ids],
        sampling_params=dataclasses.replace(
            old.sampling_params, seed=None, n=1, prompt_logprobs=None
        )
        if sampling_params is None
        else sampling_params,
        priority=old.priority,
        cache_salt=old.cache_salt,
        hold=hold,
    )
    return request, num_shared


def branch_grammar(parent: Sequence, request: Request, num_shared: int) -> Grammar | None:
    """The grammar of a branch: its parent's, from where the tokens that the branch begins with have led.
    One that branches off inside the prompt begins it anew.

    Raises:
        InvalidRequestError: they leave the grammar.
    """
    if request.sampling_params.structured_outputs is None:
        return None
    grammar = cast(Grammar, parent.constraints[0])
    begin = parent.num_prompt_tokens
    said = list(request.prompt_token_ids)[begin:] if num_shared >= begin else []
    return grammar.branch(said)
