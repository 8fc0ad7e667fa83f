"""Stored KV: names, chunk files, blob back-ends, the host tier. Import from the modules; this package imports none."""
