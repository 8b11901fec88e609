"""Generated tables are up to date, links lead somewhere, and the generator writes what it should."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import make_docs  # noqa: E402

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))


def test_generated_tables_are_up_to_date(capsys):
    assert make_docs.main(["--check"]) == 0, capsys.readouterr().out


def test_a_block_is_replaced_between_its_markers(monkeypatch):
    monkeypatch.setitem(make_docs.TABLES, "two", lambda: "| a |\n|---|")
    text = "before\n<!-- generated: two -->\nold\n<!-- end -->\nafter\n"
    new = make_docs.filled(text)
    assert new == "before\n<!-- generated: two -->\n| a |\n|---|\n<!-- end -->\nafter\n"
    assert make_docs.filled(new) == new


def test_what_a_mechanism_names_in_all_is_exported_but_its_records():
    text = make_docs.layers(("gla", "retention"))
    assert "from regard.mixers.gla import GatedLinearAttention, GLADecay\n" in text
    assert '    "Retention",\n' in text and "records" not in text.replace("their records", "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_page_on_checkpoints_names_every_family():
    from regard.models import LAYOUTS

    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE)
    found = [name for cell in named for name in re.findall(r"`([\w-]+)`", cell)]
    assert sorted(found) == sorted([*LAYOUTS, "model_type"])
