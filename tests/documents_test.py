#!/usr/bin/env python3
"""What the documents say about the tree is so: examples, links, pictures and equation numbers."""

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
CITED = re.compile(r"\b(?:eq\.|equations?) (\d+)(?: (?:to|and) (\d+))?")
CITED_PAGE = re.compile(r"\b[\w/-]*\w\.md\b")
DEFINED = re.compile(r"^    \((\d+)\)", re.MULTILINE)


def read(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8")


def documents() -> list[pathlib.Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def sources() -> list[pathlib.Path]:
    files = [p for folder in ("include", "src", "tests") for p in (ROOT / folder).rglob("*")]
    return sorted(p for p in files if p.suffix in {".h", ".cc"})


class Documents(unittest.TestCase):
    def test_the_readme_shows_the_example_that_is_built(self):
        shown = f"```cpp\n{read(ROOT / 'examples/consumer/main.cc')}```"
        self.assertTrue(shown in read(ROOT / "README.md"), "copy examples/consumer/main.cc into README.md")

    def test_links_lead_somewhere(self):
        seen = 0
        for document in documents():
            for target in LINK.findall(CODE_BLOCK.sub("", read(document))):
                if "://" in target:
                    continue
                seen += 1
                self.assertTrue((document.parent / target).exists(), f"{document.name} links to {target}")
        self.assertGreater(seen, 5)

    def test_pictures_are_what_the_script_draws(self):
        for script in ("docs/draw_pattern.py", "bench/plot.py"):
            self.assertEqual(subprocess.call([sys.executable, str(ROOT / script), "--check"]), 0, script)

    def test_cited_equations_exist(self):
        defined = set(DEFINED.findall(read(ROOT / "docs/semantics.md")))
        self.assertEqual(defined, {str(i) for i in range(1, 9)})
        cited = 0
        for source in sources():
            for numbers in CITED.findall(read(source)):
                for number in filter(None, numbers):
                    cited += 1
                    self.assertIn(number, defined, f"{source.relative_to(ROOT)} cites equation {number}")
        self.assertGreater(cited, 3, "hardly any equation is cited: does the pattern still fit the comments?")

    def test_code_cites_pages_that_are_here(self):
        for source in sources():
            for page in CITED_PAGE.findall(read(source)):
                self.assertTrue((ROOT / page).exists(), f"{source.relative_to(ROOT)} cites {page}")


if __name__ == "__main__":
    unittest.main()
