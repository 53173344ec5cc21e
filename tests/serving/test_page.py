"""The page in a real Chromium: colours, figures, side by side, 400 pixels, the keyboard."""

import shutil
import time

import pytest

from jspec.generation.costs import RoundCosts
from jspec.generation.request import SamplingParams
from tests.serving.served import Served, load_tiny

webdriver = pytest.importorskip("selenium.webdriver")
Keys = webdriver.Keys
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="needs Chromium"),
]


@pytest.fixture(scope="module")
def served():
    numbers = (0, 1, 3, 7)
    seconds = tuple(1 + number / 100 for number in numbers)
    costs = RoundCosts((64,), numbers, ("prompt_lookup",), ((seconds,),), ((0.0,),))
    generator = load_tiny(num_draft_tokens="auto", costs=costs)
    with Served(generator) as server:
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
    number = len(find(driver, ".assistant"))
    find(driver, "#text")[0].send_keys(text + "\n")
    served.wait_until(lambda: len(find(driver, ".assistant")) > number)
    served.wait_until(lambda: find(driver, "#send")[0].is_enabled())
    return driver.execute_script("return [...document.querySelectorAll('.assistant')].at(-1)"
                                 ".textContent")  # fmt: skip


def choose(driver, mode):
    find(driver, f"input[value={mode}]")[0].click()


def test_a_chat_has_colours_and_figures(served, browser):
    """Each token by its origin, as the traces of the same answer say; plainly without any."""
    expected = served.generator.generate("abcabc", SamplingParams(max_new_tokens=60))
    find(browser, "#most")[0].clear()
    find(browser, "#most")[0].send_keys("60")
    assert ask(served, browser, "abcabc") == expected.text
    stats = expected.stats
    kinds = [
        traced["next"] if traced["draft_ids"] else "plain" for traced in rounds_of_newest(served)
    ]
    # The prefill drew the first token.
    count_of = {"plain": 1 + kinds.count("plain"), "residual": kinds.count("residual"),
           "bonus": kinds.count("bonus"), "drafted": stats.num_accepted}  # fmt: skip
    assert {kind: len(find(browser, f".assistant .{kind}")) for kind in count_of} == count_of
    assert min(count_of.values()) > 0
    line = text_of(browser, ".live")
    assert f"{len(expected.token_ids)} tokens" in line
    # A batch of one row may draft another number than one of three: the server's own counts.
    newest = served.updates[-1].job
    proposed = sum(traced.num_proposed for update in served.updates if update.job is newest
                   for traced in update.rounds)  # fmt: skip
    assert f"{stats.num_accepted} of {proposed} drafts accepted" in line
    assert f"{stats.tokens_per_target_call:.2f} tokens a call" in line
    assert find(browser, ".error") == []
    find(browser, "#clear")[0].click()
    choose(browser, "plain")
    assert ask(served, browser, "abcabc") == expected.text, "plain greedy text is the same"
    assert find(browser, ".assistant .drafted") == []
    assert "1.00 tokens a call" in text_of(browser, ".live")


def rounds_of_newest(served):
    return served.traces.find(served.updates[-1].job.reply_id)["answers"][0]["rounds"]


def test_drafts_and_plain_decoding_stand_side_by_side(served, browser):
    """The same text twice, one by fewer calls; below each other where the window is narrow."""
    choose(browser, "both")
    text = ask(served, browser, "abcabc")
    columns = find(browser, ".column")
    served.wait_until(lambda: find(browser, "#send")[0].is_enabled())
    shown = "return [...document.querySelectorAll('.assistant')].map(e => e.textContent)"
    assert browser.execute_script(shown) == [text] * 2
    assert len(find(browser, ".column:first-child .drafted")) > 0
    assert find(browser, ".column:last-child .drafted") == []
    assert "1.00 tokens a call" in columns[1].text.splitlines()[-1]
    assert columns[0].location["y"] == columns[1].location["y"]
    narrow(browser)
    assert columns[0].location["x"] == columns[1].location["x"]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 400


def test_the_dashboard_says_what_metrics_say(served, browser):
    """Slots, pages and queue while the device is held, with more asked for than there are slots."""
    served.gate.clear()
    try:
        long = {"prompt": "abc", "max_tokens": 180, "min_tokens": 180}
        connections = [served.open("/v1/completions", long) for _ in range(5)]
        while served.scheduler.num_running < 3 or served.scheduler.num_waiting != 2:
            served.gate.set()
            time.sleep(0.001)
            served.gate.clear()
        served.wait_until(lambda: "3 of 3 slots taken" in text_of(browser, "#server"))
        served.wait_until(lambda: "2 waiting" in text_of(browser, "#server"))
        share = served.scheduler.slots.usage
        assert f"{round(100 * share)} % of pages held" in text_of(browser, "#server")
        bars = browser.execute_script("return [...document.querySelectorAll('meter')]"
                                      ".map(e => e.value)")  # fmt: skip
        assert bars == pytest.approx([1.0, share])
        assert share > 0
    finally:
        served.gate.set()
    for connection in connections:
        assert connection.getresponse().status == 200
        connection.close()
    served.wait_until(lambda: "0 of 3 slots taken" in text_of(browser, "#server"))
    assert "0 % of pages held" in text_of(browser, "#server")


def test_the_keyboard_is_enough(served, browser):
    """From the page's begin: Tab and arrows find everything; Enter sends, Escape stops."""

    def press(*keys):
        webdriver.ActionChains(browser).send_keys(*keys).perform()

    def back(count):
        actions = webdriver.ActionChains(browser).key_down(Keys.SHIFT)
        actions.send_keys(Keys.TAB * count).key_up(Keys.SHIFT).perform()

    def focus():
        return browser.execute_script("const e = document.activeElement; return e.id || e.value")

    press(Keys.TAB)
    assert focus() == "text"
    press("abcabc", Keys.ENTER)
    served.wait_until(lambda: find(browser, ".drafted + *"))
    served.wait_until(lambda: find(browser, "#send")[0].is_enabled())
    seen = []
    for _ in range(6):
        press(Keys.TAB)
        seen.append(focus())
    assert seen == ["send", "clear", "drafts", "temperature", "most", "key"]
    back(3)
    press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert focus() == "both"
    assert browser.execute_script("return document.activeElement.checked")
    back(1)
    assert focus() == "clear"
    press(Keys.ENTER)
    assert find(browser, ".message") == []
    back(2)
    assert focus() == "text"
    served.gate.clear()
    try:
        press("abcabc", Keys.ENTER)
        served.wait_until(lambda: served.scheduler.num_running == 1)
        press(Keys.ESCAPE)
        served.wait_until(lambda: find(browser, "#send")[0].is_enabled())
    finally:
        served.gate.set()
    served.wait_until(lambda: served.scheduler.num_running == 0)
    assert served.updates[-1].chunk.result.finish_reason == "cancelled"
    assert find(browser, ".error") == []


def narrow(browser):
    size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


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
    narrow(browser)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 400


def test_an_error_is_shown(served, browser):
    ask(served, browser, "x" * 300)
    assert "fewer tokens than the context's 200" in find(browser, ".error")[0].text
    assert find(browser, "#text")[0].get_attribute("value") == "x" * 300, "it can be sent again"


def last_prompt(served):
    return served.generator.target.tokenizer.decode(served.updates[-1].job.request.prompt)


def test_what_failed_or_was_cleared_is_in_no_later_prompt(served, browser):
    """A message that was too long, one that was stopped before it began, one cleared on the way."""
    find(browser, "#most")[0].clear()
    find(browser, "#most")[0].send_keys("8")
    ask(served, browser, "x" * 300)
    assert find(browser, ".error")
    find(browser, "#text")[0].clear()
    assert ask(served, browser, "one")
    assert last_prompt(served) == "[user]one[assistant]"
    for button in ("#stop", "#clear"):
        served.gate.clear()
        try:
            find(browser, "#text")[0].send_keys("two\n")
            served.wait_until(lambda: served.scheduler.num_running == 1)
            find(browser, button)[0].click()
            served.wait_until(lambda: find(browser, "#send")[0].is_enabled())
        finally:
            served.gate.set()
        served.wait_until(lambda: served.updates[-1].chunk.result is not None)
        time.sleep(0.1)  # until the gate is passed
        kept = find(browser, "#text")[0].get_attribute("value")
        assert kept == ("two" if button == "#stop" else "")
        find(browser, "#text")[0].clear()
    assert find(browser, ".message") == []
    answer = ask(served, browser, "three")
    assert last_prompt(served) == "[user]three[assistant]"
    ask(served, browser, "four")
    assert last_prompt(served).startswith(f"[user]three[assistant]{answer}[user]four")


def test_an_answer_that_was_cut_says_so(served, browser):
    find(browser, "#most")[0].clear()
    find(browser, "#most")[0].send_keys("3")
    ask(served, browser, "abc")
    assert text_of(browser, ".live").endswith(", cut off by a limit")
