"""The model thread, and all that runs on it or for it."""

import os

# Read once by torch's CPU allocator: weights and KV then lie in huge pages where the system offers them (`madvise`).
# A decode step reads all of them. The gain is not settled: 36 ms became 22 ms for a step's weight products in one run,
# other runs on the same, shared machine showed none.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
