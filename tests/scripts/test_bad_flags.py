"""The measuring scripts refuse flags that mean nothing at once, with a line that names the flag."""

import argparse
import runpy
import sys

import pytest

from scripts.aot.arguments import parse

SCRIPTS = [
    (
        "bench_peers",
        "--install=nope",
        "--install=nope: no 'nope'; known: vllm, transformers, llama_cpp",
    ),
    ("bench_peers", "--peers=vlm", "--peers=vlm: no 'vlm'; known: vllm, transformers, llama_cpp"),
    ("bench_peers", "--workloads=w9", "--workloads=w9: no 'w9'; known: w1, w2, w3"),
    ("bench_peers", "--table=nowhere.json", "--table: nowhere.json is not a file"),
    ("bench_peers", "--repetitions=0", "--repetitions must be at least 1, got 0"),
    ("bench_peers", "--model=nowhere", "--model=nowhere is no checkpoint directory"),
    ("run_clients", "--clients=nope", "--clients=nope: no 'nope'; known: openai,openai_node"),
    ("run_clients", "--clients=", "--clients names none"),
    ("run_clients", "--model=nowhere", "--model=nowhere is no checkpoint directory"),
    ("device_check", "--backend=gpu", "attention_backend='gpu' runs on gpu, and this is cpu"),
    ("device_check", "--seed=-1", "--seed=-1: must be at least 0"),
    ("device_check", "--output=nowhere/x.json", "there is no folder nowhere"),
]


@pytest.mark.parametrize(("script", "flag", "message"), SCRIPTS)
def test_a_script_names_the_flag(script, flag, message, monkeypatch, capsys, repository):
    path = str(repository / "scripts" / script)
    monkeypatch.setattr(sys, "argv", [path, flag])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path, run_name="__main__")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


DEFAULTS = {
    "heads": "all",
    "steps": "all",
    "kv_dtypes": "bfloat16,int8",
    "variants": "all",
    "copies": "",
    "models": "all",
    "layers": "all",
    "devices": "1,8",
}


def parse_with(monkeypatch, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", default=value)
    monkeypatch.setattr(sys, "argv", ["worker", *flags])
    return parse(parser, "tpu")


def test_workers_take_what_there_is(monkeypatch):
    assert vars(parse_with(monkeypatch)) == DEFAULTS
    assert parse_with(monkeypatch, "--layers=3", "--models=llama-3-8b").layers == "3"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        *((f"--{name}=nope", f"--{name}=nope: no 'nope'; known: ") for name in list(DEFAULTS)[:6]),
        ("--layers=0", "--layers=0: expected a number from 1 up, or all"),
        ("--layers=x", "--layers=x: expected a number from 1 up, or all"),
        ("--devices=1,-8", "--devices=1,-8: expected numbers from 1 up"),
        ("--devices=3", "--devices=3: llama-3-8b: "),
    ],
)
def test_workers_name_the_flag_before_they_compile(flag, message, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parse_with(monkeypatch, flag)
    assert message in capsys.readouterr().err
