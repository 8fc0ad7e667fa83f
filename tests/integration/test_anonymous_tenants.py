"""Sessions that nobody has named go, whoever's they are."""

from __future__ import annotations

from pathlib import Path

from homes import chat_folder, opened

from agentkv.api.anonymous import _delete_some
from agentkv.api.app import make_app
from agentkv.api.settings import ServerSettings
from agentkv.sessions.histories import History
from agentkv.sessions.recognising import recognised


async def test_idle_sessions_of_every_tenant_go_and_named_ones_stay(tmp_path: Path) -> None:
    async with opened(tmp_path / "home", chat_folder(tmp_path)) as kv:
        tenants = [kv.sessions, kv.tenant("one"), kv.tenant("two")]
        kept = [(await sessions.create("You are Bolt.")).id for sessions in tenants]
        found = [await recognised(sessions, History.of("Who is it?")) for sessions in tenants]
        assert len({each.session.id for each in found}) == 3
        assert [each.sessions.root(History.of("Who is it?")) for each in found] != [
            kv.sessions.root(History.of("Who is it?"))
        ] * 3, "a conversation of one tenant's has its own root"
        app = make_app(kv, ServerSettings(anonymous_seconds=0.0))
        assert await _delete_some(app) == 3
        assert [[record.id for record in await sessions.list()] for sessions in tenants] == [[name] for name in kept]
