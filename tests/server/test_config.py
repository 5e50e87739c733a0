"""`ServerConfig`: every range, and the model's names."""

import math

import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.config import ServerConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", ""),
        ("port", -1),
        ("port", 65536),
        ("port", True),
        ("port", "8000"),
        ("max_queue_requests", -1),
        ("max_queue_requests", 1.5),
        ("max_queue_tokens", 0),
        ("request_timeout_s", 0),
        ("request_timeout_s", math.nan),
        ("queue_timeout_s", -1.0),
        ("shutdown_timeout_s", -0.1),
        ("shutdown_timeout_s", math.inf),
        ("watchdog_timeout_s", 0),
        ("send_timeout_s", True),
        ("body_timeout_s", "1"),
        ("max_body_bytes", 0),
        ("max_bodies_bytes", 16 * 2**20 - 1),
        ("max_bodies_bytes", True),
        ("allowed_hosts", [""]),
        ("allowed_hosts", ["http://x"]),
        ("max_connections", 0),
        ("num_encoder_threads", 0),
        ("tool_call_parser", "mistral"),
        ("metrics_compat", "sglang"),
        ("cors_allow_origins", ["example.org"]),
        ("served_model_names", [""]),
    ],
)
def test_a_value_outside_its_range_is_named(field, value):
    name = {"shutdown_timeout_s": "shutdown_timeout"}.get(field, field).removesuffix("s")
    with pytest.raises(ConfigError, match=name) as caught:
        ServerConfig(model="m", **{field: value})
    assert str(value if not isinstance(value, list) else value[0]) in str(caught.value)


def test_the_edges_are_served():
    ServerConfig(
        model="m",
        port=0,
        max_queue_requests=0,
        max_queue_tokens=1,
        max_body_bytes=10,
        max_bodies_bytes=10,
        allowed_hosts=["*", "a.example", "::1", "[::1]"],
        shutdown_timeout_s=0,
        cors_allow_origins=["*", "http://localhost:3000"],
    )


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("/home/someone/models/tiny_llama/", "tiny_llama"),
        ("models/tiny.gguf", "tiny.gguf"),
        ("org/name", "name"),
    ],
)
def test_the_name_is_no_path(model, name):
    assert ServerConfig(model=model).names == (name,)
    assert ServerConfig(model=model, served_model_names=["a", "b"]).names == ("a", "b")
