"""Keeps what schemathesis makes up cheap: few tokens, few choices. Loaded by schemathesis.

Only numbers that are right are made smaller, so what the server has to refuse is still sent. Most names of
models and roles become some that are known: others are refused before anything else is looked at.
"""

import os
from typing import Any

import schemathesis

MOST = {"max_tokens": 8, "max_completion_tokens": 8, "n": 2, "best_of": 2, "min_tokens": 4}

ROLES = ("system", "user", "assistant", "user", "tool")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Makes a body cheap."""
    if isinstance(body, dict):
        for name, most in MOST.items():
            value = body.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and most < value <= 10_000:
                body[name] = most
        if "messages" in body or "prompt" in body:
            body.setdefault("max_tokens", 8)
        for message in body["messages"] if isinstance(body.get("messages"), list) else ():
            role = message.get("role") if isinstance(message, dict) else None
            if isinstance(role, str) and len(role) % 4:
                message["role"] = ROLES[len(role) % len(ROLES)]
        model = body.get("model")
        if isinstance(model, str) and len(model) % 4:
            body["model"] = os.environ["JAXSERVE_MODEL"]
    return body
