"""A hook of MkDocs: adds to the site what is in no file below `docs`.

That is the API reference, the guides with their output, also as notebooks, and the
pages and figures of the experiments.
"""

from mkdocs.structure.files import File

import keras_softmoe
from experiments.pages import api, embedding, guides, notebooks


def on_config(config):
    """Show the version beside the name."""
    config.site_name = f"{config.site_name} {keras_softmoe.__version__}"
    return config


def on_files(files, config):
    """Add the pages of the API and of the guides, and figures."""
    pages = guides.pages(config.repo_url, config.remote_branch)
    contents = api.pages() | pages | guides.figures() | notebooks.files()
    for path, source in embedding.figures().items():
        contents[path] = source.read_bytes()
    for path, content in contents.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Put pages of the experiments where a page names them."""
    return embedding.with_pages(markdown)
