"""Which tokens no lossy codec sees, whatever it is."""

__all__ = ["LOSSLESS_TAIL", "SINKS"]

LOSSLESS_TAIL = 128
"""The last so many tokens are never stored with loss: they weigh most on what comes next."""
SINKS = 16
"""Nor are the first: every query attends to them (StreamingLLM, arXiv 2309.17453)."""
