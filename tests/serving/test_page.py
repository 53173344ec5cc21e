"""The page in a real Chromium: colours, figures, the plain switch, 400 pixels, the keyboard."""

import shutil

import pytest

from jspec.generation.costs import RoundCosts
from jspec.generation.request import Settings
from tests.serving.served import Served, load_tiny

webdriver = pytest.importorskip("selenium.webdriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="needs Chromium"),
]


@pytest.fixture(scope="module")
def served():
    numbers = (0, 1, 3, 7)
    seconds = tuple(1 + number / 100 for number in numbers)
    costs = RoundCosts((64,), numbers, ("prompt_lookup",), ((seconds,),), ((0.0,),))
    own = load_tiny(num_draft_tokens="auto", costs=costs)
    with Served(own) as server:
        yield server


@pytest.fixture
def browser(served):
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.get(f"http://127.0.0.1:{served.port}/")
    served.wait_until(lambda: "slots taken" in text_of(driver, "#server"))
    yield driver
    driver.quit()


def find(driver, selector):
    return driver.find_elements("css selector", selector)


def text_of(driver, selector):
    return driver.execute_script(
        "return document.querySelector(arguments[0]).textContent", selector
    )


def ask(served, driver, text):
    """Sends a message by the keyboard; returns the answer's text."""
    number = len(find(driver, ".assistant"))
    find(driver, "#text")[0].send_keys(text + "\n")
    served.wait_until(lambda: len(find(driver, ".assistant")) > number)
    served.wait_until(lambda: find(driver, "#send")[0].is_enabled())
    return driver.execute_script("return [...document.querySelectorAll('.assistant')].at(-1)"
                                 ".textContent")  # fmt: skip


def test_a_chat_has_colours_and_figures(served, browser):
    expected = served.generator.generate("abcabc", Settings(max_new_tokens=60))
    find(browser, "#most")[0].clear()
    find(browser, "#most")[0].send_keys("60")
    assert ask(served, browser, "abcabc") == expected.text
    stats = expected.stats
    assert len(find(browser, "span.drafted")) - 1 == stats.num_accepted > 0  # one is the legend's
    line = text_of(browser, "#live")
    assert f"{len(expected.token_ids)} tokens" in line
    assert f"{stats.num_accepted} of {stats.num_proposed} drafts accepted" in line
    assert f"{stats.tokens_per_target_call:.2f} tokens a call" in line
    assert find(browser, ".error") == []
    find(browser, "#clear")[0].click()
    find(browser, "#plain")[0].click()
    assert ask(served, browser, "abcabc") == expected.text, "plain greedy text is the same"
    assert len(find(browser, "span.drafted")) == 1


def test_a_text_is_shown_as_it_is(served, browser):
    """Guards against words that become markup."""
    ask(served, browser, "<b id=bold>hello</b>")
    assert find(browser, "#bold") == []
    assert "<b id=bold>" in text_of(browser, ".user")


def test_nothing_is_loaded_from_elsewhere_and_a_telephone_is_wide_enough(served, browser):
    names = browser.execute_script("return performance.getEntriesByType('resource').map(e=>e.name)")
    assert names
    assert all(name.startswith(f"http://127.0.0.1:{served.port}/") for name in names)
    ask(served, browser, "x" * 150)
    size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 400


def test_an_error_is_shown(served, browser):
    ask(served, browser, "x" * 300)
    assert "fewer tokens than the context's 200" in find(browser, ".error")[0].text
