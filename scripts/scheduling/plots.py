"""The plots of docs/scheduling.md, from the figures that were just measured.

Called by scripts/scheduling_figures with --plots; the only user of matplotlib.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from scripts.scheduling.simulated import Figure

SIZE = (7.0, 3.6)  # inches
DPI = 110


def plot_utilisation(figure: Figure, folder: Path) -> Path:
    """Bars: tokens held / slots owned, by allocator."""
    canvas, axes = plt.subplots(figsize=SIZE)
    names = list(figure.data)
    bars = axes.barh(names, [100 * figure.data[name] for name in names], color="#4878a8")
    axes.bar_label(bars, fmt="%.1f %%", padding=4)
    axes.set_xlim(0, 112)
    axes.invert_yaxis()
    axes.set_xlabel("tokens held / slots of owned pages, %, weighted by time")
    axes.set_title("KV utilisation by allocator")
    return _save(canvas, folder / "kv_utilisation.png")


def plot_interference(figure: Figure, folder: Path) -> Path:
    """The longest gap between two tokens of a stream, step by step, against the time it ended."""
    canvas, axes = plt.subplots(figsize=SIZE)
    styles = {"whole prompts": ("#c44e52", "."), "chunks of 512": ("#8c8c8c", "")}
    for name, (ends_s, gaps_s) in sorted(figure.data.items(), key=lambda arm: -arm[1][1].max()):
        color, marker = styles.get(name, ("#4878a8", ""))
        steps_s, first = np.unique(ends_s, return_index=True)  # gaps stand in order of their ends
        longest_ms = 1e3 * np.maximum.reduceat(gaps_s, first)
        axes.plot(steps_s, longest_ms, color=color, marker=marker, markersize=3, label=name)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.set_xlabel("seconds; the 32k-token prompt arrives at 1 s")
    axes.set_ylabel("longest gap between tokens, ms")
    axes.set_title("Sixteen streams while a long prompt is computed")
    axes.legend(loc="upper left", fontsize="small")
    return _save(canvas, folder / "itl_timeline.png")


def plot_hit_rates(figures: dict[str, list[Figure]], folder: Path) -> Path:
    """Block hit rate against capacity, a line for the independent count and points for the tree.

    Args:
        figures: by name of the trace, in order of capacity.
        folder: where to put it.
    """
    canvas, axes = plt.subplots(figsize=SIZE)
    for color, (name, points) in zip(("#4878a8", "#c44e52"), figures.items(), strict=False):
        limited = [one.data for one in points if one.data["capacity"] is not None]
        capacities = [one["capacity"] for one in limited]
        axes.plot(
            capacities,
            [100 * one["counted"] for one in limited],
            color=color,
            label=f"{name}: LRU list of blocks",
        )
        axes.scatter(
            capacities,
            [100 * one["found"] for one in limited],
            color=color,
            zorder=3,
            label=f"{name}: radix tree, pages of 16",
        )
        for one in points:
            if one.data["capacity"] is None:
                axes.axhline(100 * one.data["found"], color=color, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_ylim(0, 70)
    axes.set_xlabel("capacity, blocks of 512 tokens; dotted: unlimited")
    axes.set_ylabel("block hit rate, %")
    axes.set_title("Prefix cache on the Mooncake traces, one request after another")
    axes.legend(fontsize="x-small", loc="lower right")
    return _save(canvas, folder / "hit_rate.png")


def _save(canvas: plt.Figure, path: Path) -> Path:
    canvas.tight_layout()
    canvas.savefig(path, dpi=DPI, metadata={"Software": None})
    plt.close(canvas)
    return path
