"""Whole pages moved: copied within a pool (copy-on-write), taken out of it and put back (tiers)."""

from pallas_kernels.page_copy.api import check_copies, copy_pages, gather_pages, scatter_pages

__all__ = ["check_copies", "copy_pages", "gather_pages", "scatter_pages"]
