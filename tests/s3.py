"""A real S3 server for tests (moto's, in a process of its own), and a way to it that fails as networks do."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

ACCESS_KEY = "AKIDTESTONLY0001"
SECRET_KEY = "wJalrXUtnFEMI-very-secret"
BUCKET = "agentkv-test"

_numbers = count()


@dataclass(frozen=True)
class S3:
    """A server at ``host:port`` with one bucket."""

    host: str
    port: int

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def config(self, port: int | None = None) -> dict[str, Any]:
        """obstore's settings for this server, or for a way to it at another port."""
        return {
            "endpoint": f"http://{self.host}:{port or self.port}",
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            "allow_http": True,
        }

    def url(self) -> str:
        """A prefix that no other test uses."""
        return f"s3://{BUCKET}/some/prefix-{os.getpid()}-{next(_numbers)}"

    def request(self, method: str, path: str) -> int:
        """One unsigned request; its status."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=10)
        try:
            connection.request(method, path)
            return connection.getresponse().status
        finally:
            connection.close()


@contextmanager
def s3_server(**environment: str) -> Iterator[S3]:
    """moto's S3 server on a free port, with ``BUCKET`` in it."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("AWS_") and not k.lower().endswith("_proxy")}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        server = S3("127.0.0.1", probe.getsockname()[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", server.host, "-p", str(server.port)],
        env=ours | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            assert process.poll() is None, "moto's server did not start"
            try:
                socket.create_connection((server.host, server.port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        assert server.request("PUT", f"/{BUCKET}") == 200
        yield server
    finally:
        process.terminate()
        process.wait(10)


@dataclass
class FaultyWay:
    """An HTTP proxy to a server. ``rule(method, key)`` says what becomes of a request:

    ``pass``; ``503`` without asking the server; ``reset``, the connection closed without asking; ``hang``, the same
    after ``release``; ``lost``, the server does it and the answer is lost; ``slow``, the server does it and the answer
    comes after ``release``; ``half``, half of the answer's body.
    ``seen`` lists (method, key, bytes of the answer's body).
    """

    port: int = 0
    rule: Callable[[str, str], str] = lambda method, key: "pass"
    seen: list[tuple[str, str, int]] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)

    def heal(self) -> None:
        self.rule = lambda method, key: "pass"


@contextmanager
def faulty_way(server: S3) -> Iterator[FaultyWay]:
    """A ``FaultyWay`` to ``server`` on a port of its own."""
    way = FaultyWay()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            key = self.path.partition("?")[0].rsplit("/", 1)[-1]
            outcome = way.rule(self.command, key)
            if outcome in ("hang", "reset", "503"):
                way.seen.append((self.command, key, 0))
            if outcome == "hang":
                way.release.wait(30)
            if outcome in ("hang", "reset"):
                self.close_connection = True
                return
            if outcome == "503":
                self.send_response(503)
                self.send_header("content-length", "0")
                self.end_headers()
                return
            connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
            headers = {k: v for k, v in self.headers.items() if k.lower() != "transfer-encoding"}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            way.seen.append((self.command, key, len(content)))
            if outcome == "slow":
                way.release.wait(30)
            if outcome == "lost":
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            length = answer.getheader("content-length") if self.command == "HEAD" else str(len(content))
            self.send_header("content-length", length or "0")
            self.end_headers()
            if outcome == "half":
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
            elif self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    for method in ("GET", "PUT", "DELETE", "HEAD", "POST"):
        setattr(Handler, f"do_{method}", Handler.handle_any)

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    way.port = proxy.server_address[1]
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield way
    finally:
        way.release.set()
        proxy.shutdown()
        proxy.server_close()
        thread.join(10)
