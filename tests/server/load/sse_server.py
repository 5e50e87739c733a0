"""A tiny OpenAI-compatible server on plain asyncio, which answers by a script that the prompt names.

Used by the tests of the load client and of `bench serve`. It runs in a thread of its own, so that a command
under test may run an event loop itself. Not a model: text comes in pieces, and token counts are given.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

WORDS = ["alpha", "beta", "gamma", "delta"]


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


class SseServer:
    """Answers a prompt by its first word.

    say N          N pieces of text, then usage with 2 tokens a piece
    plain N        the same without usage
    slow N MS      N pieces, MS milliseconds between them
    status N       an error object with that status
    empty          a stream that ends at once with finish_reason
    broken         one piece, then an error event
    cut            one piece, then the connection is closed within the body
    short          one piece and [DONE], but no finish_reason
    junk           an event that is no JSON
    html           a page with status 200
    hang           nothing

    Attributes:
        bodies: what was posted to completions and chats.
        headers: of the last request.
        num_connections: that were opened.
    """

    def __init__(self, *, has_tokenizer: bool = True, api_key: str | None = None):
        self.bodies: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.num_connections = 0
        self._has_tokenizer = has_tokenizer
        self._api_key = api_key

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the reader left, or the server is being stopped
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        self.headers = dict(line.split(": ", 1) for line in lines if line)
        path = first.split()[1]
        data = await reader.readexactly(int(self.headers.get("content-length", 0)))
        body = json.loads(data) if data else {}
        if self._api_key and self.headers.get("authorization") != f"Bearer {self._api_key}":
            self._whole(writer, 401, {"error": {"message": "no key"}})
        elif path == "/v1/models":
            self._whole(writer, 200, {"data": [{"id": "tiny", "root": "tiny"}]})
        elif path == "/tokenize" and self._has_tokenizer:
            self._whole(writer, 200, {"tokens": [5, 6, 7, 8, 6], "count": 5})
        elif path == "/detokenize" and self._has_tokenizer:
            words = " ".join(f"w{i}" for i in body["tokens"])
            self._whole(writer, 200, {"prompt": f"say 2 {words}"})
        elif path in ("/v1/completions", "/v1/chat/completions"):
            self.bodies.append(body)
            return await self._answer(writer, body, is_chat="chat" in path)
        else:
            self._whole(writer, 404, {"error": {"message": f"no route {path}"}})
        return True

    @staticmethod
    def _whole(writer: asyncio.StreamWriter, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    async def _answer(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], *, is_chat: bool
    ) -> bool:
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        verb, *numbers = (prompt if isinstance(prompt, str) else "say 2").split()[:3]
        counts = [int(n) for n in numbers if n.isdigit()]
        if verb == "status":
            self._whole(writer, counts[0], {"error": {"message": "as asked", "code": None}})
            return True
        if verb == "html":
            self._whole(writer, 200, "<html>")
            return True
        if verb == "hang":
            await asyncio.sleep(30)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        async for data in self._events(verb, counts, is_chat=is_chat):
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        if verb == "cut":
            return False
        writer.write(b"0\r\n\r\n")
        return True

    async def _events(self, verb: str, counts: list[int], *, is_chat: bool):
        def chunk(text: str | None = None, reason: str | None = None, **more: object) -> bytes:
            choice: dict[str, object] = {"index": 0, "finish_reason": reason}
            choice |= {"delta": {"content": text, **more}} if is_chat else {"text": text or ""}
            return event({"choices": [choice], "usage": None})

        if is_chat:
            yield chunk("", role="assistant")
        if verb == "junk":
            yield b"data: {no json\n\n"
        num_pieces = 0 if verb == "empty" else (counts or [1])[0]
        pause_s = counts[1] / 1000 if verb == "slow" else 0.0
        for i in range(num_pieces):
            yield b": a comment\n\n"
            yield chunk(WORDS[i % 4] + " ")
            await asyncio.sleep(pause_s)
        if verb == "broken":
            yield event({"error": {"message": "the engine died", "code": 500}})
        if verb not in ("broken", "cut", "short"):
            yield chunk(reason="stop" if verb == "empty" else "length")
        if verb in ("say", "slow"):
            details = {"cached_tokens": 3}
            usage = {"prompt_tokens": 10, "completion_tokens": 2 * num_pieces}
            yield event({"choices": [], "usage": {**usage, "prompt_tokens_details": details}})
        if verb != "cut":
            yield b"data: [DONE]\n\n"


@contextlib.contextmanager
def serving(server: SseServer) -> Iterator[str]:
    """Runs it in a thread; gives its URL."""
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    found: dict[str, Any] = {}

    async def run() -> None:
        found["stop"] = asyncio.Event()
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        found["port"] = listening.sockets[0].getsockname()[1]
        ready.set()
        await found["stop"].wait()
        await asyncio.sleep(0.02)  # lets a connection that was just accepted become a task
        listening.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.01)  # lets what was closed be gone

    def main() -> None:
        loop.run_until_complete(run())
        loop.close()

    thread = threading.Thread(target=main, name="sse server")
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{found['port']}"
    finally:
        loop.call_soon_threadsafe(found["stop"].set)
        thread.join(10)
        assert not thread.is_alive()
