"""A frozen retrieval service over HTTP, and its client: the wiki setting's corpus.

    python -m envs.musique serve --passages FILE [--host 127.0.0.1] [--port 8100] [--index DIR]

FILE has one passage a line: JSON objects with a title and a text ("text", "paragraph_text", or "contents"
whose first line is the title), DPR's tab-separated id, text, title (.tsv), or MuSiQue records, whose
passages are taken once each. The index is built once into DIR (default: FILE.bm25) and opened from there
until the file changes. POST /search {"query", "k"} answers {"fingerprint", "passages": [{"id", "title",
"text", "score"}]}, GET /health {"fingerprint", "passages": count}. The fingerprint is the file's: a client
refuses answers of a service that changed under it.
"""

import argparse
import csv
import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np

from envs.musique_search import VERSION, Bm25, Passage

MAX_BODY = 65536  # bytes of a request
MAX_QUERY_CHARS = 2000
MAX_K = 50  # passages of one answer
MAX_ANSWER = 16 * 2**20  # bytes of an answer that the client reads
TEXT_KEYS = ("text", "paragraph_text", "contents")


class RetrievalError(Exception):
    """The retrieval service failed: not the fault of the agent, and no answer to a question."""


def passages_of(line: str, where: str, *, tsv: bool) -> list[tuple[str, str]]:
    """(title, text) of the passages on one line of a passage file. Raises ValueError naming the line."""
    if tsv:
        try:
            row = next(csv.reader([line], delimiter="\t"))
        except csv.Error as error:
            raise ValueError(f"{where}: {error}; wanted id, text, title") from None
        if len(row) != 3:
            raise ValueError(f"{where}: {len(row)} columns, wanted id, text, title")
        return [] if row == ["id", "text", "title"] else [(row[2], row[1])]
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}; wanted one passage a line") from None
    parts = record.get("paragraphs", [record]) if isinstance(record, dict) else []
    if not isinstance(parts, list) or not parts:
        raise ValueError(f"{where}: no passage in {line[:60]!r}; wanted an object with a title and a text")
    found = []
    for part in parts:
        key = next((key for key in TEXT_KEYS if isinstance(part, dict) and key in part), None)
        title, text = (part.get("title"), part[key]) if key else (None, None)
        if title is None and key == "contents" and isinstance(text, str):
            title, _, text = text.partition("\n")
            title = title.strip('"')
        if not isinstance(title, str) or not isinstance(text, str):
            keys = "/".join(TEXT_KEYS)
            raise ValueError(f'{where}: wanted strings under "title" and "{keys}", found {str(part)[:60]!r}')
        found.append((title, text))
    return found


def read_lines(path: Path) -> Iterator[tuple[int, str, str]]:
    """(byte offset, line, where) of every line of a passage file that is not blank."""
    if not path.is_file():
        raise ValueError(f"{path} is no file; wanted passages, one a line")
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} line {number} is no UTF-8: {error}") from None
            if line.strip():
                yield offset, line, f"{path} line {number}"
            offset += len(raw)


def build_index(path: Path, folder: Path) -> dict:
    """Index every passage of a file once; writes the folder and returns its meta. Memory: about 250 bytes
    for each term of each passage while building."""
    digest, seen, spots = hashlib.blake2b(digest_size=8), set(), []

    def texts() -> Iterator[str]:
        for offset, line, where in read_lines(path):
            for part, (title, text) in enumerate(passages_of(line, where, tsv=path.suffix == ".tsv")):
                key = hashlib.blake2b(f"{title}\n{text}".encode(), digest_size=16).digest()
                if key not in seen:
                    seen.add(key)
                    digest.update(key)
                    spots.append((offset, part))
                    yield f"{title}\n{text}"

    stat = path.stat() if path.is_file() else None
    index = Bm25.build(texts())
    if not spots:
        raise ValueError(f"{path} holds no passage; wanted one a line")
    meta = {"fingerprint": digest.hexdigest(), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    index.save(folder, meta, spots=np.array(spots, dtype=np.int64))
    return meta


class Store:
    """A passage file and its index on disk.

    built  whether opening it had to build the index
    """

    def __init__(self, path: str | Path, folder: str | Path | None = None):
        self.path = Path(path)
        folder = Path(folder) if folder else self.path.with_name(self.path.name + ".bm25")
        self.built = not self._fresh(folder)
        if self.built:
            build_index(self.path, folder)
        self.meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.index = Bm25.open(folder)
        self.spots = np.load(folder / "spots.npy", mmap_mode="r", allow_pickle=False)  # (N, 2) offset, part
        self.fingerprint: str = self.meta["fingerprint"]

    def _fresh(self, folder: Path) -> bool:
        """Whether the folder holds an index of the file as it is. Raises ValueError if there is no file."""
        if not self.path.is_file():
            raise ValueError(f"{self.path} is no file; wanted passages, one a line")
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        stat = self.path.stat()
        wanted = {"version": VERSION, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        return isinstance(meta, dict) and all(meta.get(key) == value for key, value in wanted.items())

    def __len__(self) -> int:
        return len(self.spots)

    def passage(self, number: int) -> tuple[str, str]:
        """(title, text) of a passage, read from the file."""
        offset, part = map(int, self.spots[number])
        with self.path.open("rb") as file:
            file.seek(offset)
            line = file.readline().decode("utf-8").rstrip("\r\n")
        return passages_of(line, f"{self.path} at byte {offset}", tsv=self.path.suffix == ".tsv")[part]

    def search(self, query: str, k: int) -> list[dict]:
        """The k best passages, best first: {"id", "title", "text", "score"}."""
        rows = []
        for number, score in self.index.search(query, k):
            title, text = self.passage(number)
            rows.append({"id": str(number), "title": title, "text": text, "score": round(score, 6)})
        return rows


def make_server(store: Store, host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """A server of a store, not started; its port is server.server_address[1] (port 0 picks a free one)."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60  # seconds after which an idle connection is closed

        def do_GET(self):
            if self.path != "/health":
                return self.reply(404, {"error": f"no {self.path[:40]}; GET /health or POST /search"})
            self.reply(200, {"fingerprint": store.fingerprint, "passages": len(store)})

        def do_POST(self):
            try:
                if self.path != "/search":
                    raise ValueError(f"no {self.path[:40]}; GET /health or POST /search")
                length = int(self.headers.get("Content-Length", "0"))
                if not 0 < length <= MAX_BODY:
                    self.close_connection = True
                    raise ValueError(f"a body of {length} bytes, wanted 1 to {MAX_BODY}")
                query, k = parse_request(self.rfile.read(length))
            except ValueError as error:
                return self.reply(400, {"error": str(error)[:200]})
            self.reply(200, {"fingerprint": store.fingerprint, "passages": store.search(query, k)})

        def reply(self, status: int, value: dict):
            body = json.dumps(value, ensure_ascii=False).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *arguments):
            pass

    return ThreadingHTTPServer((host, port), Handler)


def parse_request(body: bytes) -> tuple[str, int]:
    """(query, k) of a search request. Raises ValueError with what was wanted."""
    try:
        request = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError('the body is no JSON; wanted {"query": ..., "k": ...}') from None
    query, k = (request.get("query"), request.get("k", 3)) if isinstance(request, dict) else (None, None)
    if not isinstance(query, str) or len(query) > MAX_QUERY_CHARS:
        raise ValueError(f"query: wanted a string of at most {MAX_QUERY_CHARS} characters")
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_K:
        raise ValueError(f"k: wanted a whole number from 1 to {MAX_K}")
    return query, k


class Service:
    """A retrieval service as a corpus; environments and their forks share it, in any number of threads.

    url        base of the service, "http://127.0.0.1:8100"
    timeout_s  seconds for one try
    retries    further tries after a failed one, with a pause of `pause_s`, doubled each time
    raises     RetrievalError (of `search`) that names the service: it cannot be reached, does not answer in
               time, breaks off, answers nonsense, or has other passages than at the first search
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0, retries: int = 2, pause_s: float = 0.5):
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"retrieval url={url!r}, wanted http://HOST:PORT of `python -m envs.musique serve`"
            )
        self.url, self.retries, self.pause_s = url.rstrip("/"), retries, pause_s
        self.timeout_s = timeout_s
        self.client = httpx.Client(timeout=timeout_s, trust_env=False)
        self.fingerprint = ""  # of the first answer
        self.lock = threading.Lock()

    def search(self, query: str, k: int) -> list[Passage]:
        """The k best passages, best first, labelled by their place."""
        answer = self._ask({"query": query[:MAX_QUERY_CHARS], "k": k})
        with self.lock:
            self.fingerprint = self.fingerprint or answer["fingerprint"]
        if answer["fingerprint"] != self.fingerprint:
            raise RetrievalError(
                f"{self.url} changed its passages from {self.fingerprint} to {answer['fingerprint'][:40]}; "
                "start the run anew, or the service with the old file"
            )
        rows = answer["passages"][:k]
        return [Passage(str(i), row["title"], row["text"]) for i, row in enumerate(rows, start=1)]

    def _ask(self, request: dict) -> dict:
        why = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.pause_s * 2 ** (attempt - 1))
            try:
                status, body = self._post(request)
                if status < 400:
                    return checked_answer(body)
                why = f"HTTP {status}: {body[:80].decode('utf-8', 'replace')!r}"
                if status < 500:
                    break
            except (httpx.HTTPError, ValueError) as error:
                why = f"{type(error).__name__}: {error}"
        raise RetrievalError(f"{self.url} failed after {attempt + 1} tries: {why[:120]}; is it running?")

    def _post(self, request: dict) -> tuple[int, bytes]:
        """Status and body of one try, read within the time and the size that an answer may have."""
        body, deadline = bytearray(), time.monotonic() + self.timeout_s
        with self.client.stream("POST", f"{self.url}/search", json=request) as response:
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_ANSWER:
                    raise ValueError(f"an answer of more than {MAX_ANSWER} bytes")
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"the answer is not whole after {self.timeout_s:g} s")
        return response.status_code, bytes(body)


def checked_answer(body: bytes) -> dict:
    """A search answer with everything in it that `search` needs. Raises ValueError for anything else."""
    try:
        answer = json.loads(body.decode("utf-8"))
    except RecursionError:
        raise ValueError("an answer nested too deeply") from None
    rows = answer.get("passages") if isinstance(answer, dict) else None
    strings = isinstance(rows, list) and all(
        isinstance(row, dict) and isinstance(row.get(key), str) for row in rows for key in ("title", "text")
    )
    if not strings or not isinstance(answer.get("fingerprint"), str):
        raise ValueError('no {"fingerprint", "passages": [{"title", "text"}]} in the answer')
    return answer


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m envs.musique serve",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--passages", required=True, help="file with one passage a line")
    parser.add_argument("--index", default=None, help="folder of the index; default FILE.bm25")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100, help="0 picks a free one")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    try:
        store = Store(args.passages, args.index)
        server = make_server(store, args.host, args.port)
    except (ValueError, OSError) as error:
        raise SystemExit(f"serve: {error}") from None
    seconds, what = time.perf_counter() - start, "built" if store.built else "opened"
    url = f"http://{args.host}:{server.server_address[1]}"
    print(
        f"{url} serves {len(store)} passages of {args.passages}, index {what} in {seconds:.2f} s", flush=True
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(0)
