"""Reports that people look at, from what a run of `python -m jspec.experiment` has left.

`read_workdir` reads a folder, `make_report` makes a list of blocks of it (headings, tables,
pictures), and `write_report` writes them as Markdown, as one HTML page, and as picture files.
"""
