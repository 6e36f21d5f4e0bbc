"""The documents: as long as they may be, with links that lead somewhere, and with the code that the scripts have."""

import re

import pytest
from harness import ROOT

ENGLISH, CHINESE = "README.md", "README.zh-CN.md"
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", read(name), re.M | re.S)


def without_comments(block):
    lines = (re.sub(r"(^|\s+)# .*", "", line).rstrip() for line in block.splitlines())
    return [line for line in lines if line]


def test_readme_is_short():
    assert len(read(ENGLISH).splitlines()) <= 150


@pytest.mark.parametrize("language", ["sh", "python"])
def test_commands_in_chinese_are_the_english_ones(language):
    english, chinese = ([without_comments(block) for block in blocks(name, language)] for name in (ENGLISH, CHINESE))
    assert english and english == chinese


def test_loop_is_the_scripts():
    (loop,) = blocks(ENGLISH, "python")
    assert loop in read("ddp_torchrun.py")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_files(name):
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", read(name), flags=re.M | re.S))
    here = (ROOT / name).parent
    local = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    assert [link for link in local if not (here / link).exists()] == []
