"""``/docs``: the OpenAPI document as one page that needs no network and no script."""

from __future__ import annotations

import json
from html import escape
from itertools import groupby
from typing import Any

__all__ = ["reference_page"]

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2024;background:#fff}
h1{margin-bottom:0}h2{margin-top:2.5rem;border-bottom:1px solid #d5d9dd}code,pre{font:13px/1.45 ui-monospace,monospace}
details{border:1px solid #d5d9dd;border-radius:6px;margin:.4rem 0;padding:.4rem .7rem}summary{cursor:pointer}
.method{display:inline-block;width:4.2rem;font-weight:600}.GET{color:#0b6e4f}.POST{color:#0a58a6}
.DELETE{color:#a61b1b}.PATCH{color:#8a5a00}pre{background:#f4f6f8;padding:.7rem;border-radius:6px;overflow-x:auto}
p.note{color:#5b6670}table{border-collapse:collapse}td{padding:.1rem .8rem .1rem 0;vertical-align:top}
@media(prefers-color-scheme:dark){body{background:#14171a;color:#dfe3e6}pre{background:#1e2327}
details,h2{border-color:#353b41}.GET{color:#4cc79b}.POST{color:#6cb2f5}.DELETE{color:#f08a8a}.PATCH{color:#e0b060}}
"""


def reference_page(document: dict[str, Any]) -> str:
    """HTML, UTF-8."""
    calls = [
        (operation["tags"][0], method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    groups = "".join(
        f"<h2>{escape(tag)}</h2>" + "".join(_call(*call[1:]) for call in group)
        for tag, group in groupby(calls, key=lambda call: call[0])
    )
    schemas = "".join(
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_json(schema)}</details>'
        for name, schema in document["components"]["schemas"].items()
    )
    info = document["info"]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])}</p>"
        '<p class="note">As data: <a href="/openapi.json">openapi.json</a>. Calls take a key as '
        "<code>Authorization: Bearer …</code> where the server has keys.</p>"
        f"{groups}<h2>Types</h2>{schemas}</body></html>"
    )


def _call(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = [f"<p>{escape(operation['description'])}</p>" if "description" in operation else ""]
    if operation["parameters"]:
        rows = "".join(
            f"<tr><td><code>{escape(one['name'])}</code></td><td>{one['in']}</td>"
            f"<td>{escape(one['schema'].get('description', ''))}</td></tr>"
            for one in operation["parameters"]
        )
        parts.append(f"<table>{rows}</table>")
    if "requestBody" in operation:
        for media, body in operation["requestBody"]["content"].items():
            parts.append(f"<p>Body, <code>{escape(media)}</code>:</p>{_type(body['schema'])}")
    for status, answer in operation["responses"].items():
        kinds = "".join(
            f"<td><code>{escape(media)}</code></td><td>{_type(content['schema'])}</td>"
            for media, content in answer.get("content", {}).items()
        )
        parts.append(f"<table><tr><td>{status}</td><td>{escape(answer['description'])}</td>{kinds}</tr></table>")
    return (
        f'<details><summary><span class="method {method}">{method}</span> <code>{escape(path)}</code> '
        f"{escape(operation['summary'])}</summary>{''.join(parts)}</details>"
    )


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f'<a href="#{escape(name)}"><code>{escape(name)}</code></a>'
    return _json(schema) if schema else ""


def _json(schema: Any) -> str:
    return f"<pre>{escape(json.dumps(schema, indent=2, ensure_ascii=False))}</pre>"
