"""One browser for all tests of the page; without Chromium they are skipped, and say so."""

from collections.abc import Iterator

import pytest

from tests.server.dashboard.browser import Browser, find_chromium


@pytest.fixture(scope="session")
def the_browser() -> Iterator[Browser]:
    if find_chromium() is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(the_browser: Browser) -> Browser:
    """The browser, with nothing in it from the test before."""
    the_browser.look(1280, 900)
    the_browser.call("Page.navigate", url="about:blank")
    the_browser.wait("location.href === 'about:blank'")
    the_browser.faults.clear()
    the_browser.requests.clear()
    return the_browser
