"""A small S3-compatible server in memory, which can be told to misbehave.

Path-style requests: PUT, GET (with ranges), HEAD, DELETE, ListObjectsV2, DeleteObjects. Signatures
(version 4, the payload's hash in the header) are verified with the key `test` and the secret
`secret`. `POST /-/MODE` sets how later requests are answered:

    normal, hang (never), error (503), deny (403), alter (bodies of GET with a flipped bit),
    cut (GET announces more bytes than it sends)

Run as `python s3_server.py [PORT]`; it prints its port.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

KEY, SECRET = "test", "secret"
objects: dict[str, bytes] = {}
mode = ["normal"]
over = threading.Event()


class Handler(BaseHTTPRequestHandler):
    """Requests of one connection."""

    protocol_version = "HTTP/1.1"

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = urlsplit(self.path).path
        if path.startswith("/-/"):
            mode[0] = path[3:]
            self.answer(200)
        elif mode[0] == "hang":
            over.wait(60)
            self.close_connection = True
        elif mode[0] == "error":
            self.answer(503)
        elif mode[0] == "deny" or not self.signed(body):
            self.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        else:
            query = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
            self.serve(unquote(path), query, body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_one

    def serve(self, path: str, query: dict[str, str], body: bytes) -> None:
        if self.command == "PUT":
            objects[path] = body
            self.answer(200, headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        elif self.command == "DELETE":
            objects.pop(path, None)
            self.answer(204)
        elif self.command == "POST" and "delete" in query:
            self.delete(path, body)
        elif self.command == "GET" and query.get("list-type") == "2":
            self.list(path, query)
        elif path in objects:
            self.send(objects[path])
        else:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def send(self, data: bytes) -> None:
        status, headers = 200, {"ETag": '"e"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        wanted = self.headers.get("range")
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            end = min(int(last) + 1, len(data))
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
            status, data = 206, data[int(first) : end]
        if mode[0] == "alter":
            data = data[:-1] + bytes([data[-1] ^ 1])
        if mode[0] == "cut":
            self.close_connection = True
            self.answer(status, data[: len(data) // 2], headers, announce=len(data))
        else:
            self.answer(status, data, headers)

    def list(self, path: str, query: dict[str, str]) -> None:
        """Pages of at most 100 keys; a token is the last key of the page before."""
        bucket = path.strip("/")
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        names = sorted(name.removeprefix(f"/{bucket}/") for name in objects)
        names = [n for n in names if n.startswith(prefix) and n > after]
        page, more = names[:100], len(names) > 100
        rows = "".join(
            f"<Contents><Key>{escape(n)}</Key><Size>{len(objects[f'/{bucket}/{n}'])}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>e</ETag></Contents>"
            for n in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        flag = str(more).lower()
        xml = f"<ListBucketResult><IsTruncated>{flag}</IsTruncated>{token}{rows}</ListBucketResult>"
        self.answer(200, xml.encode())

    def delete(self, path: str, body: bytes) -> None:
        names = [e.text or "" for e in ElementTree.fromstring(body).iter() if e.tag.endswith("Key")]
        for name in names:
            objects.pop(f"{path.rstrip('/')}/{name}", None)
        rows = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
        self.answer(200, f"<DeleteResult>{rows}</DeleteResult>".encode())

    def answer(
        self,
        status: int,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        announce: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(announce or len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def signed(self, body: bytes) -> bool:
        """Whether the request's signature is right (AWS Signature Version 4, header-based)."""
        scheme, _, rest = self.headers.get("authorization", "").partition(" ")
        fields = dict(part.strip().split("=", 1) for part in rest.split(",") if "=" in part)
        if scheme != "AWS4-HMAC-SHA256" or not fields.get("Credential", "").startswith(f"{KEY}/"):
            return False
        payload = self.headers.get("x-amz-content-sha256", "")
        if payload not in ("UNSIGNED-PAYLOAD", hashlib.sha256(body).hexdigest()):
            return False
        names = fields["SignedHeaders"].split(";")
        url = urlsplit(self.path)
        query = sorted(parse_qsl(url.query, keep_blank_values=True))
        canonical = "\n".join(
            [
                self.command,
                url.path,
                "&".join(f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in query),
                *(f"{name}:{self.headers[name].strip()}" for name in names),
                "",
                ";".join(names),
                payload,
            ]
        )
        scope = fields["Credential"].split("/", 1)[1]
        told = ["AWS4-HMAC-SHA256", self.headers["x-amz-date"], scope]
        told.append(hashlib.sha256(canonical.encode()).hexdigest())
        key = b"AWS4" + SECRET.encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        wanted = hmac.digest(key, "\n".join(told).encode(), "sha256").hex()
        return hmac.compare_digest(wanted, fields["Signature"])

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()
