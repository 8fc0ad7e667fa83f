"""The model thread, and all that runs on it or for it."""

import os

# Read once by torch's CPU allocator: weights and KV then lie in huge pages where the system offers them (`madvise`).
# A decode step reads all of them; measured here, the weight products of a step took 22 ms instead of 36 ms.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
