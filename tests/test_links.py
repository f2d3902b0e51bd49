"""Every relative link in the Markdown files leads to a file, and to a heading if it names one."""

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.*)", re.MULTILINE)


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading: its words in lower case, joined by dashes."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@functools.cache
def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in HEADING.findall(prose(page))}


def is_dead(link: str, page: Path) -> bool:
    path, _, name = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return True
    return bool(name) and target.suffix == ".md" and name not in anchors(target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page: Path) -> None:
    links = [link for link in LINK.findall(prose(page)) if not re.match("[a-z]+:", link)]
    assert [link for link in links if is_dead(link, page)] == []


def test_it_sees_dead_links(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Hangs: `--hang-timeout`\n\n## [A link](other.md) in a heading\n")
    assert anchors(page) == {"hangs---hang-timeout", "a-link-in-a-heading"}
    dead = [
        link
        for link in ("#hangs---hang-timeout", "page.md#nothing", "page.md", "other.md")
        if is_dead(link, page)
    ]
    assert dead == ["page.md#nothing", "other.md"]
