"""A hook of MkDocs: adds to the site what is in no file below `docs`.

That is the API reference, the guides with their output, also as notebooks, the tables
of all presets, and what tests measured.
"""

import re

from mkdocs.structure.files import File

import keras_softmoe
from benchmarks import tables as speed
from experiments import measured
from experiments.pages import ROOT, api, guides, notebooks, presets


def on_config(config):
    """Show the version beside the name."""
    config.site_name = f"{config.site_name} {keras_softmoe.__version__}"
    return config


def on_files(files, config):
    """Add the pages of the API and of the guides, and figures."""
    pages = guides.pages(config.repo_url, config.remote_branch)
    contents = api.pages() | pages | guides.figures() | notebooks.files()
    path = "concepts/soft_moe_in_60_lines"
    code = (ROOT / f"docs/{path}.py").read_text(encoding="utf-8")
    contents[f"{path}.md"] = f"# Soft MoE in 60 lines\n\n```python\n{code}```\n"
    for path, content in contents.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Put long tables in their places, `<!-- table: TITLE -->`."""
    if "<!-- table: " not in markdown:
        return markdown
    tables = {
        **presets.on_the_site(),
        **speed.on_the_site(),
        "exports": measured.exports(),
        "families": measured.families(),
    }
    return re.sub("<!-- table: (.*) -->", lambda match: tables[match[1]], markdown)
