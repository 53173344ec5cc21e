"""Reports on what a run of `python -m jspec.experiment` has left: numbers, tables and figures.

`read_workdir` reads a folder, `make_report` makes a list of blocks of it (headings, tables,
pictures), and `write_report` writes them as Markdown, as one HTML page, and as picture files.
A report states what was measured and how sure it is; it gives no advice.
"""
