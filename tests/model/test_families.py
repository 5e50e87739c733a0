"""Every family and rope type against the logits of transformers: a whole prompt, chunks, single tokens, and a
prompt whose first pages another sequence has computed.

Where the C++ products run they are what is tested, on packed weights; the plain layers, which take long to
compile, are tested on one case of each thing that they do, and with one program.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.model.attention import AttentionKernel, PagedRows
from jaxserve.model.packed import pack_params
from jaxserve.model.registry import ModelFunctions, build_model
from jaxserve.model_config import LayerKind
from jaxserve.weights.loader import load_params, open_checkpoint
from pallas_kernels import dispatch
from pallas_kernels.native import load as native
from pallas_kernels.ragged_paged_attention.layout import KVPages
from tests.families import CASES

F32 = jnp.dtype("float32")
PAGE = 8
CHUNK = 16  # the rung that chunks are padded to
PLAIN = [
    "mistral_head_dim_v5",  # a head_dim that no C++ kernel serves
    "ministral_mixed",
    "qwen3_biases",
    "smollm3_window",
    "phi3_partial_longrope",
    "granite_biases",
]


def rows_of(table: list[int], begin: int, count: int) -> PagedRows:
    """One row: `count` tokens, the first at position `begin`."""
    return PagedRows(
        kv_lens=np.array([begin + count], np.int32),
        page_table=np.array(table, np.int32),
        kv_starts=np.zeros(1, np.int32),
        cu_q_lens=np.array([0, count], np.int32),
        ranges=np.array([int(count == 1), int(count == 1), 1], np.int32),
    )


class Sequence:
    """One sequence over a model's pages, in programs of one row."""

    def __init__(self, model: ModelFunctions, params, num_tokens: int):
        config = model.config
        self.model, self.params = model, params
        self.num_pages = -(-num_tokens // PAGE)
        pool = (2 * self.num_pages + 1, PAGE, config.num_kv_heads, config.head_dim, "float32")
        layout = dispatch.layout_of(model.kernel.backend)
        self.pages = [KVPages.zeros(layout, *pool) for _ in range(config.num_layers)]
        self.table = list(range(1, self.num_pages + 1))
        self.run = jax.jit(self._run)

    def _run(self, params, pages, token_ids, positions, rows):
        model = self.model
        x = model.embed(params["embed"], token_ids)
        x, pages = model.layers(model.layer_params(params), pages, x, positions, rows)
        return model.logits(model.head_params(params), x), pages

    def feed(self, token_ids: list[int], begin: int) -> np.ndarray:
        """Logits after each of some tokens, whose first has position `begin`."""
        count = len(token_ids)
        size = 1 if count == 1 and self.model.packs else -(-count // CHUNK) * CHUNK
        ids = np.zeros(size, np.int32)
        ids[:count] = token_ids
        rows = rows_of(self.table, begin, count)
        positions = begin + np.arange(size, dtype=np.int32)
        logits, self.pages = self.run(self.params, self.pages, ids, positions, rows)
        return np.asarray(logits)[:count]


def sequence_of(name: str, directory, backend: str) -> Sequence:
    case = CASES[name]
    params, config = load_params(open_checkpoint(case.write(directory)), F32)
    config = config.at_context(len(case.token_ids))
    model = build_model(config, F32, AttentionKernel(backend=backend))
    if model.layout is not None:
        params = pack_params(params, model.layout)
    return Sequence(model, jax.tree.map(jnp.asarray, params), len(case.token_ids))


def check(name: str, directory, backend: str) -> None:
    case, one = CASES[name], sequence_of(name, directory, backend)
    ids, expected, num_tokens = case.token_ids, case.logits, len(case.token_ids)

    def assert_near(logits: np.ndarray, begin: int) -> None:
        error = np.abs(logits - expected[begin : begin + len(logits)]).max()
        assert error < 1e-4, (name, begin, error)

    begin = 0
    while begin < num_tokens - 4:  # chunks, then single tokens
        end = min(begin + CHUNK - 3, num_tokens - 4)
        assert_near(one.feed(ids[begin:end], begin), begin)
        begin = end
    for begin in range(num_tokens - 4, num_tokens):
        assert_near(one.feed([ids[begin]], begin), begin)
    # Another sequence with the same two pages before its own.
    one.table = [*one.table[:2], *range(one.num_pages + 1, 2 * one.num_pages - 1)]
    assert_near(one.feed(ids[2 * PAGE : 2 * PAGE + CHUNK], 2 * PAGE), 2 * PAGE)


def backend_of(name: str) -> str:
    head_dim = CASES[name].config.get("head_dim") or 16
    return "cpu" if native.missing() is None and head_dim % 16 == 0 else "xla"


@pytest.mark.parametrize("name", CASES)
def test_c32_logits_are_those_of_transformers(name, tmp_path):
    check(name, tmp_path, backend_of(name))


@pytest.mark.parametrize("name", [name for name in PLAIN if backend_of(name) != "xla"])
def test_plain_layers_give_the_same(name, tmp_path):
    check(name, tmp_path, "xla")


def test_a_whole_prompt_in_one_step(tmp_path):
    case = CASES["ministral_mixed"]
    one = sequence_of("ministral_mixed", tmp_path, backend_of("ministral_mixed"))
    assert np.abs(one.feed(case.token_ids, 0) - case.logits).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("mistral_window", {"layer_windows": None}),
        ("qwen2_window", {"layer_windows": (4, 4, 4, 4)}),
        ("smollm3", {"rope_layers": None}),
        ("granite", {"residual_multiplier": 1.0}),
        ("granite", {"logits_scaling": 1.0}),
        ("granite", {"embedding_multiplier": 1.0}),
        ("granite", {"attention_multiplier": None}),
    ],
)
def test_the_comparison_tells_flags_apart(name, changed, tmp_path):
    """The control: without its flag each of these models says something else."""
    case, one = CASES[name], sequence_of(name, tmp_path, backend_of(name))
    config = dataclasses.replace(one.model.config, **changed)
    other = build_model(config, F32, one.model.kernel)
    logits = Sequence(other, one.params, len(case.token_ids)).feed(case.token_ids, 0)
    assert np.abs(logits - case.logits).max() > 1e-2


def test_a_run_of_layers_that_differ_has_to_say_which_they_are(tmp_path):
    one = sequence_of("ministral_mixed", tmp_path, "xla")
    model, x = one.model, jnp.zeros((1, one.model.config.hidden_size))
    assert set(model.config.layer_kinds) == {LayerKind(), LayerKind(window=7)}
    rows = rows_of([1, 2], begin=0, count=1)
    with pytest.raises(ValueError, match="kinds: 2 of 4 layers, which differ"):
        model.layers(
            model.layer_params(one.params)[:2], one.pages[:2], x, jnp.zeros(1, jnp.int32), rows
        )
