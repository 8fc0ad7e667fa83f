"""Adapters to frameworks that agents are built with. Each needs an extra of its own and is imported by its name."""
