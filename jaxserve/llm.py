"""`LLM`: the batch and notebook face. Text or token ids in, `RequestOutput`s out.

    llm = LLM("checkpoints/smollm2-135m-instruct")
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=64))[0].outputs[0].text)

It owns a tokenizer and an `Engine`; `add` and `step` are the same loop in the open, for callers
(the CLI) that feed and drain at their own pace.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from jaxserve.config import EngineConfig
from jaxserve.echo import with_prompt, with_prompts_first
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError, InvalidRequestError, shown
from jaxserve.field_checks import plain
from jaxserve.generation_config import sampling_defaults
from jaxserve.llm_arguments import (
    Message,
    Prompt,
    Tool,
    as_conversations,
    as_prompts,
    one_per_prompt,
)
from jaxserve.prepare import Preparer
from jaxserve.replicas.engine import ReplicatedEngine
from jaxserve.request import CacheSalt, Request, RequestOutput, merge_outputs
from jaxserve.sampling_params import BeamParams, SamplingParams
from jaxserve.score import Score, score_of, score_request, starts_of
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights.load_model import load_model

if TYPE_CHECKING:
    from jaxserve.build.from_loaded import StartupTimes
    from jaxserve.multihost.leader import Followers


class LLM:
    """A loaded model with its tokenizer and engine.

    Args:
        model: a checkpoint directory, a GGUF file, or a name that `jaxserve fetch` made.
        generation_config: "auto" takes `default_sampling_params` from the checkpoint's
            generation_config.json, "none" takes those of `SamplingParams`.
        options: any field of `EngineConfig`, `CacheConfig`, `SchedulerConfig` or `ParallelConfig`, by
            its flat name.

    Raises:
        ConfigError: an option is unknown, out of range, or cannot be served by this model or
            backend.
        CheckpointError: the model cannot be loaded, or its generation_config.json holds a value that
            no request could have.
    """

    def __init__(self, model: str, *, generation_config: str = "auto", **options: object):
        config = EngineConfig.from_options(options)
        self._followers = _meet_followers(config) if config.processes.are_several else None
        loaded = load_model(model, config, wait=False)
        #: What a prompt without sampling params is decoded with.
        self.default_sampling_params = SamplingParams(
            **sampling_defaults(loaded.generation_config, generation_config)
        )
        from jaxserve.build.from_loaded import build_loaded  # half a second, while weights are read

        self.engine: Engine | ReplicatedEngine
        self.startup: StartupTimes
        self.engine, self.startup = build_loaded(config, loaded, followers=self._followers)
        self._tokenizer = loaded.tokenizer
        #: What the tokenizer adds to requests on their way into the engine.
        self.preparer = Preparer(
            loaded.tokenizer,
            eos_token_ids=self.engine.eos_token_ids,
            vocab_size=self.engine.vocab_size,
        )
        self._num_added = 0
        # Several callers may drive the one engine in turn (a generate inside a stream's loop): what a
        # step releases goes to the inbox of the caller that waits for it, else to whoever calls `step`.
        self._inboxes: dict[str, deque[RequestOutput]] = {}
        self._unclaimed: list[RequestOutput] = []

    def close(self) -> str | None:
        """Ends the other processes of the engine, where there are any; nothing can be run afterwards.

        Returns:
            Which of them was lost before; None where none was.
        """
        if self._followers is None:
            return None
        self._followers.close(reason=self._followers.fault)
        return self._followers.fault

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; a checkpoint without one serves token ids only.

        Raises:
            InvalidRequestError: the checkpoint has no tokenizer.
        """
        if self._tokenizer is None:
            raise InvalidRequestError(
                "this checkpoint has no tokenizer: give prompts as token ids", param="prompt"
            )
        return self._tokenizer

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text prompt (with the tokenizer's own added specials), or the ids as
        they are.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, bytes | dict) or not isinstance(prompt, Iterable):
            raise InvalidRequestError(
                f"prompt must be a text or a list of token ids, got {shown(prompt)}", param="prompt"
            )
        return [*map(plain, prompt)]

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> list[int]:
        """Token ids of a conversation through the chat template, ready for the assistant's turn.

        Args:
            messages: the conversation.
            tools: functions that the model may call, as OpenAI describes them; None = none.

        Raises:
            InvalidRequestError: they are malformed, or the template refused them.
        """
        return self.tokenizer.encode_chat(messages, tools=tools)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | CacheSalt | None = None,
    ) -> None:
        """Queues one request; its outputs come out of `step`, without its prompt whatever `echo` says.

        Args:
            request_id: unique among those in flight.
            prompt_token_ids: its prompt.
            params: how to decode it.
            priority, cache_salt: as in `Request`.

        Raises:
            InvalidRequestError: the request is at fault; nothing was queued.
        """
        request = Request(
            id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=params,
            priority=priority,
            cache_salt=cache_salt,
        )
        self.engine.add(*self.preparer.prepare(request))
        self._num_added += 1

    def has_work(self) -> bool:
        """Whether `step` has something to do or to hand out."""
        return bool(self._unclaimed) or self.engine.has_work()

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns what each request queued by `add` released in it, new text and ids."""
        self._advance()
        outputs, self._unclaimed = self._unclaimed, []
        return outputs

    def _advance(self) -> None:
        for output in self.engine.step():
            self._inboxes.get(output.request_id, self._unclaimed).append(output)

    def _outputs(self, request_id: str) -> Iterator[RequestOutput]:
        """What a request with an inbox releases, stepping the engine while there is nothing to give.

        Ends with the request, also when somebody aborts it.
        """
        inbox = self._inboxes[request_id]
        while inbox or self.engine.has_request(request_id):
            while not inbox:
                self._advance()
            yield inbox.popleft()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Runs all prompts to their end.

        Args:
            prompts: one prompt or many; each a text or a list of token ids.
            sampling_params: one for all, or one per prompt. None = `default_sampling_params`, what the
                checkpoint recommends; `SamplingParams()` is just that, its fields' own defaults.

        Returns:
            One whole `RequestOutput` per prompt, in order; each with all of its choices. With `echo`
            the text and ids of each begin with the prompt's.

        Raises:
            InvalidRequestError: a prompt or its parameters are at fault; none of the prompts is
                run.
        """
        return self._run([self.encode(p) for p in as_prompts(prompts)], sampling_params)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamParams
    ) -> list[RequestOutput]:
        """Runs beam search on all prompts to its end.

        Args:
            prompts: one prompt or many; each a text or a list of token ids.
            params: for all of them.

        Returns:
            One `RequestOutput` per prompt, in order; its outputs are the best `beam_width` ones
            that were found, best first, each with its `score`.

        Raises:
            InvalidRequestError: as `generate`.
        """
        if not isinstance(params, BeamParams):
            raise InvalidRequestError(
                f"params must be BeamParams, got {shown(params)}", param="params"
            )
        requests = [
            Request(id=self._new_id(i), prompt_token_ids=self.encode(prompt), beam=params)
            for i, prompt in enumerate(as_prompts(prompts))
        ]
        return [self.preparer.with_texts(output, params) for output in self._finish(requests)]

    def score(
        self, prompts: Prompt | Sequence[Prompt], *, start: int | Sequence[int] = 0
    ) -> list[Score]:
        """How likely given texts or token ids are: natural-log probabilities under the raw logits.

        Args:
            prompts: one prompt or many; each a text or a list of token ids.
            start: the first position to score, in tokens; one for all, or one per prompt. What lies
                before it is only context, and comes from the prefix cache where it is there: put
                the shared context first and several continuations behind it.

        Returns:
            One `Score` per prompt, in order.

        Raises:
            InvalidRequestError: a prompt or its start is at fault; none of them is run.
            NonFiniteError: the model computed something that is no finite number.
        """
        several = [self.encode(p) for p in as_prompts(prompts)]
        starts = starts_of(start, len(several))
        requests = [
            score_request(self._new_id(i), ids, begin)
            for i, (ids, begin) in enumerate(zip(several, starts, strict=True))
        ]
        return list(map(score_of, requests, self._finish(requests)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Tool] | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several, each a list of `{"role", "content"}`.

        Args:
            messages: one conversation or several.
            sampling_params: as in `generate`.
            tools: functions that the model may call, for all of them; see `encode_chat`.

        Raises:
            InvalidRequestError: a conversation or the tools are malformed or refused by the chat
                template, or the parameters are at fault; nothing is run.
        """
        conversations = as_conversations(messages)
        return self._run([self.encode_chat(m, tools) for m in conversations], sampling_params)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Runs one prompt and yields what it releases, step by step: of each choice that has news,
        by its index, what came since the last time.

        Leaving the loop early aborts it. With `echo` the first part of each choice begins with the
        prompt.
        """
        params = self.default_sampling_params if sampling_params is None else sampling_params
        prompt_token_ids = self.encode(prompt)
        request = Request(
            id=self._new_id(),
            prompt_token_ids=prompt_token_ids,
            sampling_params=params,
        )
        self._open(request)
        outputs = self._outputs(request.id)
        if params.echo:
            outputs = with_prompts_first(outputs, prompt_token_ids, self._prompt_text(request))
        try:
            yield from outputs
        finally:
            self._forget(request.id)

    def _new_id(self, offset: int = 0) -> str:
        return f"llm-{self._num_added + offset}"

    def _open(self, request: Request) -> None:
        """Queues a request whose outputs go to an inbox of its own."""
        self.engine.add(*self.preparer.prepare(request))
        self._num_added += 1
        self._inboxes[request.id] = deque()

    def _forget(self, request_id: str) -> None:
        """Ends a request that nobody waits for any more, if it still runs."""
        self.engine.abort(request_id)
        self._inboxes.pop(request_id, None)

    def _run(
        self,
        prompts: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        params = one_per_prompt(sampling_params, len(prompts), self.default_sampling_params)
        requests = [
            Request(
                id=self._new_id(i),
                prompt_token_ids=token_ids,
                sampling_params=one,
            )
            for i, (token_ids, one) in enumerate(zip(prompts, params, strict=True))
        ]
        outputs = self._finish(requests)
        return [
            with_prompt(output, request.prompt_token_ids, self._prompt_text(request))
            if request.sampling_params.echo
            else output
            for request, output in zip(requests, outputs, strict=True)
        ]

    def _prompt_text(self, request: Request) -> str:
        skip = request.sampling_params.skip_special_tokens
        return self.decode(request.prompt_token_ids, skip_special_tokens=skip)

    def _finish(self, requests: list[Request]) -> list[RequestOutput]:
        """Runs requests to their end; each one's whole output."""
        added: list[str] = []
        try:
            for request in requests:
                self._open(request)
                added.append(request.id)
            return [merge_outputs(list(self._outputs(i))) for i in added]
        finally:  # a bad prompt or Ctrl-C: the others must not stay behind in the engine
            for request_id in added:
                self._forget(request_id)


def _meet_followers(config: EngineConfig) -> "Followers":
    """The other processes of the engine, once all of them are there.

    Raises:
        ConfigError: this is one of them; they did not come, or have other settings.
    """
    from jaxserve.build.join import join_processes
    from jaxserve.multihost.leader import Followers

    if not config.processes.is_leader:
        raise ConfigError(
            f"process_id={config.processes.process_id}: only process 0 has an engine; the others call "
            "jaxserve.follow_leader"
        )
    followers = join_processes(config)
    assert isinstance(followers, Followers)
    return followers
