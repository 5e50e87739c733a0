"""From a loaded model to an engine."""

import collections
import dataclasses
import logging
import os

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve import EngineConfig, SamplingParams, load_model
from jaxserve.build.from_loaded import _resolve_buckets, build_loaded
from jaxserve.config import SchedulerConfig
from jaxserve.device import program_identity
from jaxserve.errors import ConfigError
from jaxserve.llm import LLM
from jaxserve.model.registry import ModelFunctions
from tests.llms import TINY

SMALL = {"max_num_seqs": 1, "max_num_batched_tokens": 4, "max_model_len": 32, "num_pages": 4}
SMALL |= {"token_buckets": (4,)}
CONFIG = EngineConfig.from_options(SMALL)


@pytest.fixture(scope="module")
def loaded():
    return load_model(str(TINY), CONFIG)


def changed(loaded, edit):
    params = jax.tree.map(lambda leaf: leaf, loaded.params)  # new dicts, the same leaves
    params = edit(params) or params
    return dataclasses.replace(loaded, params=params)


def missing(params):
    del params["layers"][1]["attn"]["k"]["kernel"]


def extra(params):
    params["layers"][0]["attn"]["k"]["bias"] = np.zeros(3)


def wrong_shape(params):
    params["norm"]["scale"] = params["norm"]["scale"][:5]


def wrong_dtype(params):
    params["norm"]["scale"] = params["norm"]["scale"].astype(np.float16)


def no_array(params):
    params["norm"]["scale"] = 1.0


def no_dict(params):
    params["norm"] = params["norm"]["scale"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (missing, r"params\['layers'\]\[1\]\['attn'\]\['k'\]\['kernel'\]: .* found nothing"),
        (
            extra,
            r"params\['layers'\]\[0\]\['attn'\]\['k'\]\['bias'\]: expected nothing, found float64",
        ),
        (wrong_shape, r"params\['norm'\]\['scale'\]: expected float32\[96\], found float32\[5\]"),
        (wrong_dtype, r"params\['norm'\]\['scale'\]: expected float32\[96\], found float16\[96\]"),
        (no_array, r"params\['norm'\]\['scale'\]: expected float32\[96\], found a float"),
        (no_dict, r"params\['norm'\]: expected a dict, found float32\[96\]"),
        (lambda params: [1], r"params: expected a dict, found a list"),
    ],
)
def test_a_leaf_at_fault_is_named(loaded, edit, message):
    with pytest.raises(ConfigError, match=message):
        build_loaded(CONFIG, changed(loaded, edit))


def as_other_mappings(params):
    return collections.OrderedDict(
        {k: collections.OrderedDict(v) if isinstance(v, dict) else v for k, v in params.items()}
    )


def as_strided_and_device_arrays(params):
    norm = np.repeat(params["norm"]["scale"], 2)[::2]  # not contiguous
    params["norm"]["scale"] = norm
    params["embed"]["embedding"] = jax.numpy.asarray(params["embed"]["embedding"])


@pytest.mark.parametrize("edit", [as_other_mappings, as_strided_and_device_arrays])
def test_any_mapping_of_any_arrays_will_do(loaded, edit):
    engine, times = build_loaded(CONFIG, changed(loaded, edit))
    assert times.compile_s > 0
    assert engine.stats().num_pages == 4


def test_a_cache_folder_that_cannot_be_used_is_said_in_one_line(tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    with caplog.at_level(logging.WARNING, "jaxserve"):
        LLM(str(TINY), compilation_cache_dir=str(file), **SMALL)
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "compilation_cache_dir" in record.message
    assert "\n" not in record.message


@pytest.fixture
def own_cache_dir(tmp_path):
    """A folder for compiled programs; what the run uses comes back afterwards."""
    before = jax.config.jax_compilation_cache_dir
    yield tmp_path / "new"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


class Work:
    """How often functions of the model are traced and programs compiled, from its creation on."""

    def __init__(self, monkeypatch):
        self.num_traced = self.num_compiled = 0
        for name in ("embed", "layers", "logits"):
            monkeypatch.setattr(ModelFunctions, name, self._counted(getattr(ModelFunctions, name)))
        jax.monitoring.register_event_listener(self._on_event)

    def _counted(self, function):
        def counted(*arguments, **options):
            self.num_traced += 1
            return function(*arguments, **options)

        return counted

    def _on_event(self, event, **kwargs):
        self.num_compiled += event == "/jax/compilation_cache/cache_misses"

    def of_a_start(self, folder, **changes):
        """(functions traced, programs compiled, greedy tokens) of one start in this folder."""
        jax.clear_caches()  # as in a process of its own
        self.num_traced = self.num_compiled = 0
        llm = LLM(str(TINY), compilation_cache_dir=folder, **(SMALL | changes))
        (output,) = llm.generate([[3, 5, 9]], SamplingParams(max_tokens=5, temperature=0))
        return self.num_traced, self.num_compiled, output.outputs[0].token_ids


def test_a_second_start_traces_nothing_and_compiles_nothing(own_cache_dir, monkeypatch):
    work = Work(monkeypatch)
    num_traced, num_compiled, token_ids = work.of_a_start(own_cache_dir)
    assert num_traced > 0
    assert num_compiled > 0
    assert work.of_a_start(own_cache_dir) == (0, 0, token_ids)
    # Controls: what may change a program makes it anew.
    assert work.of_a_start(own_cache_dir, num_pages=5)[:2] > (0, 0)
    monkeypatch.setattr(program_identity, "version", lambda name: f"{name} 99")
    num_traced, num_compiled, _ = work.of_a_start(own_cache_dir)
    assert num_traced > 0
    assert num_compiled == 0  # the same programs came out of it


def test_compiled_programs_that_were_cut_short_are_made_anew_once(own_cache_dir, monkeypatch):
    work = Work(monkeypatch)
    _, num_compiled, token_ids = work.of_a_start(own_cache_dir)
    for path in own_cache_dir.glob("*-cache"):
        os.truncate(path, path.stat().st_size // 2)
    assert work.of_a_start(own_cache_dir) == (0, num_compiled, token_ids)
    assert work.of_a_start(own_cache_dir) == (0, 0, token_ids)


def test_ladders_of_ones_own_are_compiled_and_no_more():
    llm = LLM(str(TINY), **(SMALL | {"token_buckets": (3, 4)}))
    stats = llm.engine.stats()
    assert (stats.token_buckets, stats.row_buckets) == ((3, 4), (1,))
    params = SamplingParams(max_tokens=3, temperature=0)
    (output,) = llm.generate([[3, 5, 9, 7, 2]], params)
    assert len(output.outputs[0].token_ids) == 3
    num_programs = llm.engine.executor.description["num_programs"]
    # Of T, of R, what scores and what loads histories, page copies, pool and count table.
    assert num_programs == 4 * len(stats.token_buckets) + 5 + 3 + 2 + 2


def test_steps_that_cannot_be_are_not_compiled():
    asked = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=512)
    assert _resolve_buckets(asked, max_model_len=24).tokens == (1, 2, 4, 8, 16, 32, 48)
    assert _resolve_buckets(asked, max_model_len=512).tokens[-1] == 512
    given = SchedulerConfig(max_num_seqs=2, token_buckets=(7, 512))
    assert _resolve_buckets(given, max_model_len=24).tokens == (7, 512)


def test_a_budget_below_max_num_seqs_lowers_it_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, "jaxserve"):
        llm = LLM(str(TINY), **(SMALL | {"max_num_seqs": 8}))
    assert llm.engine.stats().max_num_seqs == 4
    assert "max_num_seqs lowered from 8 to 4" in caplog.text


def test_host_kv_gib_makes_host_pages(loaded, caplog):
    options = SMALL | {"host_kv_gib": 0.01}
    with caplog.at_level(logging.INFO, "jaxserve"):
        engine, _ = build_loaded(EngineConfig.from_options(options), loaded)
    assert "54 in host RAM" in caplog.text  # 2 layers x 2 x 64 tokens x 3 heads x 64 x 4 bytes each
    assert 0 < engine.executor.costs.page_move_s < 1
    for gib, message in ((1e-6, "host_kv_gib=1e-06: less than one KV page"), (2**20, "are free")):
        with pytest.raises(ConfigError, match=message):
            build_loaded(EngineConfig.from_options(SMALL | {"host_kv_gib": gib}), loaded)
