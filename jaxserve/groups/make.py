"""From a request that was checked to its group, with the sequences that it begins with. Called by the
engine.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass

from jaxserve.constraints.constraint import Constraint, Grammar
from jaxserve.constraints.token_sets import AllowedTokens, BadWords, MinTokens
from jaxserve.errors import InvalidRequestError
from jaxserve.groups.beams import BeamGroup, check_beams
from jaxserve.groups.choices import ChoiceGroup, one_watcher_per_choice
from jaxserve.groups.group import Group
from jaxserve.groups.outbox import Outbox
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule.scheduler import Scheduler
from jaxserve.schedule.scoring import PromptScores
from jaxserve.schedule.sequence import Sequence
from jaxserve.seeds import choice_seed, derive_seed
from jaxserve.text.watcher import TokenWatcher

Watchers = TokenWatcher | Several[TokenWatcher] | None
Grammars = Grammar | Several[Grammar] | None


@dataclass(slots=True)
class Arrivals:
    """Counts the requests of an engine, or of several that give each request another number."""

    num_requests: int = 0


def make_group(
    request: Request,
    prompt: tuple[int, ...],
    max_tokens: int,
    watcher: Watchers,
    grammar: Grammars,
    *,
    arrival: int,
    engine_seed: int,
    eos_token_ids: frozenset[int],
    scheduler: Scheduler,
    outbox: Outbox,
) -> Group:
    """The group of a new request; it is not started yet.

    Args:
        request: what was asked.
        prompt: its token ids, checked.
        max_tokens: its output budget, clamped.
        watcher: makes text of its ids, one per choice.
        grammar: what its structured_outputs demands, one per choice.
        arrival: its number among all requests of the engine.
        engine_seed: where its draws come from if it names no seed.
        eos_token_ids: the model's end set.
        scheduler: will run its sequences.
        outbox: takes what it releases.

    Raises:
        InvalidRequestError: more beams than a step has candidates for; stop strings without a watcher;
            bad words that are texts; structured_outputs without a grammar.
        ValueError: a watcher for a beam search; another number of watchers or grammars than there are
            choices; a grammar that nobody asked for.
    """
    params, beam = request.sampling_params, request.beam
    own_stops = frozenset(params.stop_token_ids)
    stop_ids = own_stops if params.ignore_eos else own_stops | eos_token_ids
    seed = derive_seed(engine_seed, arrival) if params.seed is None else params.seed % 2**64
    grammars = one_grammar_per_choice(grammar, request)
    scores = None
    if params.prompt_logprobs is not None:
        scores = PromptScores(
            num_tokens=len(prompt),
            start=request.prompt_logprobs_start,
            num_top=params.prompt_logprobs,
        )
        # Who asks for no tokens still has its prompt computed: what is sampled then is not shown.
        max_tokens = max(1, max_tokens)
    seqs = [
        Sequence(
            request=request,
            prompt_token_ids=prompt,
            order=(arrival, index),
            seed=choice_seed(seed, index),
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            page_table=scheduler.kv.new_table(),
            wants_candidates=beam is not None,
            constraints=constraints_of(params, stop_ids, grammars[index]),
            num_top_logprobs=0 if beam is not None else params.num_top_logprobs,
            scores=scores,
        )
        for index in range(params.n)
    ]
    if beam is not None:
        check_beams(beam, stop_ids)
        if watcher is not None:
            raise ValueError("watcher: a beam search has none, its outputs are chosen at the end")
        return BeamGroup(seqs[0], beam, scheduler=scheduler, outbox=outbox)
    watchers = one_watcher_per_choice(watcher, request)
    return ChoiceGroup(seqs, watchers, scheduler=scheduler, outbox=outbox)


def constraints_of(
    params: SamplingParams, stop_ids: frozenset[int], grammar: Grammar | None
) -> tuple[Constraint, ...]:
    """What a sequence may say next, the strongest first: a weaker one gives way where nothing would be
    left.

    Args:
        params: of its request.
        stop_ids: ids that end it.
        grammar: of its own, if it has one.

    Raises:
        InvalidRequestError: a bad word is a text.
    """
    found: list[Constraint] = [] if grammar is None else [grammar]
    if params.allowed_token_ids is not None:
        found.append(AllowedTokens(params.allowed_token_ids))
    if params.min_tokens and stop_ids:
        found.append(MinTokens(params.min_tokens, stop_ids))
    if params.bad_words:
        words = [word for word in params.bad_words if not isinstance(word, str)]
        if len(words) < len(params.bad_words):
            raise InvalidRequestError(
                "bad_words that are texts need a tokenizer; without one give lists of token ids",
                param="bad_words",
            )
        found.append(BadWords(words))
    return tuple(found)


def one_grammar_per_choice(grammar: Grammars, request: Request) -> Several[Grammar | None]:
    """The grammars of a request's choices; None for each where it asks for none.

    Raises:
        InvalidRequestError: it asks for one and there is none.
        ValueError: it asks for none and there is one; another number of them than there are choices.
    """
    params = request.sampling_params
    if grammar is None:
        if params.structured_outputs is not None:
            raise InvalidRequestError(
                "structured_outputs need a tokenizer; the engine alone takes them with a grammar",
                param="structured_outputs",
            )
        return [None] * params.n
    grammars = list(grammar) if isinstance(grammar, Several) else [grammar]
    if params.structured_outputs is None or len(grammars) != params.n:
        raise ValueError(
            f"grammar: request {request.id!r} has n = {params.n} choices and structured_outputs "
            f"{params.structured_outputs!r}, got {len(grammars)} grammars"
        )
    return grammars
