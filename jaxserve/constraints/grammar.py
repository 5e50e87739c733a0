"""Structured output: `GrammarCompiler`, one per checkpoint, and the `GrammarConstraint`s it makes.

    StructuredOutputs -> grammar text -> checked and compiled once -> a matcher per sequence -> masks

The compiler is called where requests are made (`llm`), never in the step loop; its errors are the
caller's. A constraint is asked for a mask before each token.

Rules: JSON has at most one blank after "," and ":" and no other whitespace between its tokens; the end
set is allowed exactly where the text is complete, and nothing else is where it cannot go on.

Invariant: what a constraint allows depends on the output tokens alone. A sequence that goes back (a
    rewind, a preemption, a fork) takes its grammar back with it.
"""

import contextlib
import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from jaxserve.constraints.constraint import BITS, allow_only, clear_ids, ids_mask, num_words
from jaxserve.constraints.grammar_check import LIMITS, CheckUndecided, check_grammar
from jaxserve.constraints.json_schema import checked_schema
from jaxserve.errors import ConstraintError, InvalidRequestError, shown
from jaxserve.structured_outputs import NAME, TOO_COSTLY, StructuredOutputs

MAX_COMPILED = 64  # grammars that are kept
MAX_REFUSED = 1024  # grammars of which only is known that, and why, they are refused
TIME_LIMIT_S = 5  # of CPU time, for compiling one that is not kept yet
_JSON_OPTIONS: Any = {  # JsonCompileOptions, which the package defines for type checkers alone
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}
# One without an end (which the compiler refuses) reaches to the end of its line, so that no character is
# looked at again from each quote before it.
_LITERALS = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|/(?:[^/\\\n]|\\.)*+/?')
_TEMPERATURE = re.compile(r"\[[^\[\]]*\btemperature\s*=")  # of a rule; llguidance reads past it
_LITERAL_OR_JSON = re.compile(_LITERALS.pattern + r"|(?P<json>%json\s*)")
_MAX_REASON = 1000  # characters of the compiler's words
_ANY_OBJECT = '{"type":"object"}'
_OVERLAP = (
    "oneOf is supported only where its options provably exclude each other (by type, or by a required "
    "property with different constants); write anyOf instead"
)


class GrammarCompiler:
    """Makes constraints for the requests of one checkpoint, and keeps the grammars it compiled, and what it
    refused: to ask again costs nothing.

    Made without cost: the tokenizer's tables (about a second for 49,152 tokens) are built for the
    first request that needs them. May be called from several threads.

    Args:
        tokenizer_json: the text of tokenizer.json, with every added token.
        end_ids: the model's end set; those that cannot be sampled are passed over.
        vocab_size: ids in [0, vocab_size) may be sampled: the head has a row for them and the tokenizer a
            token.
        max_compiled: how many grammars are kept, those used last.
        time_limit_s: most seconds of CPU time for compiling one.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        end_ids: Collection[int],
        vocab_size: int,
        max_compiled: int = MAX_COMPILED,
        time_limit_s: int = TIME_LIMIT_S,
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._end_ids = tuple(sorted(i for i in end_ids if i < vocab_size))
        self._sampled = ids_mask(num_words(vocab_size), vocab_size)
        self._max_compiled = max_compiled
        self._time_limit_s = time_limit_s
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()  # by last use
        self._refused: OrderedDict[bytes, InvalidRequestError] = OrderedDict()  # by last use
        self._being_compiled: dict[tuple[str, str], Future[LLMatcher]] = {}
        self._one_at_a_time = threading.Lock()  # held for no longer than a look-up
        self._tables_lock = threading.Lock()

    def constraint(self, wanted: StructuredOutputs) -> "GrammarConstraint":
        """A constraint for one new sequence.

        Raises:
            InvalidRequestError: the grammar is wrong, unsupported, too large or matches nothing; the
                tokenizer cannot serve grammars; the model has no end set.
        """
        key = (wanted.kind, _text_of(wanted))
        return GrammarConstraint(self._matcher(key).deep_copy(), self._end_ids, self._sampled)

    def has(self, wanted: StructuredOutputs) -> bool:
        """Whether this grammar is kept, or known to be refused: to ask for it costs nothing."""
        key = (wanted.kind, _text_of(wanted))
        with self._one_at_a_time:
            return key in self._compiled or _digest(key) in self._refused

    def load_tables(self) -> None:
        """Builds the tokenizer's tables now; does nothing where it cannot serve grammars."""
        with contextlib.suppress(InvalidRequestError):
            self._loaded_tokenizer()

    def _matcher(self, key: tuple[str, str]) -> LLMatcher:
        """Compiled once, however many ask for it meanwhile; other grammars do not wait for it."""
        with self._one_at_a_time:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
                return matcher
            refusal = self._refused.get(_digest(key))
            if refusal is not None:
                self._refused.move_to_end(_digest(key))
                raise _again(refusal)
            future = self._being_compiled.get(key)
            is_first = future is None
            if future is None:
                future = self._being_compiled[key] = Future()
        if not is_first:
            return future.result()
        try:
            matcher = self._compile(f"{NAME}.{key[0]}", *key)
        except BaseException as error:
            with self._one_at_a_time:
                del self._being_compiled[key]
                is_lasting = not isinstance(error.__cause__, CheckUndecided)
                if isinstance(error, InvalidRequestError) and is_lasting:
                    self._refused[_digest(key)] = _again(error)
                    if len(self._refused) > MAX_REFUSED:
                        self._refused.popitem(last=False)
            future.set_exception(error)
            raise
        with self._one_at_a_time:
            del self._being_compiled[key]
            self._compiled[key] = matcher
            if len(self._compiled) > self._max_compiled:
                self._compiled.popitem(last=False)
        future.set_result(matcher)
        return matcher

    def _compile(self, field: str, kind: str, text: str) -> LLMatcher:
        tokenizer = self._loaded_tokenizer()
        grammar = _grammar(kind, text)
        if kind != "json_object":
            try:
                wrong = check_grammar(grammar, self._time_limit_s)
            except CheckUndecided as error:
                raise _unserved(field, str(error)) from error
            if wrong:
                raise _unserved(field, wrong)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _unserved(field, matcher.get_error())
        # The first mask costs most; what it finds out is shared by all copies.
        matcher.compute_bitmask()
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise _unserved(field, "it matches no text")
        return matcher

    def _loaded_tokenizer(self) -> LLTokenizer:
        if not self._end_ids:
            raise InvalidRequestError(
                f"{NAME} needs an end token, and this model has none: its text would never end",
                param=NAME,
            )
        with self._tables_lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(
                        self._tokenizer_json, eos_token=list(self._end_ids)
                    )
                except ValueError as error:
                    raise InvalidRequestError(
                        f"{NAME} cannot be served with this checkpoint's tokenizer: {error}",
                        param=NAME,
                    ) from error
            return self._tokenizer


class GrammarConstraint:
    """What may come next in the text of one sequence; see `Constraint`.

    Args:
        matcher: of its own, at the beginning.
        end_ids: the end set.
        sampled: u32[N], the ids that may be sampled at all; these fit into the masks to come.
        prefix: tokens that stand before the output and belong to the text.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        end_ids: Sequence[int],
        sampled: np.ndarray,
        prefix: Sequence[int] = (),
    ) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._sampled = sampled
        self._prefix = list(prefix)
        self._consumed: list[int] = []  # by the matcher

    def needs_mask(self, num_output_tokens: int) -> bool:
        """Always."""
        return True

    def fill(self, output_token_ids: Sequence[int], mask: np.ndarray) -> None:
        """Clears what would leave the grammar.

        Args:
            output_token_ids: all output tokens so far; what follows an end token is not looked at.
            mask: u32[W], written in place.

        Raises:
            ConstraintError: these tokens are no beginning of the grammar's texts, no token can go on
                from them, or the next mask costs more than is allowed. The mask means nothing then.
        """
        if self._advance([*self._prefix, *output_token_ids]):
            allow_only(mask, self._end_ids)
            return
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._check_matcher()
        size = min(len(words), len(self._sampled))
        mask[:size] &= words[:size] & self._sampled[:size]
        mask[size:] = 0
        clear_ids(mask, self._end_ids)
        if self._matcher.is_accepting():
            for token_id in self._end_ids:
                mask[token_id // BITS] |= np.uint32(1 << token_id % BITS)
        if not mask.any():
            raise ConstraintError(
                f"{NAME}: no token of the vocabulary can go on with the text", param=NAME
            )

    def branch(self, output_token_ids: Sequence[int]) -> "GrammarConstraint":
        """See `Grammar`."""
        prefix = [*self._prefix, *output_token_ids]
        other = GrammarConstraint(
            self._matcher.deep_copy(), self._end_ids, self._sampled, prefix=prefix
        )
        other._consumed = self._consumed.copy()
        try:
            other._advance(prefix)
        except ConstraintError as error:
            raise InvalidRequestError(error.message, param="append_token_ids") from error
        return other

    def _advance(self, tokens: list[int]) -> bool:
        """Takes the matcher to where these tokens lead; whether they have reached an end token."""
        known = len(self._consumed)
        if tokens[:known] != self._consumed:
            pairs = zip(tokens, self._consumed, strict=False)
            known = next((i for i, (a, b) in enumerate(pairs) if a != b), min(known, len(tokens)))
            self._go_back(known)
        for token_id in tokens[known:]:
            if token_id in self._end_ids:
                return True
            if not self._matcher.try_consume_tokens([token_id]):
                self._check_matcher()
                raise ConstraintError(
                    f"{NAME}: token {token_id} after {len(self._consumed)} others leaves the grammar",
                    param=NAME,
                )
            self._consumed.append(token_id)
        return False

    def _check_matcher(self) -> None:
        """Raises what the matcher itself has given up on: most often, what a token or a mask may cost."""
        if self._matcher.is_error():
            raise ConstraintError(
                f"{NAME}: going on costs too much: {_first_line(self._matcher.get_error())}",
                param=NAME,
                code=TOO_COSTLY,
            )

    def _go_back(self, num_tokens: int) -> None:
        """Forgets what was consumed after the first so many tokens."""
        if not self._matcher.rollback(len(self._consumed) - num_tokens):
            self._check_matcher()
            raise ConstraintError(f"{NAME}: the grammar cannot go back", param=NAME)
        del self._consumed[num_tokens:]


def _text_of(wanted: StructuredOutputs) -> str:
    """What a grammar is made of, and found again by."""
    if wanted.json_object:
        return _ANY_OBJECT
    value = getattr(wanted, wanted.kind)
    return value if isinstance(value, str) else json.dumps(value)


def _grammar(kind: str, text: str) -> str:
    """A grammar as llguidance takes it."""
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    if kind == "grammar":
        if _TEMPERATURE.search(_LITERALS.sub("", text)):
            raise _unserved(f"{NAME}.grammar", "rules cannot set a temperature")
        return LLMatcher.grammar_from_lark(_with_own_json(text))
    schema = checked_schema(text) if kind == "json" else text
    return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)


def _with_own_json(text: str) -> str:
    """A Lark grammar whose JSON schemas are held to the same rules as schemas by themselves.

    Raises:
        InvalidRequestError: one of them is not served.
    """
    parts, end, position = [], 0, 0
    while found := _LITERAL_OR_JSON.search(text, position):
        position = found.end()
        if found["json"] is None:
            continue
        try:
            schema, stop = json.JSONDecoder().raw_decode(text, position)
        except (ValueError, RecursionError):
            continue  # no JSON: the compiler says what is wrong
        parts += [text[end:position], _own_json(schema)]
        end = position = stop
    return "".join(parts) + text[end:]


def _own_json(schema: object) -> str:
    field = f"{NAME}.grammar"
    if not isinstance(schema, dict):
        raise _unserved(
            field, f"%json must be followed by an object (a schema), got {shown(schema)}"
        )
    try:
        checked = json.loads(checked_schema(json.dumps(schema)))
    except InvalidRequestError as error:
        raise _unserved(field, f"%json: {error.message}") from error
    return json.dumps({**checked, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def _digest(key: tuple[str, str]) -> bytes:
    """Of a grammar; far smaller than its text may be."""
    return hashlib.sha256("\0".join(key).encode("utf-8", "surrogatepass")).digest()


def _again(error: InvalidRequestError) -> InvalidRequestError:
    """The same error, without where it was raised: that holds on to all that was there."""
    return InvalidRequestError(error.message, param=error.param, code=error.code)


def _unserved(field: str, reason: str) -> InvalidRequestError:
    reason = _OVERLAP if "coerce_one_of" in reason else _first_line(reason)
    return InvalidRequestError(f"{field} cannot be served: {reason}", param=field)


def _first_line(text: str) -> str:
    line = text.split("\n<", 1)[0].strip()
    return (
        line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]}..."
    )  # it may quote the grammar
