"""The page in Chromium: it fills in, fits, can be used by keyboard, and chats; texts stay texts."""

import json
import struct
import zlib
from collections.abc import Iterator

import pytest

from tests.server.processes import ServerProcess

KEY = "sk-right-0123456789"
#: What the model says. No part of it may become more than text.
SPOKEN = "Hi <img src=x onerror=alert(1)> & <b>bold</b> <script>alert(2)</script> " * 8


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Over a fake engine that says `SPOKEN`, slowly enough to be stopped in the middle."""
    with ServerProcess.fake(script=SPOKEN, step_s=0.03, num_pages=600) as process:
        process.wait_ready()
        load(process)
        yield process


def load(server: ServerProcess) -> None:
    with server.http() as http:
        for number in range(2):
            body = {"prompt": f"<i>A prefix</i> of all requests, and {number}", "max_tokens": 6}
            assert http.post("/v1/completions", json=body).status_code == 200


def open_page(browser, url: str) -> None:
    browser.open(url + "/")
    browser.wait("document.getElementById('n-free').textContent !== '0'")


def number(browser, name: str) -> float:
    return float(browser.text(f"#{name}").replace(",", ""))


def pixels(png: bytes) -> set[bytes]:
    """The colours of a picture's rows, roughly: enough to tell that something is drawn."""
    data, at, packed = png, 8, b""
    width = struct.unpack(">I", data[16:20])[0]
    channels = {2: 3, 6: 4}[data[25]]
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += 12 + length
    rows = zlib.decompress(packed)
    size = width * channels + 1
    return {rows[i : i + size] for i in range(0, len(rows), size)}


def test_it_shows_what_the_engine_does(browser, server):
    open_page(browser, server.url)
    assert browser.text("#status-text") == "ready"
    assert browser.text("#model") == "fake"
    browser.wait("document.getElementById('steps-note').textContent.startsWith('step')")
    assert number(browser, "n-cached") > 0
    assert number(browser, "n-free") + number(browser, "n-cached") == 599
    assert number(browser, "k-hits") > 0
    assert number(browser, "q-done") >= 2
    assert "step" in browser.text("#steps-note")
    drawn = "[...document.querySelectorAll('canvas')].map(c => [c.id, c.getContext('2d')"
    drawn += ".getImageData(0, 0, c.width, c.height).data.some(v => v)])"
    assert [name for name, is_drawn in browser.run(drawn) if not is_drawn] == []
    label = browser.run("document.getElementById('map').getAttribute('aria-label')")
    assert "of 599 pages" in label
    assert browser.faults == []
    assert {url.split("/")[2] for url in browser.requests} == {server.url.split("/")[2]}


def test_texts_of_prompts_and_of_the_model_stay_texts(browser, server):
    open_page(browser, server.url)
    browser.wait("document.querySelectorAll('#prefixes tr').length > 0")
    assert "<i>A prefix</i>" in browser.text("#prefixes")
    browser.run("document.getElementById('max-tokens').value = 70")
    ask(browser, "Say <u>it</u>")
    browser.wait("!!document.querySelector('.meta')")
    said = browser.text(".said.assistant")
    assert "<img src=x onerror=alert(1)> & <b>bold</b> <script>alert(2)</script>" in said
    assert SPOKEN.startswith(said)
    assert browser.text(".said.user") == "Say <u>it</u>"
    for selector in ("#log img", "#log b", "#log u", "#log script", "#prefixes i"):
        assert browser.run(f"document.querySelectorAll('{selector}').length") == 0
    assert browser.faults == []


def ask(browser, text: str) -> None:
    browser.run("document.getElementById('prompt').focus()")
    browser.type(text)
    browser.press("Enter")


def test_an_answer_streams_and_can_be_stopped_by_keyboard(browser, server):
    open_page(browser, server.url)
    ask(browser, "Hello")
    grown = "document.querySelector('.said.assistant')?.textContent.length"
    length = browser.wait(f"{grown} > 5 ? {grown} : 0")
    assert browser.run("document.getElementById('log').getAttribute('aria-busy')") == "true"
    browser.wait(f"{grown} > {length}")
    browser.press("Tab")  # from the text over the options to the button
    browser.press("Tab")
    assert browser.run("document.activeElement.id") == "stop"
    browser.press("Enter")
    browser.wait("document.querySelector('.meta')?.textContent.startsWith('stopped')")
    assert browser.run("document.getElementById('log').getAttribute('aria-busy')") == "false"
    assert browser.run("document.activeElement.id") == "prompt"
    assert browser.run("document.getElementById('stop').hidden")
    stopped = browser.text(".said.assistant")
    assert len(stopped) < len(SPOKEN)
    with server.http() as http:  # and in the engine nothing runs on
        server.wait_until(lambda: http.get("/dashboard/state").json()["stats"]["num_running"] == 0)
        assert http.get("/dashboard/state").json()["requests"]["abort"] >= 1
    assert browser.faults == []


def test_the_conversation_goes_on_and_can_be_cleared(browser, server):
    open_page(browser, server.url)
    browser.run("document.getElementById('max-tokens').value = 4")
    for turn in (1, 2):
        ask(browser, f"Turn {turn}")
        browser.wait(f"document.querySelectorAll('.meta').length === {turn}")
    assert "cut at max tokens · 4 tokens" in browser.text(".meta")
    assert browser.run("document.querySelectorAll('.said').length") == 4
    browser.run("document.getElementById('clear').click()")
    assert browser.run("document.querySelectorAll('.said').length") == 0
    assert not browser.run("document.getElementById('hint').hidden")


def test_an_error_of_the_server_is_told(browser, server):
    open_page(browser, server.url)
    browser.run("document.getElementById('max-tokens').value = -1")
    browser.run("document.getElementById('ask').noValidate = true")
    ask(browser, "Hello")
    browser.wait("!!document.querySelector('.said.failed')")
    assert "max_tokens" in browser.text(".said.failed")


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_it_fits_and_shows_light_and_dark(browser, server, tmp_path, width):
    shots = []
    for dark in (False, True):
        browser.look(width, 900, dark=dark)
        open_page(browser, server.url)
        assert browser.run("document.documentElement.scrollWidth") <= width
        wide = "[...document.querySelectorAll('main > *, .kpi, button, input, textarea, canvas')]"
        wide += f".filter(e => e.getBoundingClientRect().right > {width} + 0.5).map(e => e.id)"
        assert browser.run(wide) == []
        cut = "[...document.querySelectorAll('.kpi p, h2, dd, button')]"
        cut += ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"
        assert browser.run(cut) == []
        background = browser.run("getComputedStyle(document.body).backgroundColor")
        shots.append((background, browser.screenshot(tmp_path / f"{width}-{dark}.png")))
    (light, one), (dark, other) = shots
    assert light != dark
    assert len(pixels(one)) > 100
    assert len(pixels(other)) > 100
    assert browser.faults == []


def test_everything_that_can_be_used_has_a_name_and_shows_its_focus(browser, server):
    open_page(browser, server.url)
    names = browser.run(
        "[...document.querySelectorAll('button, input, textarea, summary, a, [tabindex]')].map(e => "
        "[e.id || e.className || e.tagName, (e.ariaLabel || e.getAttribute('aria-labelledby') || "
        "e.labels?.[0]?.textContent || e.textContent || '').trim()])"
    )
    assert all(name for _, name in names), names
    reached = []
    for _ in range(40):
        browser.press("Tab")
        reached.append(
            browser.run(
                "(e => [e.id || e.className || e.tagName, getComputedStyle(e).outlineStyle !== 'none' "
                "&& parseFloat(getComputedStyle(e).outlineWidth) >= 2])(document.activeElement)"
            )
        )
        if reached[-1][0] == "send":
            break
    assert [name for name, is_seen in reached if not is_seen] == []
    assert {"skip", "pause", "log", "prompt", "send"} <= {name for name, _ in reached}


def test_with_keys_the_browser_brings_the_one_it_was_given(browser):
    with ServerProcess.fake(config={"api_keys": [KEY]}) as server:
        server.wait_ready()
        open_page(browser, server.url.replace("http://", f"http://anybody:{KEY}@"))
        assert browser.run("document.getElementById('key-form').hidden")
        ask(browser, "Hello")
        browser.wait("!!document.querySelector('.said.assistant')?.textContent")
        assert browser.faults == []


def test_a_key_that_is_not_accepted_any_more_is_asked_for(browser, server):
    open_page(browser, server.url)
    browser.run(
        f"(real => window.fetch = (url, options) => options.headers.Authorization === 'Bearer {KEY}'"
        " ? real(url, options) : Promise.resolve(new Response('', {status: 401})))(window.fetch), 1"
    )
    browser.wait("!document.getElementById('key-form').hidden")
    browser.wait("document.activeElement.id === 'key'")
    browser.type("sk-wrong-0123456789")
    browser.press("Enter")
    browser.wait("document.getElementById('key-problem').textContent")
    browser.wait("document.activeElement.id === 'key'")
    browser.type(KEY)
    browser.press("Enter")
    browser.wait("document.getElementById('key-form').hidden")
    assert browser.text("#status-text") == "ready"
    kept = json.loads(browser.run("JSON.stringify([Object.keys(localStorage), document.cookie])"))
    assert kept == [[], ""]
    assert not any(KEY in url for url in browser.requests)


def test_nobody_looks_nobody_asks(browser, server):
    open_page(browser, server.url)

    def asked() -> int:
        browser.run("1")  # takes in what has happened
        return sum("/dashboard/state" in url for url in browser.requests)

    def rest() -> bool:
        """Whether nothing is asked for longer than the page's interval."""
        before = asked()
        browser.run("new Promise(done => setTimeout(done, 1600))")
        return asked() == before

    browser.run("document.getElementById('pause').click()")
    browser.until(rest, "a paused page is quiet")
    assert browser.run("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
    assert browser.text("#pause") == "Resume"
    before = asked()
    browser.run("document.getElementById('pause').click()")
    browser.until(lambda: asked() > before + 1, "it asks again")

    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    hide += "document.dispatchEvent(new Event('visibilitychange'))"
    browser.run(hide % "true")
    browser.until(rest, "a hidden page is quiet")
    before = asked()
    browser.run(hide % "false")
    browser.until(lambda: asked() > before, "it asks again")


def test_a_server_that_is_gone_is_told_and_found_again(browser):
    with ServerProcess.fake() as server:
        server.wait_ready()
        open_page(browser, server.url)
    browser.wait("document.getElementById('status').dataset.state === 'lost'")
    assert "No answer" in browser.text("#problem")


def test_who_wants_no_motion_gets_none(browser, server):
    browser.look(1280, 900, calm=True)
    open_page(browser, server.url)
    moving = "[...document.querySelectorAll('*')].filter(e => getComputedStyle(e).animationName "
    moving += "!== 'none' || getComputedStyle(e, '::before').animationName !== 'none' "
    moving += "|| parseFloat(getComputedStyle(e).transitionDuration) > 0).map(e => e.id)"
    assert browser.run(moving) == []
