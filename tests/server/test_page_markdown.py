"""The page's Markdown, in Node: what becomes of a text, and that no text takes long."""

import json
import shutil
import subprocess
from collections.abc import Callable
from math import isqrt
from pathlib import Path
from typing import Any

import pytest
from repeated import holds

NODE = shutil.which("node")
SCRIPT = Path(__file__).parents[2] / "graphdecode" / "server" / "page" / "markdown.js"
RUN = """
const given = JSON.parse(require("fs").readFileSync(0, "utf8"));
const { script, texts } = given;
const markdown = new Function(`${script}; return markdown`)();
const microseconds = () => Object.values(process.cpuUsage()).reduce((a, b) => a + b);
const timed = (text) => {
  const began = microseconds();
  markdown(text);
  return microseconds() - began;
};
const told = given.repeats
  ? texts.map((text) => Math.min(...Array.from({ length: given.repeats }, () => timed(text))))
  : texts.map(markdown);
console.log(JSON.stringify(told));
"""
pytestmark = pytest.mark.skipif(NODE is None, reason="no node")


def run(**given: Any) -> Any:
    assert NODE is not None
    told = json.dumps({"script": SCRIPT.read_text(), **given})
    ran = subprocess.run([NODE, "-e", RUN], input=told, capture_output=True, text=True, check=True, timeout=240)
    return json.loads(ran.stdout)


def trees_of(*texts: str) -> list[list[Any]]:
    return list(run(texts=texts))


def takes_time_in_proportion(texts_of: Callable[[int], list[str]], length: int) -> None:
    """Compare texts with ones four times as long, by processor time; those that took too long again."""
    pairs, slow = list(zip(texts_of(length), texts_of(4 * length), strict=True)), [""]

    def are_fast(_: int) -> bool:
        less, more = (run(texts=texts, repeats=3) for texts in zip(*pairs, strict=True))
        room = max(less)  # collecting garbage takes long beside texts that take next to no time
        # sixteen times as much, were it the square
        late = [each for each in zip(pairs, less, more, strict=True) if each[2] >= 8 * each[1] + room]
        pairs[:] = [pair for pair, *_ in late]
        slow[:] = [f"{text[:12]!r}...{text[-12:]!r}: {short} us, then {long} us" for (text, _), short, long in late]
        return not late

    assert holds(are_fast), slow


def shown(text: str, node: list[Any]) -> str:
    """One node in short: its tag with what is in it, texts as they are."""
    if isinstance(node[0], int):
        return text[node[0] : node[1]]
    tag, attributes, children = node
    told = "".join(f" {name}={value}" for name, value in attributes.items() if name in ("href", "start") or value)
    return f"<{tag}{told}>{''.join(shown(text, child) for child in children)}</>"


CASES = {
    "plain": "<p>plain</>",
    "one\ntwo\n\nthree": "<p>one<br></>two</><p>three</>",
    "**a *b* c** and *d*, _e_, ***f***, ~~g~~": (
        "<p><strong>a <em>b</> c</> and <em>d</>, <em>e</>, <em><strong>f</></>, <del>g</></>"
    ),
    "snake_case_name and 2 * 3 * 4 and **open": "<p>snake_case_name and 2 * 3 * 4 and **open</>",
    "`**a**` \\*b\\*": "<p><code>**a**</> *b*</>",
    "### Three": "<h3>Three</>",
    "#hash": "<p>#hash</>",
    "```py\na = 1\n\n  b\n```\nafter": "<pre data-language=py><code>a = 1\n\n  b\n</></><p>after</>",
    "~~~\n```\n~~~": "<pre><code>```\n</></>",
    "```\nstill <b>": "<pre><code>still <b></></>",
    "- a\n  - b\n- c": "<ul><li><p>a</><ul><li><p>b</></></></><li><p>c</></></>",
    "3. a\n\n   ```\n   x\n     y\n   ```\n4. b": (
        "<ol start=3><li><p>a</><pre><code>x\n  y\n</></></><li><p>b</></></>"
    ),
    "> a\n> > b": "<blockquote><p>a</><blockquote><p>b</></></>",
    "a\n\n---\nb": "<p>a</><hr></><p>b</>",
    "| a | b |\n|:-:|---|\n| | `c` |": "<table><tr><th>a</><th>b</></><tr><td></><td><code>c</></></></>",
    "[x](https://a.b/c_d)": "<p><a href=https://a.b/c_d target=_blank rel=noopener noreferrer>x</></>",
    "[x](javascript:alert(1)) [y](data:text/html,z)": "<p>[x](javascript:alert(1)) [y](data:text/html,z)</>",
    "![i](https://a.b/c.png)": "<p>!<a href=https://a.b/c.png target=_blank rel=noopener noreferrer>i</></>",
    "<script>alert(1)</script>": "<p><script>alert(1)</script></>",
    # a fence of tildes may tell of backticks; one of backticks may not
    "~~~ a`b c\n*x*\n~~~": "<pre data-language=a`b><code>*x*\n</></>",
    "``` a`\nb": "<p>``` a`<br></>b</>",
    "| 1||3|\n|-|-|-|\n|a\\|b|`c\\|d`||\n**e** | f\\\\|": (
        "<table><tr><th>1</><th></><th>3</></><tr><td>a|b</><td><code>c|d</></><td></></>"
        "<tr><td><strong>e</></><td>f\\</></></>"
    ),
    "``a`b`` and `` `c` `` and ``d`": "<p><code>a`b</> and <code>`c`</> and ``d`</>",
    "**a\nb** `c\nd` [e\nf](https://a.b)": (
        "<p><strong>a<br></>b</> <code>c<br></>d</> "
        "<a href=https://a.b target=_blank rel=noopener noreferrer>e<br></>f</></>"
    ),
    "> *a\n> b*\n>\n> - `c\n>   d`": "<blockquote><p><em>a<br></>b</></><ul><li><p><code>c<br></>d</></></></></>",
    "*a **b** c* **d *e***, ***f** g*, **`h*i`**": (
        "<p><em>a <strong>b</> c</> <strong>d <em>e</></>, <em><strong>f</> g</>, <strong><code>h*i</></></>"
    ),
    "__init__ *a **b* c, 2*": "<p>__init__ <em>a **b</> c, 2*</>",
    "[x](https://a.b/c_(d)_e) [y [z](https://a.b) w](https://c.d)": (
        "<p><a href=https://a.b/c_(d)_e target=_blank rel=noopener noreferrer>x</> "
        "[y <a href=https://a.b target=_blank rel=noopener noreferrer>z</> w](https://c.d)</>"
    ),
    "It was in\n1986. A year\n- b": "<p>It was in<br></>1986. A year</><ul><li><p>b</></></>",
    "So\n1) a\n2) b\n\nand\n\n7) c": (
        "<p>So</><ol start=1><li><p>a</></><li><p>b</></></><p>and</><ol start=7><li><p>c</></></>"
    ),
    "": "",
}


def test_usual_markdown_becomes_few_kinds_of_elements_and_all_else_stays_text() -> None:
    found = ["".join(shown(text, node) for node in tree) for text, tree in zip(CASES, trees_of(*CASES), strict=True)]
    assert dict(zip(CASES, found, strict=True)) == CASES


def leaves(nodes: list[Any]) -> list[tuple[int, int]]:
    return [leaf for node in nodes for leaf in ([(node[0], node[1])] if isinstance(node[0], int) else leaves(node[2]))]


def test_texts_come_in_their_order_which_is_what_the_odds_of_tokens_need() -> None:
    for tree in trees_of(*CASES):
        places = [place for leaf in leaves(tree) for place in leaf]
        assert places == sorted(places)


def test_no_answer_takes_long_or_nests_without_end() -> None:
    signs = ("*a ", "[", "`", "> ", "- ", "- a\n", "_a", "**a *b ", "|", "~~a", "* * ", "[a](", "\\", "|-\n", "```\n")
    takes_time_in_proportion(lambda length: [sign * (length // len(sign)) for sign in signs], 15_000)


def hostile_texts(n: int) -> list[str]:
    repeated = "`~|:- \t*_#>[](){}\\<&1.a="
    texts = [sign * n + end for sign in repeated for end in ("", "`", "x", "\\", " x")]
    texts += [
        f"{start}{sign * n}{end}"
        for start in ("```", "~~~", "- ", "[a](", "|", "`a")
        for sign in "x~ |-("
        for end in "`) "
    ]
    texts += [
        pair * (n // len(pair))
        for pair in ("](a", "](a(", "]()", "[a](b(c)", "*a_", "a**", "``a`", "`a``", "\\|", "- * ")
    ]
    texts += [
        "[a](x" + "](y)" * (n // 4),
        "*a " * (n // 6) + "b* " * (n // 6),
        "a\n" + "|-" * n + "x",
        "a|b\n" + "-|" * n + "x",
    ]
    texts += [" ".join("`" * length + "a" for length in range(1, isqrt(2 * n))), "*" * n + "a" + "*" * n]
    return texts


def test_a_hostile_text_takes_time_in_proportion_to_its_length() -> None:
    takes_time_in_proportion(hostile_texts, 10_000)
