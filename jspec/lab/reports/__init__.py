"""Reports on what a run of `python -m jspec.experiment` has left: numbers, tables and figures.

A report states what was measured and how sure it is; it gives no advice.
"""
