"""Servers on loopback that speak as much of Google's, Azure's and the hub's protocols as drivetrain asks of them.

They are written from the protocols' descriptions (XML API of Cloud Storage, REST API of Blob Storage): they show
what is asked for and how answers are read, and not that a real account would accept it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

DAY = formatdate(1_790_000_000, usegmt=True)
ISO = "2026-09-21T14:13:20.000Z"


@dataclass
class FakeStore:
    """Objects by name, each with a version. parts: of uploads that are not complete. asked: (method, path) so far."""

    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    parts: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    versions: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def put(self, name: str, data: bytes) -> int:
        with self.lock:
            self.versions += 1
            self.objects[name] = (data, self.versions)
            return self.versions


@contextlib.contextmanager
def serving(handler: type[Handler], store: FakeStore) -> Iterator[str]:
    """Yields the address of a server of these objects."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (handler,), {"store": store}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    store: FakeStore
    protocol_version = "HTTP/1.1"

    def act(self) -> None:
        split = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(split.query, keep_blank_values=True).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.store.asked.append((self.command, self.path))
        self.answer(unquote(split.path).lstrip("/"))

    def answer(self, path: str) -> None:
        raise NotImplementedError

    def reply(self, status: int, data: bytes | str = b"", **headers: str) -> None:
        body = data.encode() if isinstance(data, str) else data
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_object(self, name: str, **headers: str) -> None:
        """Answers GET and HEAD, also of a range, and of one version alone."""
        if name not in self.store.objects:
            self.reply(404, "<Error><Code>NotFound</Code></Error>")
            return
        data, version = self.store.objects[name]
        tag = f'"{version}"'
        if self.headers.get("If-Match", tag) != tag:
            self.reply(412)
            return
        of_it = {"ETag": tag, "Last_Modified": DAY, "Content_Type": "application/octet-stream", **headers}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("x-ms-range") or self.headers.get("Range") or "")
        if asked is None:
            self.reply(200, data, Content_Length=str(len(data)), **of_it)
            return
        start, stop = int(asked[1]), min(int(asked[2]) + 1, len(data))
        self.reply(206, data[start:stop], Content_Range=f"bytes {start}-{stop - 1}/{len(data)}", **of_it)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = act

    def log_message(self, *_: Any) -> None:
        pass


class Google(Handler):
    """Cloud Storage's XML API: /BUCKET/KEY."""

    def answer(self, path: str) -> None:
        name = path.partition("/")[2]
        if self.command in ("GET", "HEAD"):
            if name:
                self.send_object(name, x_goog_generation=str(self.store.objects.get(name, (b"", 0))[1]))
            else:
                self.reply(200, self.listing(self.query.get("prefix", "")), Content_Type="application/xml")
        elif self.command == "PUT" and "partNumber" in self.query:
            self.store.parts[f"{self.query['uploadId']}/{int(self.query['partNumber']):05d}"] = self.body
            self.reply(200, ETag=f'"{hashlib.md5(self.body).hexdigest()}"')
        elif self.command == "POST" and "uploads" in self.query:
            kind = "InitiateMultipartUploadResult"
            self.reply(200, f"<{kind}><UploadId>up{self.store.versions}</UploadId></{kind}>")
        elif self.command == "POST":
            upload = f"{self.query['uploadId']}/"
            parts = sorted(key for key in self.store.parts if key.startswith(upload))
            version = self.store.put(name, b"".join(self.store.parts.pop(key) for key in parts))
            kind = "CompleteMultipartUploadResult"
            self.reply(200, f"<{kind}><ETag>&quot;{version}&quot;</ETag></{kind}>", x_goog_generation=str(version))
        elif self.command == "PUT":
            wanted, there = self.headers.get("x-goog-if-generation-match"), self.store.objects.get(name)
            if wanted is not None and int(wanted) != (0 if there is None else there[1]):
                self.reply(412, "<Error><Code>PreconditionFailed</Code></Error>")
                return
            version = self.store.put(name, self.body)
            self.reply(200, ETag=f'"{version}"', x_goog_generation=str(version))
        else:
            self.reply(204 if self.store.objects.pop(name, None) else 404)

    def listing(self, prefix: str) -> str:
        found = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{ISO}</LastModified><ETag>&quot;{version}&quot;</ETag>"
            f"<Size>{len(data)}</Size></Contents>"
            for name, (data, version) in sorted(self.store.objects.items())
            if name.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"


class Azure(Handler):
    """Blob Storage's REST API: /CONTAINER/KEY. Its listings have tags without quotes, unlike its headers."""

    def answer(self, path: str) -> None:
        name, there = path.partition("/")[2], self.store.objects.get(path.partition("/")[2])
        tag = None if there is None else f'"{there[1]}"'
        if self.command in ("GET", "HEAD") and self.query.get("comp") == "list":
            self.reply(200, self.listing(self.query.get("prefix", "")), Content_Type="application/xml")
        elif self.command in ("GET", "HEAD"):
            self.send_object(name)
        elif self.query.get("comp") == "batch":
            self.delete_together(re.findall(r"DELETE /bucket/(\S+) HTTP", self.body.decode()))
        elif self.query.get("comp") == "block":
            self.store.parts[self.query["blockid"]] = self.body
            self.reply(201)
        elif self.query.get("comp") == "blocklist":
            blocks = re.findall(r"<(?:Uncommitted|Latest)>([^<]+)<", self.body.decode())
            self.done(self.store.put(name, b"".join(self.store.parts.pop(block) for block in blocks)))
        elif self.headers.get("If-None-Match") == "*" and there is not None:
            self.reply(409, "<Error><Code>BlobAlreadyExists</Code></Error>")
        elif self.headers.get("If-Match", tag) != tag:
            self.reply(412, "<Error><Code>ConditionNotMet</Code></Error>")
        else:
            self.done(self.store.put(name, self.body))

    def delete_together(self, names: list[str]) -> None:
        answers = []
        for number, name in enumerate(names):
            there = self.store.objects.pop(unquote(name), None)
            status = "202 Accepted" if there else "404 Not Found\r\nx-ms-error-code: BlobNotFound"
            head = f"Content-Type: application/http\r\nContent-ID: {number}"
            answers.append(f"--batch\r\n{head}\r\n\r\nHTTP/1.1 {status}\r\n\r\n\r\n")
        self.reply(202, f"{''.join(answers)}--batch--\r\n", Content_Type="multipart/mixed; boundary=batch")

    def done(self, version: int) -> None:
        self.reply(201, ETag=f'"{version}"', Last_Modified=DAY)

    def listing(self, prefix: str) -> str:
        found = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{DAY}</Last-Modified><Etag>{version}</Etag>"
            f"<Content-Length>{len(data)}</Content-Length><Content-Type>application/octet-stream</Content-Type>"
            "</Properties></Blob>"
            for name, (data, version) in sorted(self.store.objects.items())
            if name.startswith(prefix)
        )
        return f"<EnumerationResults><Blobs>{found}</Blobs><NextMarker/></EnumerationResults>"


class Hub(Handler):
    """The hub's API for the data set somebody/rows, read only."""

    def answer(self, path: str) -> None:
        commit = "c" * 40
        if path.startswith("api/datasets/somebody/rows/tree/"):
            below = path.partition("/tree/")[2].partition("/")[2]
            self.reply(200, json.dumps(self.listed([n for n in self.store.objects if n.startswith(below)])))
        elif path.startswith("api/datasets/somebody/rows/paths-info/"):
            paths = json.loads(self.body)["paths"] if self.body[:1] == b"{" else parse_qs(self.body.decode())["paths"]
            self.reply(200, json.dumps(self.listed([n for n in self.store.objects if n in paths])))
        elif path.startswith("datasets/somebody/rows/resolve/"):
            self.send_object(path.partition("/resolve/")[2].partition("/")[2], X_Repo_Commit=commit)
        else:
            self.reply(404, "{}", X_Error_Code="RepoNotFound")

    def listed(self, names: list[str]) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(self.store.objects[name][0]), "oid": f"{index:040d}"}
            for index, name in enumerate(sorted(names))
        ]
