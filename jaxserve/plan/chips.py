"""What chips can do, from their makers' data sheets: the numbers behind `roofline.py`.

Peak figures: no real step reaches them, so times computed from them are lower bounds, good for
comparing two ways of scheduling and not for promising a latency.
"""

from dataclasses import dataclass

from jaxserve.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ChipSpec:
    """One accelerator chip.

    Args:
        peak_flops_per_s: dense bfloat16 multiply-adds count as two.
        hbm_bytes_per_s: bandwidth of its memory.
        hbm_bytes: size of its memory.
        host_bytes_per_s: between its memory and host RAM, one way.
        link_bytes_per_s: what it can send to the other chips at once, all links together, one way.
        peak_f32_flops_per_s: as above where weights are float32 and products keep all of its bits.
        platform: jax's name of it: "tpu", "gpu" or "cpu".
        compute_capability: of a GPU.
        device_kinds: what jax calls such devices (`jax.Device.device_kind`).
    """

    peak_flops_per_s: float
    hbm_bytes_per_s: float
    hbm_bytes: int
    host_bytes_per_s: float
    link_bytes_per_s: float
    peak_f32_flops_per_s: float
    platform: str
    compute_capability: str | None = None
    device_kinds: tuple[str, ...] = ()

    def flops_per_s(self, dtype: str) -> float:
        """The peak for weights and activations of a type, "bfloat16" or "float32"."""
        return self.peak_f32_flops_per_s if dtype == "float32" else self.peak_flops_per_s


GB = 10**9
# A float32 product at full precision is six bfloat16 ones on a TPU ("bf16_6x", what precision HIGHEST
# means there). Source: jax.lax.Precision, and Henry, Tang and Heinecke 2019, section 3.
_TPU_F32_PASSES = 6
CHIPS: dict[str, ChipSpec] = {
    # Source: cloud.google.com/tpu/docs/v5e: 197 TFLOPs, 16 GB at 819 GB/s, ICI 400 GB/s both ways.
    # Host: 16 GB/s, "How to Scale Your Model" (Austin et al. 2025), part 2.
    "v5e": ChipSpec(
        peak_flops_per_s=197e12,
        hbm_bytes_per_s=819e9,
        hbm_bytes=16 * GB,
        host_bytes_per_s=16e9,
        link_bytes_per_s=200e9,
        peak_f32_flops_per_s=197e12 / _TPU_F32_PASSES,
        platform="tpu",
        device_kinds=("TPU v5 lite", "TPU v5e"),
    ),
    # Source: cloud.google.com/tpu/docs/v5p: 459 TFLOPs, 95 GB at 2765 GB/s, ICI 4800 Gb/s.
    # Host: as v5e.
    "v5p": ChipSpec(
        peak_flops_per_s=459e12,
        hbm_bytes_per_s=2765e9,
        hbm_bytes=95 * GB,
        host_bytes_per_s=16e9,
        link_bytes_per_s=600e9,
        peak_f32_flops_per_s=459e12 / _TPU_F32_PASSES,
        platform="tpu",
        device_kinds=("TPU v5", "TPU v5p"),
    ),
    # Source: cloud.google.com/tpu/docs/v6e: 918 TFLOPs, 32 GB at 1638 GB/s, ICI 800 GB/s both ways.
    # Host: PCIe Gen5; 32 GB/s, as in "How to Scale Your Model", part 2.
    "v6e": ChipSpec(
        peak_flops_per_s=918e12,
        hbm_bytes_per_s=1638e9,
        hbm_bytes=32 * GB,
        host_bytes_per_s=32e9,
        link_bytes_per_s=400e9,
        peak_f32_flops_per_s=918e12 / _TPU_F32_PASSES,
        platform="tpu",
        device_kinds=("TPU v6 lite", "TPU v6e"),
    ),
    # Source: NVIDIA A100 data sheet, SXM 80 GB: 312 TFLOPS, 2039 GB/s, NVLink 600 GB/s both ways,
    # PCIe Gen4 64 GB/s both ways, 19.5 TFLOPS of float32.
    "a100": ChipSpec(
        peak_flops_per_s=312e12,
        hbm_bytes_per_s=2039e9,
        hbm_bytes=80 * GB,
        host_bytes_per_s=32e9,
        link_bytes_per_s=300e9,
        peak_f32_flops_per_s=19.5e12,
        platform="gpu",
        compute_capability="8.0",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
    ),
    # Source: NVIDIA H100 data sheet, SXM: 1979 TFLOPS with sparsity = 989.5 dense, 80 GB at
    # 3.35 TB/s, NVLink 900 GB/s both ways, PCIe Gen5 128 GB/s both ways,
    # 67 TFLOPS of float32.
    "h100": ChipSpec(
        peak_flops_per_s=989.5e12,
        hbm_bytes_per_s=3350e9,
        hbm_bytes=80 * GB,
        host_bytes_per_s=64e9,
        link_bytes_per_s=450e9,
        peak_f32_flops_per_s=67e12,
        platform="gpu",
        compute_capability="9.0",
        device_kinds=("NVIDIA H100 80GB HBM3",),
    ),
    # Source: NVIDIA H200 data sheet, SXM: as H100, 141 GB at 4.8 TB/s.
    "h200": ChipSpec(
        peak_flops_per_s=989.5e12,
        hbm_bytes_per_s=4800e9,
        hbm_bytes=141 * GB,
        host_bytes_per_s=64e9,
        link_bytes_per_s=450e9,
        peak_f32_flops_per_s=67e12,
        platform="gpu",
        compute_capability="9.0",
        device_kinds=("NVIDIA H200",),
    ),
    # Nobody's data sheet: the order of magnitude of a small server, for trying things out.
    "cpu": ChipSpec(
        peak_flops_per_s=0.5e12,
        hbm_bytes_per_s=40e9,
        hbm_bytes=32 * GB,
        host_bytes_per_s=10e9,
        link_bytes_per_s=10e9,
        peak_f32_flops_per_s=0.5e12,
        platform="cpu",
    ),
}


def chip_spec(name: str) -> ChipSpec:
    """A chip of the table.

    Raises:
        ConfigError: no such chip.
    """
    if name not in CHIPS:
        raise ConfigError(f"chip must be one of {', '.join(CHIPS)}, got {name!r}")
    return CHIPS[name]


def chip_of_device(device_kind: str) -> ChipSpec | None:
    """The chip that jax calls by this name; None for one that is not in the table.

    Args:
        device_kind: of a `jax.Device`, such as "TPU v5 lite".
    """
    return next((chip for chip in CHIPS.values() if device_kind in chip.device_kinds), None)
