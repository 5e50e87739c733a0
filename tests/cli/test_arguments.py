"""What is a flag and what is text."""

import dataclasses
from pathlib import Path

import pytest
from absl import flags

from jaxserve.cli.arguments import UsageError, parse_arguments
from jaxserve.cli.bench_offline import offline_flags
from jaxserve.cli.flags import engine_options, help_text
from jaxserve.cli.run import USAGE, run_flags
from jaxserve.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig


def parse(*arguments: str) -> tuple[dict, list[str]]:
    values = run_flags()
    positionals = parse_arguments(arguments, values)
    return values.flag_values_dict(), positionals


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-tokens=5"],
        ["--max_tokens=5"],
        ["--max-tokens", "5"],
        ["-max-tokens=5"],
        ["--max-tokens=4", "--max_tokens=5"],
        ["a", "--max-tokens=5"],
    ],
)
def test_hyphens_stand_for_underscores_in_names(arguments):
    assert parse(*arguments)[0]["max_tokens"] == 5


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--ignore-eos"], True),
        (["--ignore_eos=true"], True),
        (["--noignore-eos"], False),
        (["--no-ignore-eos"], False),
        (["--no_ignore_eos"], False),
        (["--ignore-eos=false"], False),
        (["--ignore-eos", "--noignore_eos"], False),
    ],
)
def test_booleans(arguments, value):
    assert parse(*arguments)[0]["ignore_eos"] is value


@pytest.mark.parametrize("arguments", [["--stop=a-b"], ["--stop", "a-b"], ["-stop", "a-b"]])
def test_values_keep_their_hyphens(arguments):
    values, positionals = parse(*arguments, "c-d")
    assert values["stop"] == ["a-b"]
    assert positionals == ["c-d"]


def test_a_value_may_look_like_a_flag_and_be_empty_or_hold_an_equals_sign():
    values, positionals = parse("--stop", "--max-tokens", "--stop=", "--stop=a=b-c", "--stop", "--")
    assert values["stop"] == ["--max-tokens", "", "a=b-c", "--"]
    assert positionals == []


def test_prompts_are_never_changed():
    prompts = ["a-b", "- a list", "-5 + 3 =", "-", "", "x=--max-tokens", "no-ignore-eos"]
    assert parse(*prompts)[1] == prompts


def test_everything_behind_two_dashes_is_text():
    values, positionals = parse("--max-tokens=3", "a", "--", "--max-tokens=4", "--", "--help")
    assert values["max_tokens"] == 3
    assert not values["help"]
    assert positionals == ["a", "--max-tokens=4", "--", "--help"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--max-token=5", ["unknown flag '--max-token'", "--max_tokens"]),
        ("--frobnicate", ["unknown flag '--frobnicate'", "--help"]),
        ("--not a flag", ["put -- before"]),
        ("--max-tokens=five", ["flag --max_tokens=five: must be an integer"]),
        ("--max-tokens=1.5", ["flag --max_tokens=1.5: must be an integer"]),
        ("--max-tokens=", ["flag --max_tokens=: must be an integer"]),
        ("--seed=" + "9" * 5000, ["must be an integer"]),
        ("--verbosity=loud", ["flag --verbosity=loud: must be an integer"]),
        ("--temperature=hot", ["flag --temperature=hot: must be a number"]),
        ("--kv-cache-gib=1GB", ["flag --kv_cache_gib=1GB: must be a number"]),
        ("--stop-token-ids=1,b", ["--stop_token_ids=1,b: must be integers with commas"]),
        ("--stop-token-ids=", ["--stop_token_ids=: must be integers with commas"]),
        ("--max-tokens", ["--max_tokens needs a value"]),
        ("--page-size=big", ['flag --page_size=big: must be an integer or "auto"']),
        ("--dtype=float16", ["dtype", "float32|bfloat16"]),
        ("--kv-cache-dtype=fp8", ["kv_cache_dtype", "bfloat16|int8|fp8_e4m3"]),
        ("--admission=sjf", ["admission", "fcfs|priority|lpm|short_first"]),
        ("--eviction=random", ["eviction", "lru|lfu|fifo|priority"]),
        ("--preemption-mode=kill", ["preemption_mode", "auto|recompute|swap"]),
        ("--max-num-partial-prefills=x", ['must be an integer or "auto"']),
        ("--target-itl-s=fast", ["flag --target_itl_s=fast: must be a number"]),
        ("--host-kv-gib=1GB", ["flag --host_kv_gib=1GB: must be a number"]),
        ("--enable-prefix-caching=often", ["must be true or false"]),
        ("--stats-interval-s=often", ["must be a number"]),
        ("--ignore-eos=maybe", ["flag --ignore_eos=maybe: must be true or false"]),
        ("--temperature 0", ["unknown flag", "use --temperature=0, or two lines in a flagfile"]),
        ("--max-tokens\t5", ["use --max-tokens=5, or two lines"]),
        ("--no-ignore-eos=1", ["--no-ignore-eos takes no value"]),
        ("--no-max-tokens", ["unknown flag '--no-max-tokens'"]),
        ("--flagfile=/no/such/file", ["--flagfile=/no/such/file", "No such file"]),
    ],
)
def test_mistakes_are_named(argument, words):
    with pytest.raises(UsageError) as caught:
        parse(argument)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_a_flagfile_that_cannot_be_read_is_named_once(tmp_path: Path):
    (tmp_path / "latin").write_bytes(b"--stop=\xe9")
    for path, reason in (("nowhere", "No such file or directory"), ("latin", "it is not UTF-8")):
        with pytest.raises(UsageError) as caught:
            parse(f"--flagfile={tmp_path / path}")
        assert str(caught.value) == f"cannot read --flagfile={tmp_path / path}: {reason}"


def test_flagfile(tmp_path: Path):
    inner = tmp_path / "inner.flags"
    inner.write_text("--no-ignore-eos\n--stop=x-y\n")
    outer = tmp_path / "outer.flags"
    outer.write_bytes(
        b"\xef\xbb\xbf# settings\r\n--max-num-seqs=3\r\n\r\n// more\n--stop\na-b\n  --ignore-eos  \n"
        b"a-prompt\n--flagfile=" + str(inner).encode() + b"\n--\n--top-k=2"
    )
    values, positionals = parse("--flagfile", str(outer), "last", "--max-tokens=5")
    assert values["max_num_seqs"] == 3
    assert values["ignore_eos"] is False
    assert values["stop"] == ["a-b", "x-y"]
    assert values["top_k"] == 0
    assert values["max_tokens"] == 5
    assert positionals == ["a-prompt", "--top-k=2", "last"]


def test_later_arguments_beat_a_flagfile_and_mistakes_in_it_name_it(tmp_path: Path):
    file = tmp_path / "a.flags"
    file.write_text("--max-tokens=5\n")
    assert parse(f"--flagfile={file}", "--max-tokens=6")[0]["max_tokens"] == 6
    assert parse("--max-tokens=6", f"--flagfile={file}")[0]["max_tokens"] == 5
    file.write_text("--max-tokns=5\n")
    with pytest.raises(UsageError, match=r"a\.flags: unknown flag '--max-tokns'"):
        parse(f"--flagfile={file}")
    file.write_text("--max-tokens 5\n")
    with pytest.raises(UsageError, match=r"a\.flags: .*; use --max-tokens=5, or two lines"):
        parse(f"--flagfile={file}")
    file.write_text(f"--flagfile={file}\n")
    with pytest.raises(UsageError, match=r"a\.flags: it includes itself$"):
        parse(f"--flagfile={file}")
    other = tmp_path / "b.flags"
    other.write_text(f"--flagfile={file}\n")
    file.write_text(f"--flagfile={other}\n")
    with pytest.raises(UsageError, match=r"a\.flags: .*b\.flags: --flagfile=.*a\.flags includes"):
        parse(f"--flagfile={file}")


def test_commands_have_flags_of_their_own_and_none_is_global():
    run, bench = run_flags(), offline_flags()
    assert "input" in run
    assert "input" not in bench
    assert "workload" in bench
    assert "workload" not in run
    assert "max_num_seqs" not in flags.FLAGS
    parse_arguments(["--max-num-seqs=3"], run)
    parse_arguments([], bench)
    assert bench.flag_values_dict()["max_num_seqs"] == EngineConfig().scheduler.max_num_seqs


def test_help_lists_this_commands_flags_only():
    text = help_text(USAGE, run_flags())
    assert "--max_num_seqs" in text
    assert "--input_format" in text
    assert "--workload" not in text
    assert "--undefok" not in text


def test_help_says_what_ships_and_what_bounds_the_pool():
    text = " ".join(help_text(USAGE, run_flags()).split())
    assert "--attention_backend: reference, xla, cpu, gpu or tpu; auto" in text
    assert "On CPU the pool that this makes is at most 2 GiB" in text


def test_integers_may_be_hexadecimal_and_bounds_are_kept():
    values = offline_flags()
    parse_arguments(["--seed=0x10"], values)
    assert values.flag_values_dict()["seed"] == 16
    with pytest.raises(UsageError, match=r"repetitions=0.*a positive integer"):
        parse_arguments(["--repetitions=0"], values)


def test_defaults_are_those_of_the_dataclasses():
    values = run_flags()
    parse_arguments([], values)
    options = engine_options(values)
    assert options.pop("compilation_cache_dir") == str(Path.home() / ".cache/jaxserve/xla")
    assert EngineConfig.from_options(options) == EngineConfig()
    assert values["temperature"].value == 1.0


@pytest.mark.parametrize("make_flags", [run_flags, offline_flags])
def test_every_field_of_the_configs_is_a_flag(make_flags):
    fields = [*dataclasses.fields(SchedulerConfig), *dataclasses.fields(CacheConfig)]
    missing = {field.name for field in fields} - set(make_flags())
    assert missing == set()


def test_engine_flags_reach_the_config():
    values = run_flags()
    parse_arguments(
        [
            "--page-size=16",
            "--num-pages=9",
            "--max-model-len=auto",
            "--kv-cache-gib=0.5",
            "--scheduling=static",
            "--compilation-cache-dir=",
            "--seed=7",
            "--admission=lpm",
            "--max-num-partial-prefills=3",
            "--long-prefill-token-threshold=auto",
            "--target-itl-s=0.05",
            "--preemption-mode=swap",
            "--no-enable-prefix-caching",
            "--eviction=lfu",
            "--host-kv-gib=0.5",
            "--no-async-scheduling",
            "--num-decode-steps=4",
            "--token-buckets=1,8,512",
            "--row-buckets=4,32",
            "--tensor-parallel-size=2",
        ],
        values,
    )
    config = EngineConfig.from_options(engine_options(values))
    assert config.cache.page_size == 16
    assert config.cache.num_pages == 9
    assert config.cache.kv_cache_gib == 0.5
    assert config.max_model_len is None
    assert config.scheduler == SchedulerConfig(
        scheduling="static",
        admission="lpm",
        max_num_partial_prefills=3,
        target_itl_s=0.05,
        preemption_mode="swap",
        async_scheduling=False,
        num_decode_steps=4,
        token_buckets=(1, 8, 512),
        row_buckets=(4, 32),
    )
    assert not config.cache.enable_prefix_caching
    assert config.cache.eviction == "lfu"
    assert config.cache.host_kv_gib == 0.5
    assert config.compilation_cache_dir is None
    assert config.parallel == ParallelConfig(tensor_parallel_size=2)
    assert config.seed == 7
