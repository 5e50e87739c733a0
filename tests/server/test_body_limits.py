"""Sizes and times of requests, held before any handler sees them."""

import asyncio

from jaxserve.server.app import make_app
from jaxserve.server.config import MAX_HEADER_BYTES
from tests.server.asgi import Answer, asgi_call
from tests.server.conftest import serving

JSON = [(b"host", b"localhost"), (b"content-type", b"application/json")]


def call(body: list[bytes], headers: list[tuple[bytes, bytes]] = JSON, **settings) -> Answer:
    async def check():
        async with serving(**settings) as http:
            app = make_app(http.state)
            return await asgi_call(app, "POST", "/tokenize", headers=headers, body=body)

    return asyncio.run(check())


def test_a_body_at_the_limit_is_read_and_one_beyond_is_not():
    body = b'{"prompt": "%s"}' % (b"a" * 100)
    assert call([body], max_body_bytes=len(body)).status == 200
    answer = call([body], max_body_bytes=len(body) - 1)
    assert answer.status == 413
    assert answer.error["code"] == "request_too_large"
    assert str(len(body) - 1) in answer.error["message"]
    assert answer.headers["connection"] == "close"


def test_pieces_are_counted_together():
    pieces = [b'{"prompt": "', *[b"a" * 10] * 10, b'"}']
    assert call(pieces, max_body_bytes=114).status == 200
    assert call(pieces, max_body_bytes=113).status == 413


def test_a_stated_length_is_believed_before_anything_is_read():
    answer = call([b"{}"], [*JSON, (b"content-length", b"1000001")], max_body_bytes=1_000_000)
    assert answer.status == 413
    assert "1000001" in answer.error["message"]
    for odd in (b"-1", b"+5", b"1_0", b"0x10", b"", b"9" * 30, b"1, 1"):
        assert call([b"{}"], [*JSON, (b"content-length", odd)]).status == 400, odd


def test_headers_have_a_limit():
    room = MAX_HEADER_BYTES - len("/tokenize") - sum(len(n) + len(v) + 4 for n, v in JSON) - 5
    assert call([b"{}"], [*JSON, (b"x", b"a" * room)]).status == 400  # read: it has no prompt
    answer = call([b"{}"], [*JSON, (b"x", b"a" * (room + 1))])
    assert answer.status == 431
    assert answer.error["code"] == "headers_too_large"


def test_bodies_have_a_limit_together_and_small_ones_always_come_in():
    """Large ones that stand half received: one more is refused, a small one is answered, and when one of
    them has its reply there is room again."""

    async def check():
        async with serving(max_body_bytes=2**18, max_bodies_bytes=2**18) as http:
            app, goes_on, first = make_app(http.state), asyncio.Event(), Answer()
            large = [b'{"prompt": "hi", "x": "', *[b"a" * 2**14] * 14, b'"}']

            async def post(body: list[bytes], **options: object) -> Answer:
                return await asgi_call(app, "POST", "/tokenize", headers=JSON, body=body, **options)

            task = asyncio.create_task(post(large, answer=first, goes_on=goes_on))
            await asyncio.sleep(0)  # all but its last piece is read without a pause
            refused = await post(large)
            assert refused.status == 429
            assert refused.error["code"] == "bodies_full"
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["connection"] == "close"
            assert (await post([b'{"prompt": "hi"}'])).status == 200
            assert (await post([b'{"prompt": "hi", "x": "', b"a" * 60_000, b'"}'])).status == 200
            goes_on.set()
            await task
            assert first.status == 200
            assert (await post(large)).status == 200

    asyncio.run(check())


def test_a_body_that_does_not_come_is_given_up():
    async def check():
        async with serving(body_timeout_s=0.05) as http:
            never = asyncio.Event()

            async def receive():
                await never.wait()

            sent = []

            async def send(message):
                sent.append(message)

            scope = {
                "type": "http",
                "method": "POST",
                "path": "/tokenize",
                "headers": JSON,
                "state": {},
            }
            await make_app(http.state)(scope, receive, send)
            assert sent[0]["status"] == 408

    asyncio.run(check())
