"""`ServerState`: what every handler of the server works with.

Made by `serve.py` (and by tests over a fake engine), handed to each feature's `routes(state)`.

    loading -- engine warm --> ready -- SIGTERM --> draining
                  \\______________ engine dead or hung: failed (client.failure)

Invariant: whatever a request took here (a place in the queue, a running generation) is given back when
its HTTP request ends, even if its handler forgets, or never gets to run.
"""

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from starlette.requests import Request as HttpRequest

from jaxserve.async_engine.protocol import EngineClient, ServedModel
from jaxserve.errors import ConfigError, EngineDeadError, InvalidRequestError
from jaxserve.request import CacheSalt, Request, RequestOutput
from jaxserve.server.admission import Admission, Place
from jaxserve.server.config import ServerConfig
from jaxserve.server.encoder import Encoder
from jaxserve.server.errors import ENGINE_DEAD, ApiError, unavailable
from jaxserve.server.json_body import read_object
from jaxserve.server.measures import Metrics
from jaxserve.text.tokenizer import Tokenizer

MAX_SIDE_WAITING = 64  # requests for tokens or text alone, each with its body

logger = logging.getLogger("jaxserve.server")


class ServerState:
    """The server's parts.

    Args:
        config: the settings.
        client: the engine; it need not have started yet.
    """

    def __init__(self, config: ServerConfig, client: EngineClient) -> None:
        self.config = config
        self.client = client
        self.encoder = Encoder(config.num_encoder_threads)
        self.side_encoder = Encoder(1, max_waiting=MAX_SIDE_WAITING, name="side-encoder")
        self.metrics = Metrics()
        self.created = int(time.time())
        self.is_draining = False
        self.num_requests = 0  # HTTP requests that generate and are not answered yet
        self._model: ServedModel | None = None
        self._admission: Admission | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's names; replies carry the first."""
        return self.config.names

    @property
    def model(self) -> ServedModel:
        """What is served, with the chat template that was asked for.

        Raises:
            ApiError: 503, the engine still loads.
        """
        if self._model is None:
            raise unavailable("the model is loading", "loading")
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            InvalidRequestError: the checkpoint has none.
        """
        if self.model.tokenizer is None:
            raise InvalidRequestError("this checkpoint has no tokenizer: it takes token ids alone")
        return self.model.tokenizer

    @property
    def is_loaded(self) -> bool:
        """Whether the engine is warm."""
        return self._admission is not None

    @property
    def admission(self) -> Admission:
        """Who may come in.

        Raises:
            ApiError: 503, the engine still loads.
        """
        if self._admission is None:
            raise unavailable("the model is loading", "loading")
        return self._admission

    def set_loaded(self) -> None:
        """The engine is warm: requests are taken from here on.

        Raises:
            ConfigError, CheckpointError: the chat template cannot be used.
        """
        self._model = self._with_template(self.client.model)
        self._admission = Admission(
            num_running=self.model.max_num_seqs,
            max_queue_requests=self.config.max_queue_requests,
            max_queue_tokens=self.config.max_queue_tokens,
        )

    def _with_template(self, model: ServedModel) -> ServedModel:
        source = self.config.chat_template
        if source is None:
            return model
        if model.tokenizer is None:
            raise ConfigError("chat_template needs a tokenizer, and this checkpoint has none")
        return replace(model, tokenizer=model.tokenizer.with_chat_template(source))

    def refusal(self) -> ApiError | None:
        """Why no new request is taken now; None = they are."""
        if self.client.failure is not None:
            return unavailable(ENGINE_DEAD, "engine_dead")
        if not self.is_loaded:
            return unavailable("the model is loading", "loading")
        if self.is_draining:
            return unavailable("the server is shutting down", "shutting_down")
        return None

    async def body(self, request: HttpRequest) -> dict[str, object]:
        """The request's JSON object; see `json_body.read_object`."""
        return await read_object(request)

    def admit(self, request: HttpRequest, *, num_sequences: int = 1, num_tokens: int = 0) -> Place:
        """A place for a request that wants to generate; given back at the end of the HTTP request at
        the latest.

        Args:
            request: the HTTP request that holds it.
            num_sequences: its choices, over all of its prompts.
            num_tokens: of its prompts, as far as known; else `Place.count_tokens` once they are.

        Raises:
            ApiError: 503, no request is taken now; 429, the queue is full.
        """
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        place = self.admission.admit(num_sequences=num_sequences, num_tokens=num_tokens)
        self.num_requests += 1
        self._idle.clear()
        stack = _exit_stack(request)
        stack.callback(self._count_out)
        stack.callback(place.release)
        return place

    def _count_out(self) -> None:
        self.num_requests -= 1
        if not self.num_requests:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no admitted request is left unanswered."""
        await self._idle.wait()

    def generate(
        self, http_request: HttpRequest, request: Request, place: Place
    ) -> AsyncGenerator[RequestOutput]:
        """`EngineClient.generate` within the server's time limits; closed (which aborts it) at the end
        of the HTTP request at the latest.

        Raises:
            ApiError: 504, the time is over; 503, the server shut down before it was done.
            InvalidRequestError, EngineDeadError: as `EngineClient.generate`.
        """
        outputs = self._bounded(http_request, request, place)
        _exit_stack(http_request).push_async_callback(outputs.aclose)
        return outputs

    async def _bounded(
        self, http_request: HttpRequest, request: Request, place: Place
    ) -> AsyncGenerator[RequestOutput]:
        arrived = http_request.state.arrived_s
        limits = (self.config.queue_timeout_s, self.config.request_timeout_s)
        ends = [None if limit is None else arrived + limit for limit in limits]
        first = min((end for end in ends if end is not None), default=None)
        has_begun = False
        async with (
            self.metrics.generation(request, arrived) as measured,
            contextlib.aclosing(self.client.generate(request)) as outputs,
        ):
            while True:
                try:
                    async with asyncio.timeout_at(ends[1] if has_begun else first):
                        output = await anext(outputs, None)
                except TimeoutError:
                    raise self._too_late(is_queued=not has_begun) from None
                if output is None:
                    return
                measured.output(output)
                if not has_begun and any(one.token_ids for one in output.outputs):
                    has_begun = True
                    place.started(len(request.prompt_token_ids))
                if self.is_draining and _was_aborted(output):
                    raise unavailable("the server shut down before it was done", "shutting_down")
                yield output

    def _too_late(self, *, is_queued: bool) -> ApiError:
        names = ("queue_timeout_s", "request_timeout_s") if is_queued else ("request_timeout_s",)
        limits = {name: getattr(self.config, name) for name in names}
        limit, name = min((s, name) for name, s in limits.items() if s is not None)
        # What was too much once is not tried again by itself, as OpenAI's clients do after a 504.
        return ApiError(
            504,
            f"the request was not {'begun' if name[0] == 'q' else 'done'} within this server's limit "
            f"of {limit:g} s ({name})",
            code="timeout",
            headers={"x-should-retry": "false"},
        )

    def cache_salt(self, request: HttpRequest, own: str | None = None) -> CacheSalt | str | None:
        """What separates the cached pages of a request from those of others.

        Args:
            request: the HTTP request.
            own: the salt that the client chose, if any.

        Returns:
            With several API keys a salt of the key that was used, with the client's own in it; else
            the client's own.
        """
        if len(self.config.api_key_digests) < 2:
            return own
        digest: bytes = request.state.api_key_digest
        # Its order among the keys would change with the file; a digest of the digest tells nothing.
        value = hmac.new(digest, (own or "").encode("utf-8", "surrogatepass"), "sha256").hexdigest()
        return CacheSalt("api_key", value)

    def sender(self, request: HttpRequest) -> str:
        """Who sent a request, as far as senders are told apart: its key, else its address."""
        if self.config.api_key_digests:
            return request.state.api_key_digest.hex()
        return "" if request.client is None else request.client.host

    def check_model(self, name: object) -> str:
        """The name that a reply carries, for what a request calls `model`; None = it named none.

        Raises:
            ApiError: 404, no such model; 400, not a text.
        """
        if name is None:
            return self.served_names[0]
        if not isinstance(name, str):
            raise ApiError(400, "model must be a string", param="model")
        if name == self.config.model:  # what the operator calls it is understood too
            return self.served_names[0]
        if name not in self.served_names:
            raise ApiError(
                404,
                f"the model {name[:100]!r} does not exist here; GET /v1/models lists what does",
                type="invalid_request_error",
                param="model",
                code="model_not_found",
            )
        return name

    async def close(self, *, timeout_s: float = 0.0) -> None:
        """Ends the engine and the threads."""
        with contextlib.suppress(EngineDeadError):
            await self.client.shutdown(timeout_s=timeout_s)
        self.encoder.shutdown()
        self.side_encoder.shutdown()


def _was_aborted(output: RequestOutput) -> bool:
    return output.finished and any(one.finish_reason == "abort" for one in output.outputs)


def _exit_stack(request: HttpRequest) -> contextlib.AsyncExitStack:
    return request.state.exit_stack
