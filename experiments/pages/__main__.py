"""Write what is generated and committed in the documentation.

    python -m experiments.pages              # tables, in seconds
    python -m experiments.pages --pictures   # first draw the routings anew
    python -m experiments.pages --guides [NAMES] [--short]  # first run guides, or all

Tables stand between the lines `<!-- TITLE: begin -->` and `<!-- TITLE: end -->`, and
come from the JSON of experiments and benchmarks and the metadata of presets, as do the
heads of the presets' cards, which hubs read. `--short` runs guides with as few images
and steps as the tests do.
"""

import argparse

from experiments.pages import ROOT, guides, pictures, written
from keras_softmoe.files import atomic_file


def main(arguments=None):
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", action="store_true", help="draw the routings")
    parser.add_argument("--guides", nargs="*", metavar="NAME", help="run these guides")
    parser.add_argument("--short", action="store_true", help="run them in short")
    options = parser.parse_args(arguments)
    if options.pictures:
        pictures.draw(ROOT / "docs")
    if options.guides is not None:
        for name in options.guides or guides.names():
            guides.record(name, options.short)
            print(f"{name}: recorded", flush=True)
    for path, text in written().items():
        with atomic_file(ROOT / path) as file:
            file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
