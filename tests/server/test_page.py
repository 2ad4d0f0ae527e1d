"""The page at `/`, in a real browser."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from demo_copies import demo_copy
from served import Served, serving

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PICTURES = os.environ.get("GRAPHDECODE_PICTURES")  # a folder for what the browser shows, to be looked at
KEY = "secret"

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo with room for seconds of answer."""
    folder = demo_copy(tmp_path_factory.mktemp("roomy") / "demo", config={"max_position_embeddings": 65536})
    options = ("--api-key", KEY, "--max-batch-size", "4", "--max-sequence-length", "32768")
    with serving(*options, model=str(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
    with playwright.sync_playwright() as started:
        made = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield made
        made.close()


@pytest.fixture
def page(served: Served, browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    opened = context.new_page()
    opened.complaints = []
    opened.on("console", lambda message: opened.complaints.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.goto(served.address)
    opened.wait_for_function("() => document.getElementById('model').textContent.startsWith('demo')")
    yield opened
    context.close()


def picture(page: Any, name: str) -> None:
    if PICTURES:
        page.screenshot(path=str(Path(PICTURES) / f"{name}.png"))


def ask(page: Any, text: str, *, key: str = KEY) -> None:
    page.evaluate("() => document.getElementById('settings').open = true")
    page.fill("#key", key)
    page.fill("#temperature", "0")
    page.fill("#text", text)
    page.press("#text", "Enter")


def answer_of(page: Any) -> str:
    page.wait_for_function("() => !document.getElementById('send').disabled")
    return str(page.inner_text(".turn.assistant:last-child p")).strip()


def test_a_question_is_answered_and_each_token_shows_its_probability(page: Any) -> None:
    ask(page, "417+385=")
    assert answer_of(page) == "802"
    assert "tokens/s" in page.inner_text("#speed")
    page.hover(".turn.assistant .token >> nth=0")
    assert "%" in page.inner_text("#odds")
    picture(page, "answer")
    assert page.complaints == []


def test_conversations_are_listed_and_survive_a_reload(page: Any) -> None:
    ask(page, "12+30=")
    assert answer_of(page) == "42"
    page.click("#new")
    ask(page, "rev oceanic=")
    assert answer_of(page) == "cinaeco"
    page.reload()
    page.wait_for_selector("#list li >> nth=1")
    page.click("#list li:nth-child(2) button:first-child")
    assert page.inner_text(".turn.assistant p").strip() == "cinaeco"
    page.click("#list li:nth-child(1) button:first-child")
    assert page.inner_text(".turn.assistant p").strip() == "42"
    page.click("#list li:nth-child(1) button:last-child")
    assert page.locator("#list li").count() == 1


def test_stop_ends_an_answer_and_frees_its_row(served: Served, page: Any) -> None:
    page.evaluate("() => document.getElementById('settings').open = true")
    page.fill("#max_tokens", "32000")
    page.fill("#temperature", "3")
    page.fill("#key", KEY)
    for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
        page.fill("#text", "abc")
        page.route("**/v1/**", lambda route: route.continue_(post_data=_without_end(route.request.post_data)))
        page.press("#text", "Enter")
        page.wait_for_selector(".turn.assistant .token")
        stop()
        page.wait_for_function("() => !document.getElementById('send').disabled")
        served.until_idle()


def test_a_longest_answer_beyond_the_context_is_what_fits(page: Any) -> None:
    page.evaluate("() => document.getElementById('settings').open = true")
    page.fill("#max_tokens", "40000")
    ask(page, "12+30=")
    assert answer_of(page) == "42"


def test_an_answer_that_its_limit_cuts_says_so_and_ends_in_a_whole_character(page: Any) -> None:
    page.evaluate("() => document.getElementById('settings').open = true")
    page.fill("#max_tokens", "2")
    ask(page, "417+385=")
    assert answer_of(page) == "80"
    assert "limit" in page.inner_text(".turn.assistant small")
    choices = [{"text": "so"}, {"text": "\ufffd", "finish_reason": "length"}]
    stream = "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices) + "data: [DONE]\n\n"
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream))
    ask(page, "12+30=")
    assert answer_of(page) == "so"
    assert page.locator(".turn.assistant small").count() == 2
    page.unroute("**/v1/completions")
    page.fill("#max_tokens", "1024")
    ask(page, "12+30=")
    assert answer_of(page) == "42"
    assert page.locator(".turn.assistant small").count() == 2
    page.reload()
    page.wait_for_selector(".turn.assistant small >> nth=1")
    picture(page, "cut")


def test_a_reload_during_an_answer_shows_what_was_there(served: Served, page: Any) -> None:
    ask(page, "12+30=")
    assert answer_of(page) == "42"
    page.click("#new")
    page.fill("#max_tokens", "32000")
    page.route("**/v1/**", lambda route: route.continue_(post_data=_without_end(route.request.post_data)))
    ask(page, "rev oceanic=")
    page.wait_for_selector(".turn.assistant .token >> nth=20")
    page.reload()
    page.wait_for_selector(".turn.assistant small")
    assert page.inner_text(".turn.user p").strip() == "rev oceanic="
    assert page.inner_text(".turn.assistant p").strip().startswith("cinaeco")
    assert page.locator("#list li:nth-child(2) [aria-current=true]").count() == 1
    served.until_idle()
    picture(page, "reloaded")


def _without_end(body: str) -> str:
    return body[:-1] + ',"ignore_eos":true}'


def test_a_request_has_what_the_user_has_set_and_nothing_else(page: Any) -> None:
    sent: list[dict[str, Any]] = []

    def look(route: Any) -> None:
        sent.append(json.loads(route.request.post_data))
        route.continue_()

    page.route("**/v1/**", look)
    page.evaluate("() => document.getElementById('settings').open = true")
    page.fill("#key", KEY)
    assert page.get_attribute("#temperature", "placeholder") == "0 (the model's)"
    page.fill("#text", "417+385=")
    page.press("#text", "Enter")
    assert answer_of(page) == "802", "the demo's own temperature is 0"
    page.fill("#top_k", "3")
    page.fill("#text", "417+385=")
    page.press("#text", "Enter")
    answer_of(page)
    fields = {"model", "prompt", "stream", "stream_options", "logprobs", "max_tokens"}
    assert [set(body) for body in sent] == [fields, fields | {"top_k"}]


MARKDOWN = """# Title
Some **bold** and `code`, <img src=x onerror=alert(1)>.

```python
print("<b>hi</b>")
```

- one
  - two
1. [a link](https://example.com/) and [none](javascript:alert(1))

| a | b |
|---|---|
| 1 | 2 |
"""


def test_an_answer_is_markdown_whose_tokens_show_their_probability(page: Any) -> None:
    page.evaluate(
        """(text) => {
          state.hasTemplate = true;
          const tokens = text.match(/[^]{1,3}/g).map((each) => ({ text: each, odds: [[each, -0.5]] }));
          conversation().turns.push({ role: "user", content: text }, { role: "assistant", content: text, tokens });
          show();
        }""",
        MARKDOWN,
    )
    answer = ".turn.assistant > div"
    assert page.inner_text(".turn.user p") == MARKDOWN
    assert page.inner_text(f"{answer} h1") == "Title"
    assert page.inner_text(f"{answer} strong") == "bold"
    assert page.inner_text(f"{answer} pre code") == 'print("<b>hi</b>")\n'
    assert page.get_attribute(f"{answer} pre", "data-language") == "python"
    assert page.inner_text(f"{answer} li li") == "two"
    assert page.eval_on_selector_all(f"{answer} a", "all => all.map(each => each.href)") == ["https://example.com/"]
    assert page.eval_on_selector_all(f"{answer} :is(td, th)", "all => all.map(e => e.textContent)") == list("ab12")
    assert page.locator(f"{answer} img, {answer} b").count() == 0
    page.hover(f"{answer} pre .token >> nth=0")
    assert "60.7 %" in page.inner_text("#odds")
    picture(page, "markdown")
    assert page.complaints == []


def test_reasoning_is_dimmed_before_the_answer_and_sent_back_with_it(page: Any) -> None:
    deltas = [{"reasoning_content": "Let me "}, {"reasoning_content": "add."}, {"content": "It is "}, {"content": "2."}]
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    sent: list[dict[str, Any]] = []

    def reply(route: Any) -> None:
        sent.append(json.loads(route.request.post_data))
        route.fulfill(content_type="text/event-stream", body=stream)

    page.route("**/v1/chat/completions", reply)
    page.evaluate("() => { state.hasTemplate = true; }")
    ask(page, "1+1=")
    page.wait_for_function("() => !document.getElementById('send').disabled")
    thought = page.locator(".turn.assistant details.thought")
    assert thought.get_attribute("open") is None  # closed by the answer
    assert thought.locator("p").text_content() == "Let me add."
    assert page.inner_text(".turn.assistant > div > p").strip() == "It is 2."
    page.reload()
    page.wait_for_selector("details.thought")
    page.evaluate("() => { state.hasTemplate = true; }")
    ask(page, "2+2=")
    page.wait_for_function("() => !document.getElementById('send').disabled")
    answer = {"role": "assistant", "content": "It is 2.", "reasoning_content": "Let me add."}
    assert sent[1]["messages"] == [{"role": "user", "content": "1+1="}, answer, {"role": "user", "content": "2+2="}]
    picture(page, "reasoning")


def test_a_wrong_key_is_an_error_and_the_message_stays_in_the_input(page: Any) -> None:
    ask(page, "1+1=", key="wrong")
    page.wait_for_selector("#error:not([hidden])")
    assert "API key" in page.inner_text("#error")
    page.wait_for_function("() => !document.getElementById('send').disabled")
    assert page.input_value("#text") == "1+1="
    assert page.locator(".turn").count() == 0
    ask(page, "12+30=")
    assert answer_of(page) == "42"
    assert page.locator(".turn.user").count() == 1


def test_the_machine_is_shown_as_it_runs(page: Any) -> None:
    ask(page, "sort zebra=")
    assert answer_of(page) == "aberz"
    page.wait_for_selector("#buckets .bar")
    figures = page.inner_text("#figures")
    assert "pages used" in figures
    assert "floor" not in figures, "the demo's weights fit into a cache"
    picture(page, "machine")


def test_it_works_on_a_phone_and_by_keyboard(served: Served, browser: Any) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844})
    phone = context.new_page()
    phone.goto(served.address)
    phone.wait_for_function("() => document.getElementById('model').textContent.startsWith('demo')")
    assert phone.evaluate("() => document.activeElement.id") == "text"
    assert phone.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert not phone.is_visible("#machine")
    phone.click("#toggle-machine")
    assert phone.is_visible("#machine")
    picture(phone, "phone-machine")
    phone.click("#toggle-machine")
    phone.keyboard.press("Tab")
    ask(phone, "12+30=")
    assert answer_of(phone) == "42"
    picture(phone, "phone")
    names = phone.evaluate(
        "() => [...document.querySelectorAll('button,input,textarea')].filter(e => e.offsetParent).map(e =>"
        " e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label'))"
    )
    assert all(names)
    context.close()


def test_the_page_needs_nothing_from_elsewhere(served: Served) -> None:
    page = httpx.get(served.address)
    assert "default-src 'self'" in page.headers["content-security-policy"]
    folder = Path(__file__).parents[2] / "graphdecode" / "server" / "page"
    for file in folder.iterdir():
        text = file.read_text()
        assert "http://" not in text
        assert "https://" not in text
        assert httpx.get(f"{served.address}/page/{file.name}").text == text
    assert httpx.get(f"{served.address}/page/../app.py").status_code == 404
