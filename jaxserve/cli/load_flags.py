"""The flags of commands that put a server under load: whom, and with what.

Used by `bench_serve` and `bench_capacity`. Invariant: everything that can be refused without the server is
refused before it hears of us.
"""

import dataclasses
import math
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from jaxserve.cli.arguments import UsageError
from jaxserve.cli.flag_types import JsonParser, define_auto_integer, define_float, define_integer
from jaxserve.cli.run_input import open_input
from jaxserve.server.load.arrivals import arrival_times
from jaxserve.server.load.client import ROUTES, LoadClient, Target
from jaxserve.server.load.datasets import (
    DatasetError,
    Lengths,
    as_texts,
    drawn_prompts,
    drawn_requests,
    file_requests,
    repeated,
    vocabulary,
)
from jaxserve.server.load.http_client import Address
from jaxserve.server.load.records import LoadRequest

DATASETS = ("jsonl", "random", "prefix_repetition")
_DEFAULT_PREFIX = {"random": (0, 1), "prefix_repetition": (256, 10)}  # prefix_len, num_prefixes
_TARGET_GROUP = "server"
_LOAD_GROUP = "load"


def define_target(values: flags.FlagValues) -> None:
    """Whom to measure."""
    group: dict[str, Any] = {"flag_values": values, "module_name": _TARGET_GROUP}
    flags.DEFINE_string("base_url", "http://127.0.0.1:8000", "Where the server is.", **group)
    flags.DEFINE_enum(
        "backend", "openai", list(ROUTES), "openai: completions; openai-chat: chats.", **group
    )
    flags.DEFINE_string(
        "model", None, "The name to ask for; unset = the first that the server lists.", **group
    )
    flags.DEFINE_string(
        "api_key_file", None, "Send the first key of this file; # begins a comment.", **group
    )
    define_float("request_timeout_s", 600.0, "No request takes longer.", **group)
    flags.DEFINE(
        JsonParser(dict), "extra_body", None, "JSON object: fields for every request.", **group
    )
    flags.DEFINE_boolean(
        "cache_salt",
        True,
        "Send a cache_salt of its own with each measurement, so that it finds nothing in the prefix cache "
        "that an earlier one left. --nocache_salt for servers that refuse the field.",
        **group,
    )


def define_dataset(values: flags.FlagValues) -> None:
    """What to send, and how it arrives."""
    default = Lengths()
    group: dict[str, Any] = {"flag_values": values, "module_name": _LOAD_GROUP}
    flags.DEFINE_enum(
        "dataset",
        "random",
        DATASETS,
        "jsonl: lines as `jaxserve run` takes them, from --dataset_path. random: prompts of random words. "
        "prefix_repetition: these behind one of --num_prefixes shared prefixes.",
        **group,
    )
    flags.DEFINE_string("dataset_path", None, "The file of --dataset=jsonl.", **group)
    define_integer("input_len", default.input_len, "Tokens of a prompt.", lower_bound=1, **group)
    define_integer(
        "output_len",
        default.output_len,
        "Tokens of an output; of jsonl lines without max_tokens too.",
        lower_bound=1,
        **group,
    )
    define_float("range_ratio", 0.0, "Lengths vary by this share, uniformly, in [0, 1).", **group)
    define_auto_integer(
        "prefix_len",
        "Tokens before those of --input_len that prompts share; auto = 0, 256.",
        **group,
    )
    define_auto_integer("num_prefixes", "How many such prefixes there are; auto = 1, 10.", **group)
    define_float(
        "burstiness", 1.0, "Of arrivals: 1 = Poisson; less is burstier; inf = in step.", **group
    )
    define_integer("seed", 0, "Of drawn prompts and arrivals.", lower_bound=0, **group)


def read_target(given: dict[str, Any]) -> Target:
    """The server, from its flags.

    Raises:
        UsageError: a flag is at fault.
    """
    try:
        Address.parse(given["base_url"])
    except ValueError:
        raise UsageError(
            f"--base_url={given['base_url']}: must be http://HOST:PORT or https://HOST:PORT"
        ) from None
    require(given["request_timeout_s"] > 0, given, "request_timeout_s", "above 0")
    return Target(
        base_url=given["base_url"],
        backend=given["backend"],
        model=given["model"],
        api_key=read_api_key(given["api_key_file"]) if given["api_key_file"] else None,
        request_timeout_s=given["request_timeout_s"],
        extra_body=given["extra_body"] or {},
    )


def require(ok: bool, given: dict[str, Any], name: str, limit: str) -> None:
    """Refuses a flag's value unless `ok`."""
    if not ok:
        raise UsageError(f"--{name}={given[name]}: must be {limit}")


def read_api_key(path: str) -> str:
    """The first key of a key file.

    Raises:
        UsageError: it cannot be read, or holds none.
    """
    try:
        lines = Path(path).expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read --api_key_file={path}: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys:
        raise UsageError(f"--api_key_file={path} holds no key")
    return keys[0]


def with_salt(target: Target, given: dict[str, Any]) -> Target:
    """The target of one measurement: its requests share a new cache_salt, if --cache_salt."""
    salt = secrets.token_hex(8) if given["cache_salt"] else None
    return dataclasses.replace(target, cache_salt=salt)


class Dataset:
    """What the flags say to send.

    Args:
        given: the flags.

    Raises:
        UsageError: a flag or a line of the file is at fault.
    """

    def __init__(self, given: dict[str, Any]):
        self._given = given
        self._is_chat = given["backend"] == "openai-chat"
        require(0 <= given["range_ratio"] < 1, given, "range_ratio", "in [0, 1)")
        require(given["burstiness"] > 0, given, "burstiness", "above 0")
        prefix_len, num_prefixes = _DEFAULT_PREFIX.get(given["dataset"], (0, 1))
        for name, least in (("prefix_len", 0), ("num_prefixes", 1)):
            require(given[name] is None or given[name] >= least, given, name, f"at least {least}")
        self._lengths = Lengths(
            input_len=given["input_len"],
            output_len=given["output_len"],
            range_ratio=given["range_ratio"],
            prefix_len=prefix_len if given["prefix_len"] is None else given["prefix_len"],
            num_prefixes=num_prefixes if given["num_prefixes"] is None else given["num_prefixes"],
        )
        self._lines = self._read_file() if given["dataset"] == "jsonl" else None
        if self._lines is None and given["dataset_path"]:
            raise UsageError("--dataset_path is for --dataset=jsonl")

    @property
    def num_lines(self) -> int | None:
        """Of the file; None where requests are drawn."""
        return None if self._lines is None else len(self._lines)

    def _read_file(self) -> list[LoadRequest]:
        path = self._given["dataset_path"]
        if not path:
            raise UsageError("--dataset_path is needed: the file of --dataset=jsonl")
        defaults = {"max_tokens": self._given["output_len"]}
        try:
            return file_requests(_lines(path), is_chat=self._is_chat, defaults=defaults)
        except DatasetError as error:
            raise UsageError(f"--dataset_path={path}: {error}") from None

    async def requests(
        self, client: LoadClient, num_prompts: int | None, *, draw: int = 0
    ) -> Sequence[LoadRequest]:
        """Requests to send: those of the file, over and over, or drawn ones.

        Args:
            client: whose server's tokenizer makes drawn prompts.
            num_prompts: how many; None = each line of the file once.
            draw: another number draws other prompts.
        """
        if self._lines is not None:
            return repeated(self._lines, num_prompts)
        assert num_prompts is not None
        rng = np.random.default_rng([self._given["seed"], 0, draw])
        drawn = drawn_prompts(rng, num_prompts, self._lengths, await vocabulary(client))
        prompts = await as_texts(client, drawn) if self._is_chat else drawn
        return drawn_requests(prompts, is_chat=self._is_chat)

    def arrivals(self, num_requests: int, request_rate: float) -> np.ndarray:
        """When requests are due, f64[num_requests]."""
        rng = np.random.default_rng([self._given["seed"], 1])
        return arrival_times(rng, num_requests, request_rate, self._given["burstiness"])

    def describe(self) -> dict[str, Any]:
        """What a result says of it."""
        given = self._given
        burstiness = given["burstiness"] if math.isfinite(given["burstiness"]) else "inf"
        about = {"dataset": given["dataset"], "seed": given["seed"], "burstiness": burstiness}
        if self._lines is not None:
            return about | {"dataset_path": Path(given["dataset_path"]).name}
        return about | vars(self._lengths)


def _lines(path: str) -> Iterator[bytes]:
    source = open_input(path, flag="--dataset_path").lines
    while not source.exhausted:
        line = source.next_line(wait=True)
        if line is not None:
            yield line
