"""The page's files and the state they read: types, headers, keys, and nothing from elsewhere."""

import asyncio
import re
from pathlib import Path

import pytest

import jaxserve.server.dashboard
from jaxserve.server.config import key_digest
from jaxserve.server.dashboard.files import FILES
from tests.server.conftest import serving

FOLDER = Path(jaxserve.server.dashboard.__file__).parent
KEY = "sk-right-0123456789"


def run(check):
    asyncio.run(check())


def test_every_file_of_the_page_is_served_with_its_type():
    async def check():
        async with serving() as http:
            for path, (name, media_type) in FILES.items():
                reply = await http.get(path)
                assert reply.status_code == 200
                assert reply.headers["content-type"] == media_type
                assert reply.content == (FOLDER / name).read_bytes()
                assert (await http.head(path)).content == b""

    run(check)


def test_every_file_in_the_folder_is_listed():
    found = {path.name for path in FOLDER.iterdir() if path.suffix not in (".py", "")}
    assert found == {name for name, _ in FILES.values()}


def test_a_browser_that_has_a_file_is_not_sent_it_again():
    async def check():
        async with serving() as http:
            etag = (await http.get("/dashboard/page.js")).headers["etag"]
            reply = await http.get("/dashboard/page.js", headers={"if-none-match": etag})
            assert (reply.status_code, reply.content) == (304, b"")
            other = await http.get("/dashboard/page.js", headers={"if-none-match": '"old"'})
            assert other.status_code == 200

    run(check)


def test_the_page_may_run_and_load_only_its_own_files():
    async def check():
        async with serving() as http:
            for path in FILES:
                headers = (await http.get(path)).headers
                policy = dict(
                    one.strip().partition(" ")[::2]
                    for one in headers["content-security-policy"].split(";")
                )
                assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
                assert policy["script-src"] == policy["style-src"] == policy["connect-src"]
                assert policy["script-src"] == "'self'"
                assert headers["x-content-type-options"] == "nosniff"
                assert headers["referrer-policy"] == "no-referrer"

    run(check)


@pytest.mark.parametrize("name", [name for name, _ in FILES.values()])
def test_a_file_names_no_other_host_and_makes_no_html_of_texts(name):
    text = (FOLDER / name).read_text()
    hosts = set(re.findall(r"(?:https?:)?//([\w.-]+\.\w+)", text)) - {"www.w3.org"}  # SVG's name
    assert not hosts
    risky = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc"
    assert not re.findall(risky, text)
    if name.endswith(".html"):
        assert not re.findall(r"\son\w+=|<style|\sstyle=|<script(?![^>]* src=)", text)
        # Every id that a script reads is there, once.
        scripts = "".join((FOLDER / f"{one}.js").read_text() for one in ("page", "charts", "chat"))
        asked = set(re.findall(r'\$\("([\w-]+)"\)|(?:say|width)\("([\w-]+)"', scripts))
        for wanted in {one for pair in asked for one in pair if one}:
            assert text.count(f'id="{wanted}"') == 1, wanted


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(scheme):
    css = (FOLDER / "style.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", css, re.DOTALL)[:2]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
    if scheme == "dark":
        colours |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", dark))
    for text in ("text", "quiet", "bad", "accent"):
        for behind in ("card", "bg", "soft"):
            assert contrast(colours[text], colours[behind]) >= 4.5, text
    assert contrast(colours["text"], colours["user"]) >= 4.5
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
    assert contrast(colours["accent"], colours["bg"]) >= 3  # the ring of the focus
    used = [colours[name] for name in ("owned", "shared", "cached", "free")]
    assert len(set(used)) == 4


def test_with_keys_the_page_and_what_it_shows_need_one():
    async def check():
        async with serving(api_key_digests=[key_digest(KEY)]) as http:
            for path in (*FILES, "/dashboard/state"):
                assert (await http.get(path)).status_code == 401
                key = {"authorization": f"Bearer {KEY}"}
                assert (await http.get(path, headers=key)).status_code == 200
                assert (await http.get(path, auth=("anybody", KEY))).status_code == 200

    run(check)


def test_nodashboard():
    async def check():
        async with serving(dashboard=False) as http:
            for path in (*FILES, "/dashboard/state"):
                assert (await http.get(path)).status_code == 404

    run(check)


@pytest.mark.parametrize("since", ["-1", "x", "1.5", "", "9" * 17, str(2**53 + 1), "\u0661"])
def test_a_step_number_that_is_none_is_refused(since):
    async def check():
        async with serving() as http:
            reply = await http.get("/dashboard/state", params={"since": since})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "since"

    run(check)
