"""Makes data/openai_api.json: the part of OpenAI's description of its API that this server serves.

    python -m scripts.clients.cut_description OPENAPI_YAML

OPENAPI_YAML is openapi.yaml of github.com/openai/openai-openapi (MIT licence). Needs PyYAML, which the
environment of schemathesis has. What does not say what a request or a reply may be is left out.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

PATHS = {
    "/chat/completions": ("post",),
    "/completions": ("post",),
    "/models": ("get",),
    "/models/{model}": ("get",),
}
TARGET = Path(__file__).parent / "data" / "openai_api.json"
_PREFIX = "#/components/"
_NAMES = ("properties", "schemas", "mapping")  # their keys are names, not keywords


def cut(value: Any, are_names: bool = False) -> Any:
    """A value without descriptions, examples and extensions."""
    if isinstance(value, list):
        return [cut(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: cut(one, key in _NAMES and not are_names)
        for key, one in value.items()
        if are_names
        or not (
            key in ("description", "summary", "tags", "example", "examples") or key.startswith("x-")
        )
    }


def described(value: Any) -> Any:
    """Every reply needs a description."""
    for operations in value.values():
        for operation in operations.values():
            for reply in operation["responses"].values():
                reply["description"] = "A reply."
    return value


def with_null(value: Any) -> Any:
    """`nullable`, a word of OpenAPI 3.0, in the words of 3.1."""
    if isinstance(value, list):
        return [with_null(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: with_null(one) for key, one in value.items() if key != "nullable"}
    return {"anyOf": [found, {"type": "null"}]} if value.get("nullable") is True else found


def refs(value: Any) -> set[str]:
    """Every component that is pointed at."""
    if isinstance(value, list):
        return set().union(*map(refs, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
    return own.union(*map(refs, value.values()))


def main() -> None:
    source = yaml.safe_load(Path(sys.argv[1]).read_text("utf-8"))
    paths = {path: {m: source["paths"][path][m] for m in PATHS[path]} for path in PATHS}
    paths = described(cut(paths))
    components: dict[str, dict[str, Any]] = {}
    waiting = refs(paths)
    while waiting:
        kind, name = waiting.pop().removeprefix(_PREFIX).split("/")
        if name not in components.setdefault(kind, {}):
            components[kind][name] = cut(source["components"][kind][name])
            waiting |= refs(components[kind][name])
    document = {
        "openapi": source["openapi"],
        "info": {
            "title": "A cut of OpenAI's API",
            "version": source["info"]["version"],
            "license": {"name": "MIT", "identifier": "MIT"},
            "description": (
                "Cut out of openapi.yaml of github.com/openai/openai-openapi by "
                "scripts/clients/cut_description.py."
            ),
        },
        "servers": [{"url": "http://127.0.0.1:8000/v1"}],
        "paths": paths,
        "components": {kind: dict(sorted(some.items())) for kind, some in components.items()},
    }
    TARGET.write_text(json.dumps(with_null(document), indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
