"""A plan as JSON values, and as a table for people with the formulas in it.

Called by `plan.py`. Invariant: the table is made from the JSON record alone, so both say the same.
"""

from typing import Any

from jaxserve.plan.chips import CHIPS
from jaxserve.plan.planner import Plan, StepBound, kv_bytes_per_token, weight_bytes
from jaxserve.schedule.buckets import Buckets
from pallas_kernels.page_bytes import ITEM_BYTES

_INDENT = 26


def plan_json(plan: Plan, buckets: Buckets) -> dict[str, Any]:
    """The plan as JSON values: bytes, counts and seconds.

    Args:
        plan: of `make_plan`.
        buckets: the ladders of its limits.
    """
    config, memory = plan.config, plan.memory
    model, part = config.model, config.model.of_one_chip(config.num_chips)
    item_bytes, kv_item_bytes = ITEM_BYTES[config.dtype], ITEM_BYTES[config.kv_dtype]
    return {
        "model": "",
        "chip": "",
        "num_chips": config.num_chips,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_dtype,
        "attention_backend": plan.backend,
        "page_layout": plan.layout,
        "page_size": plan.page_size,
        "shape": {
            "num_layers": model.num_layers,
            "num_heads": model.num_heads,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "item_bytes": item_bytes,
            "kv_item_bytes": kv_item_bytes,
        },
        "num_params": model.num_params,
        "weight_bytes": model.num_params * item_bytes,
        "weight_bytes_by_dtype": weight_bytes(model),
        "kv_bytes_per_token": kv_bytes_per_token(config),
        "kv_heads_per_chip": part.num_kv_heads,
        "chip_memory": {
            "hbm_bytes": memory.hbm_bytes,
            "memory_utilization": config.cache.memory_utilization,
            "usable_bytes": memory.usable_bytes,
            "weight_bytes": memory.weight_bytes,
            "step_bytes": memory.step_bytes,
            "count_table_bytes": memory.count_table_bytes,
            "free_bytes": memory.free_bytes,
            "page_bytes": memory.page_bytes,
            "kv_bytes_per_token": memory.page_bytes // plan.page_size,
        },
        "fits": plan.fits,
        "short_by_bytes": plan.short_by_bytes,
        "num_pages": memory.num_pages,
        "num_kv_tokens": max(memory.num_pages - 1, 0) * plan.page_size,
        "num_prompt_tokens": config.num_prompt_tokens,
        "num_output_tokens": config.num_output_tokens,
        "pages_per_sequence": plan.pages_per_sequence,
        "max_concurrency": plan.max_concurrency,
        "ridge_batch": plan.ridge_batch,
        "ridge_batch_at_lengths": plan.ridge_batch_at_lengths,
        "decode_batch": plan.decode_batch,
        "decode_tokens_per_s": plan.decode[-1].tokens_per_s if plan.decode else 0.0,
        "prefill_tokens_per_s": plan.prefill[-1].tokens_per_s if plan.prefill else 0.0,
        "decode": [_bound(one) for one in plan.decode],
        "prefill": [_bound(one) for one in plan.prefill],
        "token_buckets": list(buckets.tokens),
        "row_buckets": list(buckets.rows),
    }


def _bound(bound: StepBound) -> dict[str, Any]:
    time = bound.time
    return {
        "num_tokens": bound.num_tokens,
        "tokens_per_s": bound.tokens_per_s,
        "step_s": time.step_s,
        "weights_s": time.weights_s,
        "kv_s": time.kv_s,
        "compute_s": time.compute_s,
        "links_s": time.links_s,
        "bound_by": time.bound_by,
    }


def plan_text(record: dict[str, Any]) -> str:
    """The table for people.

    Args:
        record: of `plan_json`, with model, chip and fewest_chips, and aot and sweep where they were asked.
    """
    parts = [*_head(record), "", *_memory(record), "", *_capacity(record)]
    if record["fits"]:
        parts += ["", *_speed(record), "", *_buckets(record)]
    if "aot" in record:
        parts += ["", *_aot(record)]
    if "sweep" in record:
        parts += ["", record["sweep"]["chart"]]
    return "\n".join(line.rstrip() for line in parts)


def _row(name: str, value: str, text: str = "") -> str:
    return f"{name:<{_INDENT}}{value:>20}  {text}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.3f} GB"


def _head(record: dict[str, Any]) -> list[str]:
    chips, shape = record["num_chips"], record["shape"]
    by_dtype = ", ".join(
        f"{name} {_gb(size)}" for name, size in record["weight_bytes_by_dtype"].items()
    )
    own, heads = record["kv_heads_per_chip"], shape["num_kv_heads"]
    held = f", each head by {own * chips // heads} chips" if own * chips > heads else ""
    return [
        f"{record['model']} on {chips} x {record['chip']}: weights {record['dtype']}, pages "
        f"{record['kv_cache_dtype']}, attention {record['attention_backend']}",
        "",
        _row(
            "parameters",
            f"{record['num_params']:,}",
        ),
        _row("weights", f"{record['weight_bytes']:,} B", by_dtype),
        _row(
            "KV of a token",
            f"{record['kv_bytes_per_token']:,} B",
            f"2 x {shape['num_layers']} layers x {heads} kv heads x {shape['head_dim']} head_dim x "
            f"{shape['kv_item_bytes']} B",
        ),
        _row(
            "KV of a token, a chip",
            f"{record['chip_memory']['kv_bytes_per_token']:,} B",
            f"{own} of the {heads} kv heads{held}, page layout {record['page_layout']}",
        ),
    ]


def _memory(record: dict[str, Any]) -> list[str]:
    memory = record["chip_memory"]
    share = f"{memory['memory_utilization']:g} x {_gb(memory['hbm_bytes'])}"
    return [
        "memory of a chip",
        _row("  usable", _gb(memory["usable_bytes"]), share),
        _row("  - weights", _gb(memory["weight_bytes"])),
        _row("  - largest step", _gb(memory["step_bytes"]), _about_step(record["chip"])),
        _row("  - table of penalties", _gb(memory["count_table_bytes"])),
        _row("  = for pages", _gb(memory["free_bytes"])),
    ]


def _about_step(chip: str) -> str:
    if CHIPS[chip].platform == "cpu":
        return "nothing is set aside on a CPU"
    asks = "; --aot asks the compiler" if CHIPS[chip].platform == "tpu" else ""
    return f"an estimate{asks}"


def _capacity(record: dict[str, Any]) -> list[str]:
    memory, size = record["chip_memory"], record["page_size"]
    prompt, output = record["num_prompt_tokens"], record["num_output_tokens"]
    pages = record["num_pages"]
    lines = [
        _row(
            "pages",
            f"{pages:,}",
            f"of {size} tokens, {memory['page_bytes']:,} B each; one is the null page",
        ),
        _row("tokens in pages", f"{record['num_kv_tokens']:,}"),
        _row(
            "sequences at once",
            f"{record['max_concurrency']:,}",
            f"of {prompt:,} + {output:,} tokens = {record['pages_per_sequence']} pages",
        ),
    ]
    if not record["fits"]:
        lines.append("")
        lines.append(
            f"does not fit: each chip lacks {_gb(record['short_by_bytes'])} for one such sequence; "
            + _remedy(record)
        )
    return lines


def _remedy(record: dict[str, Any]) -> str:
    fewest = record["fewest_chips"]
    if fewest is None:
        return "no number of such chips that can share this model holds it"
    return f"{fewest} chips hold it"


def _speed(record: dict[str, Any]) -> list[str]:
    at_lengths = record["ridge_batch_at_lengths"]
    at_lengths = "never" if at_lengths is None else f"from {at_lengths:,} sequences"
    middle = record["num_prompt_tokens"] + record["num_output_tokens"] // 2
    return [
        "at best (a roofline: a step takes max(weights + KV, compute) + links)",
        _row(
            "  ridge batch", f"{record['ridge_batch']:,}", "tokens: arithmetic as slow as weights"
        ),
        _row("  with KV at these lengths", at_lengths),
        "",
        *_bounds(f"decode, {middle:,} tokens of context", "batch", record["decode"]),
        "",
        *_bounds(f"prefill, prompts of {record['num_prompt_tokens']:,}", "step", record["prefill"]),
    ]


def _bounds(title: str, what: str, bounds: list[dict[str, Any]]) -> list[str]:
    columns = "".join(f"{name:>10}" for name in ("weights", "KV", "compute", "links"))
    lines = [title, f"  {what:>8}{'tokens/s':>14}{'step ms':>11}{columns}  bound by"]
    for one in bounds:
        times = [one[name] * 1e3 for name in ("weights_s", "kv_s", "compute_s", "links_s")]
        lines.append(
            f"  {one['num_tokens']:>8,}{one['tokens_per_s']:>14,.0f}{one['step_s'] * 1e3:>11.3f}"
            + "".join(f"{time:>10.3f}" for time in times)
            + f"  {one['bound_by']}"
        )
    return lines


def _buckets(record: dict[str, Any]) -> list[str]:
    return [
        "shapes that would be compiled",
        f"  tokens  {' '.join(map(str, record['token_buckets']))}",
        f"  rows    {' '.join(map(str, record['row_buckets']))}",
    ]


def _aot(record: dict[str, Any]) -> list[str]:
    aot = record["aot"]
    lines = [
        f"compiled for {aot['topology']} ({aot['num_layers']} layers, {aot['compile_s']:.0f} s)"
    ]
    if aot["hbm_bytes"] is not None:
        lines += [
            _row("", "the compiler", "the plan"),
            *(
                _row(f"  {name}", _gb(aot[key]), _gb(aot[f"planned_{key}"]))
                for name, key in (
                    ("weights, pages, table", "resident_bytes"),
                    ("largest step", "step_bytes"),
                    ("a chip's memory", "hbm_bytes"),
                )
            ),
            _row("  difference", f"{aot['difference']:+.2%}", "of the plan"),
        ]
    if aot["fault"]:
        lines.append(f"  fault: {aot['fault']}")
    return lines
