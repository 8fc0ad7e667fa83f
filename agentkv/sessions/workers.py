"""Threads for blocking work: files, hashes, codecs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

__all__ = ["start_workers"]


def start_workers(count: int) -> ThreadPoolExecutor:
    """``count`` threads, running, each of which computes alone.

    A codec's tensors are small and there are many of them: chunks run beside each other, not threads within one. And
    with a pool of OpenMP threads under each worker there would be more of them than cores, which then stop waiting
    actively: every step of the model would begin with waking one.
    """
    import torch

    of_model = torch.get_num_threads()
    ready = threading.Barrier(count + 1)
    workers = ThreadPoolExecutor(count, "agentkv-io", initializer=torch.set_num_threads, initargs=(1,))
    for _ in range(count):
        workers.submit(ready.wait)
    ready.wait()
    # What a thread sets holds for itself, for threads that have not computed yet, and in MKL for all.
    torch.set_num_threads(of_model)
    return workers
