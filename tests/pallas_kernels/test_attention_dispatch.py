"""Which backend serves, and what is refused, by name, before anything is compiled."""

import subprocess
import sys

import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention import layout, ragged_paged_attention
from tests.pallas_kernels.ragged_cases import array_args, make_case, make_pages


def demand(platform=None, **of) -> dispatch.Demand:
    return dispatch.Demand(platform=platform, **of)


def test_auto_follows_the_platform_and_says_why():
    for platform, name in (("cpu", "cpu"), ("tpu", "tpu")):
        wanted = demand(platform, dtype="float32", kv_dtype="float32", head_dim=64)
        assert dispatch.resolve_backend("auto", wanted) == name
        expected = f"attention backend {name} (auto on {platform})"
        assert dispatch.explain_backend("auto", wanted) == expected
    assert "as asked" in dispatch.explain_backend("reference", demand("cpu"))


def test_auto_names_what_it_passed_over():
    odd = demand("tpu", head_dim=96)
    assert dispatch.resolve_backend("auto", odd) == "xla"
    expected = "attention backend xla (auto on tpu; head_dim=96: attention backend 'tpu' serves 64, 128, 256)"
    assert dispatch.explain_backend("auto", odd) == expected


def test_auto_takes_the_hopper_kernel_where_it_serves():
    hopper = {"compute_capability": "9.0", "dtype": "bfloat16", "kv_dtype": "int8", "head_dim": 128}
    assert dispatch.resolve_backend("auto", demand("gpu", **hopper)) == "gpu"
    for change, reason in (
        (
            {"compute_capability": "8.0"},
            "compute capability=8.0: attention backend 'gpu' serves 9.0",
        ),
        (
            {"compute_capability": None},
            "compute capability=None: attention backend 'gpu' serves 9.0",
        ),
        ({"dtype": "float32"}, "dtype=float32: attention backend 'gpu' serves bfloat16"),
        ({"head_dim": 80}, "head_dim=80: attention backend 'gpu' serves 64, 128, 256"),
    ):
        wanted = demand("gpu", **hopper | change)
        expected = f"attention backend xla (auto on gpu; {reason})"
        assert dispatch.explain_backend("auto", wanted) == expected


def test_auto_says_why_the_cpu_kernel_does_not_serve(monkeypatch):
    here = {"dtype": "float32", "kv_dtype": "float32", "head_dim": 64}
    for change, reason in (
        ({"kv_dtype": "int8"}, "kv_cache_dtype=int8: attention backend 'cpu' serves float32"),
        ({"dtype": "bfloat16"}, "dtype=bfloat16: attention backend 'cpu' serves float32"),
        ({"head_dim": 24}, "head_dim=24: attention backend 'cpu' serves 16, 32, 48,"),
    ):
        wanted = demand("cpu", **here | change)
        said = dispatch.explain_backend("auto", wanted)
        assert said.startswith(f"attention backend xla (auto on cpu; {reason}")
    monkeypatch.setattr(dispatch.load, "missing", lambda: "no compiler")
    said = dispatch.explain_backend("auto", demand("cpu", **here))
    assert said == "attention backend xla (auto on cpu; attention backend 'cpu': no compiler)"
    with pytest.raises(NotImplementedError, match="'cpu': no compiler"):
        dispatch.resolve_backend("cpu", demand("cpu", **here))


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="attention_backend='flash'"):
        dispatch.resolve_backend("flash", demand("cpu"))
    with pytest.raises(ValueError, match="platform='abacus'"):
        dispatch.resolve_backend("auto", demand("abacus"))


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        ("tpu", demand("cpu"), "'tpu' runs on tpu, and this is cpu; --attention_backend=xla"),
        ("tpu", demand("tpu", dtype="float16"), "dtype=float16: .*'tpu' serves float32, bfloat16"),
        ("tpu", demand("tpu", kv_dtype="float16"), "kv_cache_dtype=float16: .*'tpu' serves"),
        ("tpu", demand("tpu", head_dim=32), "head_dim=32: attention backend 'tpu' serves 64, 128"),
        ("xla", demand("cpu", layout="tpu"), "layout=tpu: attention backend 'xla' serves split"),
        ("xla", demand("cpu", interpret=True), "attention_interpret=True: .*'xla' has no kernel"),
        (
            "auto",
            demand("cpu", interpret=True),
            "'auto': attention_interpret=True: .*'xla' has no kernel",
        ),
    ],
)
def test_what_a_backend_does_not_serve_is_refused_by_name(name, wanted, message):
    with pytest.raises(NotImplementedError, match=message):
        dispatch.resolve_backend(name, wanted)


def test_an_interpreted_kernel_runs_on_any_platform():
    wanted = demand("cpu", interpret=True, head_dim=64)
    assert (
        dispatch.explain_backend("tpu", wanted) == "attention backend tpu, interpreted (as asked)"
    )


@pytest.mark.parametrize("name", ["xla", "reference", "tpu"])
def test_page_sizes(name):
    usual = dispatch.pick_page_size(name, max_num_seqs=4, max_model_len=64)
    assert dispatch.check_page_size(name, usual) == usual
    assert dispatch.check_page_size(name, 4) == 4
    for bad in (0, 1, 2, 3, 12, 100, -8):
        with pytest.raises(ValueError, match=f"page_size={bad}:"):
            dispatch.check_page_size(name, bad)


def test_the_hopper_kernel_has_one_page_size():
    assert dispatch.pick_page_size("gpu", max_num_seqs=999, max_model_len=10**6) == 64
    with pytest.raises(ValueError, match="page_size=32: attention backend 'gpu' serves 64 only"):
        dispatch.check_page_size("gpu", 32)


def test_the_tpu_page_size_keeps_the_table_in_smem():
    def pick(rows, context, name="tpu"):
        return dispatch.pick_page_size(name, max_num_seqs=rows, max_model_len=context)

    assert pick(8, 2048) == 32
    assert pick(128, 32 * 1024) == 32  # 128 rows of 1024 pages: 512 KiB to the byte
    assert pick(128, 32 * 1024 + 1) == 64
    assert pick(256, 128 * 1024) == 256
    assert pick(1024, 128 * 1024, "xla") == 64  # no table in SMEM, no limit
    with pytest.raises(ValueError, match="max_num_seqs=512 and max_model_len=131072"):
        pick(512, 128 * 1024)


@pytest.mark.parametrize("name", ["xla", "reference", "tpu", "gpu"])
def test_what_ships_can_be_imported_and_has_a_layout(name):
    assert callable(dispatch.implementation(name).attend)
    assert dispatch.layout_of(name) in layout.LAYOUTS


def test_host_code_gets_it_without_jax():
    code = "import sys, pallas_kernels.dispatch, pallas_kernels.page_bytes; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _int(*values):
    return jnp.array(values, jnp.int32)


BAD = {
    "q": ({"q": jnp.zeros((2, 4))}, "q: shape"),
    "no tokens": ({"q": jnp.zeros((0, 4, 32))}, r"q: shape \[0, 4, 32\]"),
    "no rows": ({"kv_lens": _int(), "cu_q_lens": _int(0)}, "not a positive multiple of 0 rows"),
    "q dtype": ({"q": jnp.zeros((2, 4, 32), jnp.float16)}, "q: float16"),
    "head_dim": ({"q": jnp.zeros((2, 4, 16))}, "q: float32"),
    "heads": ({"q": jnp.zeros((2, 5, 32))}, "5 heads"),
    "k_new": ({"k_new": None}, "k_new and v_new"),
    "v_new": ({"v_new": jnp.zeros((2, 2, 16))}, "v_new: float32"),
    "kv_lens": ({"kv_lens": jnp.zeros(2)}, "kv_lens: float32"),
    "cu_q_lens": ({"cu_q_lens": _int(0, 1)}, "cu_q_lens: int32"),
    "page_table": ({"page_table": _int(0, 1, 2)}, "page_table: 3 entries"),
    "kv_starts": ({"kv_starts": _int(0)}, "kv_starts: int32"),
    "ranges": ({"ranges": _int(0, 1)}, "ranges: int32"),
    "sinks": ({"sinks": jnp.zeros(3)}, "sinks: float32"),
    "k_scale": ({"k_scale": jnp.ones(2)}, "k_scale: not allowed"),
    "window": ({"window": 0}, "window=0"),
    "soft_cap": ({"soft_cap": 0.0}, "soft_cap=0.0"),
    "backend": ({"backend": "abacus"}, "attention_backend='abacus'"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(change, message):
    case = make_case([(1, 3), (1, 5)])
    args = {"q": jnp.asarray(case.q), "kv": make_pages(case, "xla"), "sm_scale": 0.2}
    args |= {"backend": "xla", **array_args(case)} | change
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(**args)


def test_8_bit_pages_need_their_scales():
    case = make_case([(1, 3)], kv_dtype="int8")
    args = array_args(case) | {"v_scale": None}
    with pytest.raises(ValueError, match="v_scale: required"):
        ragged_paged_attention(
            jnp.asarray(case.q), kv=make_pages(case, "xla"), **args, sm_scale=0.2, backend="xla"
        )
