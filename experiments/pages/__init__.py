"""The generated parts of README.md and of the pages below `docs`."""
