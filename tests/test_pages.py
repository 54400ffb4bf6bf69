"""The documentation: its tables are of today, links lead somewhere, it builds."""

import ast
import html.parser
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

from experiments import pages
from experiments.pages import guides, notebooks

ROOT = Path(__file__).resolve().parents[1]
# Elements that a browser loads by itself, and where they say what.
LOADED = {
    "img": "src",
    "script": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
}


class Page(html.parser.HTMLParser):
    """Links, anchors and loaded files of a page of the site."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loaded, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found.get("id"), found.get("name")}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        target = found.get(LOADED.get(tag))
        if target and not (tag == "link" and found.get("rel") == "canonical"):
            self.loaded.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The directory of the built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def written():
    return pages.written()


def test_what_is_generated_is_of_today(written):
    for path, expected in written.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        assert text == expected, f"{path}: run `python -m experiments.pages`"


def test_the_site_shows_every_recorded_figure(site):
    figures = guides.figures()
    assert len(figures) > 20
    for path, content in figures.items():
        assert (site / path).read_bytes() == content, path
        guide = path.split("/")[-1].rsplit("_", 2)[0]
        assert path.removeprefix("guides/") in guides.page(guide)


def test_notebooks_have_the_code_and_the_output_of_the_guides():
    for name in guides.names():
        notebook = notebooks.notebook(name)
        nbformat.validate(notebook)
        guide = ast.parse((guides.GUIDES / f"{name}.py").read_text(encoding="utf-8"))
        texts = (ast.Expr, ast.Constant)
        guide.body = [
            node
            for node in guide.body
            if (type(node), type(getattr(node, "value", None))) != texts
        ]
        assert ast.unparse(ast.parse(notebooks.code(notebook))) == ast.unparse(guide)
        _, *cells = (c for c in notebook.cells if c.cell_type == "code")
        shown = [output for cell in cells for output in cell.outputs]
        recorded = guides.recorded_run(name)["cells"]
        texts = [cell["output"] + "\n" for cell in recorded if cell["output"]]
        assert [o.text for o in shown if o.output_type == "stream"] == texts
        pictures = [figure for cell in recorded for figure in cell["figures"]]
        assert [o.data["image/png"] for o in shown if "data" in o] == pictures


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_links_of_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert len(links) > 30
    for link in links:
        assert (ROOT / link).exists(), link


def test_files_named_in_extend_exist():
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:keras_softmoe|tests|experiments|presets)/[\w./]*)`", text)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_examples_of_docstrings_are_below_their_heading():
    """Or they do not render: a line of `>>>` is a quotation in Markdown."""
    for file in (ROOT / "keras_softmoe").rglob("*.py"):
        lines = file.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if re.match(" *Examples?:$", line):
                indent = len(line) - len(line.lstrip())
                wanted = " " * (indent + 4)
                text = f"{file}:{number + 1}: `Examples:`, and its code indented"
                assert line.strip() == "Examples:", text
                assert lines[number + 1].startswith(wanted), text


def test_no_link_of_the_site_is_dead(site):
    found = {file: Page(file.read_text("utf-8")) for file in site.rglob("*.html")}
    assert len(found) > 40
    count = 0
    for file, page in found.items():
        if file.name == "404.html":
            continue
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (
                (file.parent / unquote(parts.path)).resolve() if parts.path else file
            )
            assert target.exists(), f"{file}: {link}"
            if parts.fragment and target.suffix == ".html":
                anchors = found[target].anchors
                assert unquote(parts.fragment) in anchors, f"{file}: {link}"
            count += 1
    assert count > 1000


def test_the_site_loads_nothing_from_another_host(site):
    for file in site.rglob("*.html"):
        for target in Page(file.read_text("utf-8")).loaded:
            assert not urlsplit(target).netloc, f"{file}: {target}"
    for file in site.rglob("*.css"):
        for target in re.findall(
            r"(?:url\(|@import)\s*['\"]?([^'\")]+)", file.read_text()
        ):
            assert not re.match("(https?:)?//", target), f"{file}: {target}"
