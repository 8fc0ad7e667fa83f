"""How much memory there is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["device_memory", "free_memory", "total_memory"]


def total_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_memory(device: torch.device) -> int:
    """Bytes of a device's memory; on the CPU the machine's."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    return total_memory()


def free_memory(device: torch.device) -> int:
    """Bytes of a device's memory that nobody uses, what torch keeps for later included; on the CPU the machine's."""
    if device.type == "cuda":
        import torch

        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + int(kept)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
