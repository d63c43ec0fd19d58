"""A small web server for one reader: this host alone, and only with the word in the address.

Requests that were meant for another host name are refused, so that no page elsewhere can read it.
"""

from __future__ import annotations

import hmac
import json
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class LocalServer(ThreadingHTTPServer):
    """Answers on the loopback interface only; closing it waits for requests under way."""

    daemon_threads = False

    def __init__(
        self, token: str, show: Callable[[], str], state: Callable[..., dict[str, Any]]
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token = token
        self.show = show
        self.state = state

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed while we answered is no event; anything else is told."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One request. Everything without the right word and host gets the same refusal."""

    server: Any
    timeout = 2.0
    server_version = "unisono"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request for the page or for the state."""
        path, _, query = self.path.partition("?")
        _, token, *rest = f"{path}/".split("/")
        if not self._is_for_us() or not hmac.compare_digest(
            token.encode(errors="replace"), self.server.token.encode()
        ):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "forbidden\n")
        elif rest[0] == "state":
            state = self.server.state(asks=query == "ask")
            self._answer(HTTPStatus.OK, "application/json", json.dumps(_without_nan(state)))
        elif rest[0] == "":
            self._answer(HTTPStatus.OK, "text/html", self.server.show())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "nothing here\n")

    def _is_for_us(self) -> bool:
        """Whether the request names this host: a page of another name may not read us."""
        port = self.server.server_port
        return self.headers.get("Host") in (f"127.0.0.1:{port}", f"localhost:{port}")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        # A notebook of this host may show the page; no other site may.
        near = "http://127.0.0.1:* http://localhost:*"
        self.send_header("Content-Security-Policy", f"frame-ancestors {near}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the console belongs to the ranks."""


def _without_nan(value: Any) -> Any:
    """Return `value` with None for what JSON has no word for."""
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and value - value != 0 else value
