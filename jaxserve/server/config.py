"""`ServerConfig`: every setting of the HTTP server, frozen and checked when made.

Built by `jaxserve serve` from its flags and by tests; read by everything in `jaxserve.server`. What the
engine is told stands in `EngineConfig`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.errors import ConfigError, shown

TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "none")
METRICS_COMPAT = ("none", "vllm")
MAX_HEADER_BYTES = 16 * 1024
MAX_JSON_DEPTH = 64
MAX_JSON_CONTAINERS = 2**17  # objects and arrays of one body
MAX_JSON_MEMBERS = 2**19  # of all its objects
MIN_API_KEY_CHARS = 8
_LISTS = ("served_model_names", "allowed_hosts", "api_key_digests", "cors_allow_origins")


def key_digest(key: str) -> bytes:
    """What is kept of an API key: its SHA-256, so that keys of any length compare in one time."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP side.

    Args:
        model: the model as it was given to the engine; its last part is the name clients use, unless
            served_model_names says otherwise.
        served_model_names: the names that a request's `model` may have, the first one is what replies
            carry. Empty = the name in `model`.
        host, port: where to listen; port 0 = any that is free.
        allowed_hosts: names that requests may call the server by, beside loopback ones; "*" = any. Empty =
            any, but where there are no keys and `host` is a loopback address: then no others.
        api_key_digests: `key_digest` of each key that is accepted. Empty = no key is asked for.
        max_queue_requests: most sequences that may wait behind those that can run at once
            (max_num_seqs of the engine); one more is refused with 429. A request for n choices counts n.
        max_queue_tokens: most tokens of prompts that have not given their first token; None =
            no limit.
        request_timeout_s: how long a request may take from its arrival to its last token; None = no
            limit.
        queue_timeout_s: how long a request may take until its first token; None = no limit.
        shutdown_timeout_s: how long requests in flight may take to end after a SIGTERM.
        watchdog_timeout_s: after so long in one step the engine counts as hung.
        send_timeout_s: a client that takes nothing of its reply for so long is dropped.
        body_timeout_s: how long the headers of a request, and then each next part of its body, may
            take to arrive.
        max_body_bytes: of one request.
        max_bodies_bytes: of all bodies that are being received or wait for the first part of their reply;
            None = 16 times max_body_bytes.
        max_connections: open at once; one more is answered with 503 and closed.
        num_encoder_threads: threads that render chat templates and tokenize.
        tool_call_parser: the format in which the model writes tool calls; "auto" = by its template.
        chat_template: Jinja source instead of the checkpoint's; None = the checkpoint's.
        cors_allow_origins: origins whose pages may call the server; "*" = any. Empty = none.
        dashboard: serve the page at /.
        metrics_compat: "vllm" also gives metrics under vLLM's names.
        enable_prompt_tokens_details: tell in `usage` how many prompt tokens came from the prefix cache,
            also with several API keys.

    Raises:
        ConfigError: a value outside its range.
    """

    model: str
    served_model_names: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: Sequence[str] = ()
    api_key_digests: Sequence[bytes] = ()
    max_queue_requests: int = 256
    max_queue_tokens: int | None = None
    request_timeout_s: float | None = None
    queue_timeout_s: float | None = None
    shutdown_timeout_s: float = 0.0
    watchdog_timeout_s: float = 300.0
    send_timeout_s: float = 60.0
    body_timeout_s: float = 60.0
    max_body_bytes: int = 16 * 2**20
    max_bodies_bytes: int | None = None
    max_connections: int = 4096
    num_encoder_threads: int = 2
    tool_call_parser: str = "auto"
    chat_template: str | None = None
    cors_allow_origins: Sequence[str] = ()
    dashboard: bool = True
    metrics_compat: str = "none"
    enable_prompt_tokens_details: bool = False

    def __post_init__(self) -> None:
        for name in _LISTS:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in self.served_model_names:
            _require(isinstance(name, str) and name != "", "served_model_name", name, "not empty")
        for name in self.allowed_hosts:
            ok = isinstance(name, str) and name != "" and not set(name) & set("/ @,")
            _require(ok, "allowed_hosts", name, "names like example.org, without http:// or a path")
        # The system would take an empty one for all addresses.
        _require(self.host != "", "host", self.host, "an address or a name; 0.0.0.0 = everywhere")
        _check_whole("port", self.port, 0, 65535)
        _check_whole("max_queue_requests", self.max_queue_requests, 0, 2**31 - 1)
        if self.max_queue_tokens is not None:
            _check_whole("max_queue_tokens", self.max_queue_tokens, 1, 2**31 - 1)
        _check_whole("max_body_bytes", self.max_body_bytes, 1, 2**31 - 1)
        if self.max_bodies_bytes is not None:
            low, most = self.max_body_bytes, self.max_bodies_bytes
            what = f"an integer of at least max_body_bytes ({low})"
            _require(type(most) is int and most >= low, "max_bodies_bytes", most, what)
        _check_whole("max_connections", self.max_connections, 1, 2**31 - 1)
        _check_whole("num_encoder_threads", self.num_encoder_threads, 1, 64)
        for name in ("request_timeout_s", "queue_timeout_s"):
            if getattr(self, name) is not None:
                _check_seconds(name, getattr(self, name))
        _check_seconds("shutdown_timeout", self.shutdown_timeout_s, or_zero=True)
        for name in ("watchdog_timeout_s", "send_timeout_s", "body_timeout_s"):
            _check_seconds(name, getattr(self, name))
        _check_choice("tool_call_parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        _check_choice("metrics_compat", self.metrics_compat, METRICS_COMPAT)
        for origin in self.cors_allow_origins:
            ok = origin == "*" or origin.startswith(("http://", "https://"))
            _require(ok, "cors_allow_origin", origin, "* or an origin like https://example.org")

    @property
    def shows_cached_tokens(self) -> bool:
        """Whether `usage` tells the cached tokens: by itself only where all clients are one."""
        return self.enable_prompt_tokens_details or len(self.api_key_digests) < 2

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names, at least one; replies carry the first. Never a path of this machine."""
        if self.served_model_names:
            return tuple(self.served_model_names)
        return (self.model.replace("\\", "/").rstrip("/").rpartition("/")[2] or self.model,)


def _require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise ConfigError(f"{name} must be {limit}, got {shown(value)}")


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    ok = is_whole and low <= value <= high  # type: ignore[operator]
    _require(ok, name, value, f"an integer in [{low}, {high}]")


def _check_seconds(name: str, value: object, *, or_zero: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    most = 10**9  # compared, not converted: NaN fails each comparison
    ok = is_number and (0 < value <= most or (or_zero and value == 0))  # type: ignore[operator]
    _require(ok, name, value, f"seconds in {'[' if or_zero else '('}0, {most:g}]")


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    _require(value in choices, name, value, f"one of {', '.join(choices)}")
