"""A stand-in for the Hub's HTTP interface, on the loopback address, with files in memory."""

import base64
import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0" * 40


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def _answer(self, body=b"", code=200, **headers):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _missing(self, code):
        self._answer({"error": "not found"}, 404, X_Error_Code=code)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        repos, place = self.server.repos, urlsplit(self.path).path.split("/")[2:]
        if place == ["repos", "create"]:
            given = json.loads(body)
            name = "/".join(filter(None, (given.get("organization"), given["name"])))
            repos.setdefault(name, {})
            self._answer({"url": f"{self.server.url}/{name}", "name": name, "id": name})
        elif place == ["validate-yaml"]:
            self._answer({"errors": [], "warnings": []})
        elif place[3:4] == ["preupload"]:
            files = [f["path"] for f in json.loads(body)["files"]]
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            self._answer({"files": [{"path": path, **modes} for path in files]})
        elif place[3:4] == ["commit"]:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    repos["/".join(place[1:3])][line["value"]["path"]] = content
            url = f"{self.server.url}/{'/'.join(place[1:3])}/commit/{COMMIT}"
            self._answer({"success": True, "commitOid": COMMIT, "commitUrl": url})
        else:
            self._missing("EntryNotFound")

    def do_GET(self):
        place = unquote(urlsplit(self.path).path).split("/")[1:]
        of_api = place[:2] == ["api", "models"]
        name, rest = "/".join(place[2 * of_api :][:2]), place[2 * of_api :][2:]
        files = self.server.repos.get(name)
        if files is None:
            self._missing("RepoNotFound")
        elif of_api and rest[:1] == ["tree"]:
            folder = "/".join(rest[2:])
            sizes = {} if folder else {name: len(content) for name, content in files.items()}
            rows = [{"type": "file", "path": f, "size": n, "oid": f} for f, n in sizes.items()]
            self._answer(rows)
        elif of_api:
            siblings = [{"rfilename": file} for file in files]
            self._answer({"id": name, "sha": COMMIT, "siblings": siblings, "tags": []})
        elif rest[:1] == ["resolve"] and "/".join(rest[2:]) in files:
            content = files["/".join(rest[2:])]
            tag = f'"{hashlib.sha1(content).hexdigest()}"'
            self._answer(content, ETag=tag, X_Repo_Commit=COMMIT)
        else:
            self._missing("EntryNotFound")

    do_HEAD = do_GET


@contextlib.contextmanager
def running():
    """Yield (address, {repository: {file: bytes}}) of a hub that runs meanwhile."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.repos, server.url = {}, f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.url, server.repos
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
