"""OpenAI's endpoints over sessions: what their fields mean here, and what is refused."""
