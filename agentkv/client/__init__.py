"""The SDK of a server: the object model of a runtime, over HTTP.

    async with AsyncAgentKV("http://127.0.0.1:8000", api_key="akv_…") as kv:
        session = await kv.sessions.create(system="You are terse.")
        print((await session.send("Hello")).text)

What a method takes, returns and raises is what it does in process; ``RemoteFailure`` is what only a network can do.
``AgentKV`` is the same for programs without an event loop.
"""

from agentkv.client.connection import RemoteFailure
from agentkv.client.remote import AsyncAgentKV, RemoteSession, RemoteSessions
from agentkv.client.waiting import AgentKV

__all__ = ["AgentKV", "AsyncAgentKV", "RemoteFailure", "RemoteSession", "RemoteSessions"]
