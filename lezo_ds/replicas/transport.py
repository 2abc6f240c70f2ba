"""The lines of a journal, from one replica to another. They are bytes with checksums: nothing is unpickled.

Both sides prove that they know a secret by an HMAC of what they send and of a nonce of the asker.
"""

from __future__ import annotations

import hmac
import http.client
import re
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from lezo_ds.errors import LezoError

MAX_BYTES = 64 << 20
_SECONDS = 10.0
_PATH = re.compile(r"/(\d{1,9})/([0-9a-f]{8}|none)")
_PROOF, _NONCE, _START = "X-Proof", "X-Nonce", "X-Start"


class Lines(NamedTuple):
    """Whole lines of a journal from a byte: those after the asker's own, or all if it has other lines."""

    start: int
    data: bytes


class JournalTransport:
    """Serves the lines of this replica's journal at `address`, and fetches those of others."""

    def __init__(self, journal: Path, host: str, secret: bytes) -> None:
        self._journal, self._secret = journal, secret
        transport = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _SECONDS

            def do_GET(self) -> None:
                transport._answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self.address = f"{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fetch(self, address: str) -> Lines:
        """Return the lines of a peer that this replica lacks. OSError: nobody answers; LezoError: no peer."""
        own, nonce = whole_lines(self._journal), secrets.token_hex(16)
        path = f"/{len(own)}/{_last_crc(own)}"
        connection = http.client.HTTPConnection(address, timeout=_SECONDS)
        try:
            connection.request(
                "GET", path, headers={_NONCE: nonce, _PROOF: self._prove(nonce, path.encode())}
            )
            answer = connection.getresponse()
            data, start, proof = answer.read(MAX_BYTES + 1), answer.headers[_START], answer.headers[_PROOF]
        except http.client.HTTPException as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        expected = self._prove(nonce, f"{start}\n".encode() + data)
        if start not in ("0", str(len(own))) or len(data) > MAX_BYTES or not _equal(proof, expected):
            text = f"{address} does not send lines of a journal (status {answer.status})"
            raise LezoError(f"{text}; fix: set the same LEZO_SECRET for all replicas")
        is_behind = start == "0" and own.startswith(data)
        return Lines(len(own), b"") if is_behind else Lines(int(start), data)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        found, nonce = _PATH.fullmatch(request.path), request.headers[_NONCE] or ""
        if not found or not _equal(request.headers[_PROOF], self._prove(nonce, request.path.encode())):
            request.send_error(http.client.FORBIDDEN)
            return
        data, start = whole_lines(self._journal), int(found[1])
        if start > len(data) or _last_crc(data[:start]) != found[2]:
            start = 0
        request.send_response(http.client.OK)
        request.send_header(_START, str(start))
        request.send_header(_PROOF, self._prove(nonce, f"{start}\n".encode() + data[start:]))
        request.end_headers()
        request.wfile.write(data[start:])

    def _prove(self, nonce: str, content: bytes) -> str:
        return hmac.digest(self._secret, f"{nonce}\n".encode() + content, "sha256").hex()


def whole_lines(path: Path) -> bytes:
    """Return the whole lines of a journal that may grow meanwhile; none if there is no file."""
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]


def _last_crc(lines: bytes) -> str:
    return lines[-11:-3].decode("ascii", "replace") if lines.endswith(b'"}\n') else "none"


def _equal(proof: str | None, expected: str) -> bool:
    return hmac.compare_digest((proof or "").encode(), expected.encode())
