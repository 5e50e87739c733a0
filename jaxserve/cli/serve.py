"""`jaxserve serve` and `python -m jaxserve.server`: from flags to a `ServerConfig`, an engine, `run_server`.

This process imports no jax: the engine lives in one of its own. The libraries of the extra `serve` are
imported once the command line is checked.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from jaxserve.cli.arguments import UsageError
from jaxserve.cli.command_line import read_command_line
from jaxserve.cli.flag_types import define_float, define_integer
from jaxserve.cli.flags import (
    check_engine_options,
    configure_logging,
    define_engine,
    define_general,
    engine_options,
)
from jaxserve.cli.parallel_flags import define_parallel, follow, follows
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.generation_config import FILE, MODES
from jaxserve.server.config import METRICS_COMPAT, TOOL_CALL_PARSERS, ServerConfig, key_digest

USAGE = """\
usage: jaxserve serve --model=DIR|FILE.gguf|NAME [flags]
       python -m jaxserve.server --model=DIR|FILE.gguf|NAME [flags]

Serves a model over HTTP, as OpenAI's API does: /v1/completions, /v1/chat/completions, /v1/models,
/tokenize, /detokenize, /health, /metrics and a page at / (docs/server.md). Until the model is loaded and
everything is compiled, /health answers 503; then one line on stderr says "ready on http://HOST:PORT".
SIGTERM and SIGINT end it: requests in flight have --shutdown_timeout seconds, a second signal ends those
at once.
exit code: 0 stopped by a signal, 1 the engine failed, 2 could not start, 130 or 143 a second signal cut
the end short
"""

_SERVER_GROUP = "server"
_MIN_KEY_CHARS = 8
_DEFAULT = ServerConfig(model="model")
# Flags that are called as the fields they fill.
_SAME_NAMES = (
    "model",
    "host",
    "port",
    "allowed_hosts",
    "max_queue_requests",
    "max_queue_tokens",
    "request_timeout_s",
    "queue_timeout_s",
    "watchdog_timeout_s",
    "send_timeout_s",
    "body_timeout_s",
    "max_body_bytes",
    "max_bodies_bytes",
    "max_connections",
    "tool_call_parser",
    "dashboard",
    "metrics_compat",
    "enable_prompt_tokens_details",
)


def serve_flags() -> flags.FlagValues:
    """The flags of the command."""
    values = flags.FlagValues()
    group = {"flag_values": values, "module_name": _SERVER_GROUP}
    flags.DEFINE_string(
        "host", _DEFAULT.host, "Address to listen on; 0.0.0.0 = everywhere.", **group
    )
    define_integer("port", _DEFAULT.port, "Port to listen on; 0 = any that is free.", **group)
    flags.DEFINE_multi_string(
        "served_model_name",
        [],
        "Name of the model in requests and replies, which carry the first; unset = the last part of --model",
        **group,
    )
    flags.DEFINE_string(
        "api_key_file",
        None,
        "A file of API keys, one a line, # begins a comment; every path but /health asks for one.",
        **group,
    )
    flags.DEFINE_list(
        "allowed_hosts",
        [],
        "Names that requests may call this server by (Host), beside loopback ones; * = any. Unset = any, but "
        "without keys on a loopback --host none beside those.",
        **group,
    )
    _define_limits(group)
    _define_times(group)
    _define_api(group)
    define_engine(values)
    define_parallel(values)
    flags.DEFINE_enum(
        "scheduling",
        EngineConfig().scheduler.scheduling,
        ("continuous", "static"),
        "static is for comparison only.",
        flag_values=values,
        module_name="engine",
    )
    define_general(values)
    return values


def _define_limits(group: Mapping[str, Any]) -> None:
    define_integer(
        "max_queue_requests",
        _DEFAULT.max_queue_requests,
        "Sequences that may wait beside the --max_num_seqs that run; what is beyond gets a 429.",
        **group,
    )
    define_integer(
        "max_queue_tokens",
        None,
        "Prompt tokens that may wait for their first output token; what is beyond gets a 429. Unset = any.",
        **group,
    )
    define_integer("max_body_bytes", _DEFAULT.max_body_bytes, "Largest body of a request.", **group)
    define_integer(
        "max_bodies_bytes",
        None,
        "All bodies together that have no reply yet; what is beyond gets a 429. Unset = 16 of the largest.",
        **group,
    )
    define_integer(
        "max_connections",
        _DEFAULT.max_connections,
        "Connections that may be open at once; one more gets a 503 and is closed.",
        **group,
    )


def _define_times(group: Mapping[str, Any]) -> None:
    define_float(
        "request_timeout_s",
        None,
        "A request that takes longer ends with a 504. Unset = any.",
        **group,
    )
    define_float(
        "queue_timeout_s",
        None,
        "A request without its first token after so long ends with a 504. Unset = any.",
        **group,
    )
    define_float(
        "shutdown_timeout",
        _DEFAULT.shutdown_timeout_s,
        "Seconds that requests in flight have to end after SIGTERM; then they are aborted.",
        **group,
    )
    define_float(
        "watchdog_timeout_s",
        _DEFAULT.watchdog_timeout_s,
        "A step that takes longer counts as hung: the server ends.",
        **group,
    )
    define_float(
        "send_timeout_s",
        _DEFAULT.send_timeout_s,
        "A client that reads nothing of its reply for so long is dropped.",
        **group,
    )
    define_float(
        "body_timeout_s",
        _DEFAULT.body_timeout_s,
        "How long the head of a request, and each next part of its body, may take to arrive.",
        **group,
    )


def _define_api(group: Mapping[str, Any]) -> None:
    flags.DEFINE_enum(
        "tool_call_parser",
        _DEFAULT.tool_call_parser,
        TOOL_CALL_PARSERS,
        "The format in which the model calls tools; auto = as its chat template shows it.",
        **group,
    )
    flags.DEFINE_enum(
        "generation_config",
        "auto",
        MODES,
        f"auto: what the checkpoint's {FILE} recommends is the default of requests; none: it is not.",
        **group,
    )
    flags.DEFINE_string(
        "chat_template",
        None,
        "A file with a Jinja chat template instead of the checkpoint's. It is trusted like a program.",
        **group,
    )
    flags.DEFINE_multi_string(
        "cors_allow_origin",
        [],
        "An origin whose pages may call this server from a browser, or *; unset = none",
        **group,
    )
    flags.DEFINE_boolean("dashboard", _DEFAULT.dashboard, "Serve the page at /.", **group)
    flags.DEFINE_enum(
        "metrics_compat",
        _DEFAULT.metrics_compat,
        METRICS_COMPAT,
        "vllm = its names in /metrics too.",
        **group,
    )
    flags.DEFINE_boolean(
        "enable_prompt_tokens_details",
        _DEFAULT.enable_prompt_tokens_details,
        "Tell in `usage` how many prompt tokens came from the prefix cache also where there are several "
        "API keys.",
        **group,
    )


def read_api_keys(path: str) -> list[bytes]:
    """The digests of the keys in a file.

    Raises:
        UsageError: it cannot be read, holds no key, or a key that is too short to be one.
    """
    try:
        lines = Path(path).expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"--api_key_file={path}: {reason}") from None
    digests: list[bytes] = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key) < _MIN_KEY_CHARS or not key.isascii() or " " in key:
            raise UsageError(
                f"--api_key_file={path}: line {number}: a key must be at least {_MIN_KEY_CHARS} "
                "ASCII characters without spaces"
            )
        digests.append(key_digest(key))
    if not digests:
        raise UsageError(f"--api_key_file={path}: it holds no key")
    return list(dict.fromkeys(digests))


def server_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ServerConfig` that flags give."""
    settings = {name: given[name] for name in _SAME_NAMES}
    settings |= {
        "served_model_names": given["served_model_name"],
        "shutdown_timeout_s": given["shutdown_timeout"],
        "cors_allow_origins": given["cors_allow_origin"],
    }
    # What is given and empty (an unset variable of a shell, say) is no way to serve without keys.
    for name in ("api_key_file", "chat_template"):
        if given[name] == "":
            raise UsageError(f"--{name}=: must name a file")
    if given["api_key_file"] is not None:
        settings["api_key_digests"] = read_api_keys(given["api_key_file"])
    if given["chat_template"] is not None:
        settings["chat_template"] = _read_template(given["chat_template"])
    return settings


def _read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"--chat_template={path}: {reason}") from None


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        0 stopped by a signal, 1 the engine failed, 128 + the signal that cut the end short.

    Raises:
        JaxserveError: it could not start.
    """
    values = serve_flags()
    given = read_command_line(argv, values, USAGE, needed=["model"])
    if given is None:
        return 0
    configure_logging(given["verbosity"])
    options: dict[str, Any] = engine_options(values)
    check_engine_options(options)
    config = ServerConfig(**server_settings(given))
    try:
        from jaxserve.async_engine.process import ProcessEngine
        from jaxserve.server.serve import run_server
        from jaxserve.weights.loader import resolve_model
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the server needs the package {error.name}: pip install 'jaxserve[serve]'"
        ) from None
    if follows(options):
        return follow(given["model"], options)
    resolve_model(given["model"])  # raises what the engine's process would, two seconds later
    return run_server(
        config,
        lambda: ProcessEngine(
            given["model"],
            generation_config=given["generation_config"],
            watchdog_timeout_s=config.watchdog_timeout_s,
            **options,
        ),
    )
