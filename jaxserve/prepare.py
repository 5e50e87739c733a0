"""`Preparer`: what a tokenizer adds to requests on their way into an engine, and to what comes out.

    Request -> bad words as ids, a watcher per choice, a grammar per choice -> Engine.add

Called by `LLM` and by the loop of `async_engine`. The engine itself knows token ids only.

Invariant: `prepare` touches no engine, so it may be called from any thread, while the engine steps.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import BeamParams, SamplingParams
from jaxserve.structured_outputs import StructuredOutputs
from jaxserve.text.bad_words import bad_word_ids
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.watcher import StopWatcher, TokenWatcher

if TYPE_CHECKING:
    from jaxserve.constraints.grammar import GrammarCompiler, GrammarConstraint

MAX_QUICK_BAD_WORDS = 16  # texts, each encoded three times


class Prepared(NamedTuple):
    """The arguments of `Engine.add`."""

    request: Request
    watcher: list[TokenWatcher] | None
    grammar: list["GrammarConstraint"] | None


class Preparer:
    """Prepares the requests of one engine.

    Args:
        tokenizer: the checkpoint's; None = the engine refuses by name what needs one.
        eos_token_ids: the engine's end set.
        vocab_size: the engine's.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, eos_token_ids: Collection[int], vocab_size: int
    ):
        self.tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._compiler: GrammarCompiler | None = None

    def prepare(self, request: Request) -> Prepared:
        """A request as the engine takes it. Compiling a grammar may take seconds; all else takes none.

        Raises:
            InvalidRequestError: a bad word or the structured outputs cannot be served.
        """
        if self.tokenizer is None or request.beam is not None:
            return Prepared(request, None, None)
        params = request.sampling_params
        if any(isinstance(word, str) for word in params.bad_words):
            words = bad_word_ids(self.tokenizer, params.bad_words)
            request = replace(request, sampling_params=replace(params, bad_words=words))
        return Prepared(request, self._watchers(params), self._grammars(params))

    def is_quick(self, request: Request) -> bool:
        """Whether `prepare` has nothing to compile for it, and no more than a few texts to encode."""
        params = request.sampling_params
        wanted = params.structured_outputs
        if sum(isinstance(word, str) for word in params.bad_words) > MAX_QUICK_BAD_WORDS:
            return False
        if self.tokenizer is None or wanted is None:
            return True
        return self._loaded_compiler().has(StructuredOutputs.from_value(wanted))

    def load_tables(self) -> None:
        """Builds what the first request with structured outputs would have to wait for."""
        if self.tokenizer is not None:
            self._loaded_compiler().load_tables()

    def _watchers(self, params: SamplingParams) -> list[TokenWatcher]:
        assert self.tokenizer is not None
        return [
            StopWatcher(
                self.tokenizer,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
            for _ in range(params.n)
        ]

    def _grammars(self, params: SamplingParams) -> list["GrammarConstraint"] | None:
        if params.structured_outputs is None:
            return None
        wanted = StructuredOutputs.from_value(params.structured_outputs)
        compiler = self._loaded_compiler()
        return [compiler.constraint(wanted) for _ in range(params.n)]

    def _loaded_compiler(self) -> "GrammarCompiler":
        if self._compiler is None:
            from jaxserve.constraints.grammar import GrammarCompiler  # for those who ask for them

            assert self.tokenizer is not None
            self._compiler = GrammarCompiler(
                self.tokenizer.to_json(),
                end_ids=self._eos_token_ids,
                vocab_size=self._vocab_size,
            )
        return self._compiler

    def with_texts(self, output: RequestOutput, params: BeamParams) -> RequestOutput:
        """What a beam search found, with its texts: a search has no watchers, its outputs are chosen at
        the end.
        """
        if self.tokenizer is None:
            return output
        completions = []
        for one in output.outputs:
            # As without beams, the token that ended it is no part of the text.
            shown_ids = one.token_ids[:-1] if one.finish_reason == "stop" else one.token_ids
            text = self.tokenizer.decode(shown_ids, params.skip_special_tokens)
            completions.append(replace(one, text=text))
        return replace(output, outputs=completions)
