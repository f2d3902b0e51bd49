"""The page keeps strangers' strings as text, and asks for nothing from the network."""

import base64
import hashlib
import json
import re

import pytest

from moe_parallel.analysis.report.page_file import SCRIPTS, escaped, json_in_html, page_of

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>&lt;img src=x onerror=alert(1)>",
    "quotes \" and ' and \\",
    "\u2028\u2029\0",
    "half a pair: \ud800",
    "@@DATA@@",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_json_ends_no_element_and_is_the_same_text(text):
    found = json_in_html({text: [text]})
    assert not set("<>&") & set(found)
    assert json.loads(found) == {text: [text]}
    found.encode("utf-8")


def test_a_number_that_json_does_not_have_is_refused():
    with pytest.raises(ValueError, match="Out of range float"):
        json_in_html([float("nan")])


def test_escaped():
    assert escaped('<a href="x">&amp;') == "&lt;a href=&quot;x&quot;&gt;&amp;amp;"
    assert escaped("\udc80") == "?"


def test_the_policy_allows_this_program_alone():
    page = page_of({"runs": [], "scaling": [], "plans": [], "command": ""}, "</title>@@STYLE@@")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert page.count("<script") == 2 and page.count("</script>") == 2
    assert "<title>&lt;/title&gt;@@STYLE@@</title>" in page
    outside = re.findall(r"(?:src|href)=\"(?!#|data:)", page) + re.findall(r"url\(", page)
    assert outside == ["url("]  # the clip path of a chart: url(#id)
    assert re.findall(r"https?://[^\"'` ]+", page) == ["http://www.w3.org/2000/svg"]


def test_every_part_is_used():
    from importlib import resources

    folder = resources.files("moe_parallel.analysis.report") / "page"
    names = {each.name for each in folder.iterdir()}
    assert names == {*SCRIPTS, "page.html", "page.css"}
    for name in SCRIPTS:
        assert (folder / name).read_text(encoding="utf-8").count("\n") <= 400, name
